//! From the run file's `[data]` to an opened dataset, and from a batch on the host to one on the device.

use std::path::Path;

use espalier_plan::data::{DatasetSource, HeldOut, TokenType};
use espalier_plan::{DataFacts, RunFile};
use espalier_tensor::machine::memory_left;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::augment::Augmentation;
use crate::error::{FEWER, FEWER_IMAGES};
use crate::files::{learnt_images, total};
use crate::image_formats::{image_files, images};
use crate::tokens::check_disjoint;
use crate::{
    Arithmetic, Dataset, DocumentDataset, Error, ImageDataset, ImageFolder, Inputs, RowSettings, Shapes,
    TextFiles, TokenDataset, TokenWidth, TokenWindows, Tokenizer, cifar, idx,
};

impl Dataset {
    /// Opens the data that a run file names; reads its `[data]`, its seed, and the model's context and
    /// vocabulary. What is held in memory must fit there, unless the file says not to ask.
    pub fn open(run: &RunFile) -> Result<Dataset, Error> {
        Dataset::open_with_progress(run, &mut |_, _| ())
    }

    /// The same; where reading takes long, `progress` learns how many bytes of how many have been read.
    pub fn open_with_progress(run: &RunFile, progress: &mut dyn FnMut(u64, u64)) -> Result<Dataset, Error> {
        let left = if run.device.check_memory { memory_left() } else { None };
        Dataset::open_within(run, left, progress)
    }

    /// What a model must know of the data that a run file names; images that would be drawn or decoded are not.
    pub fn facts_of(run: &RunFile) -> Result<DataFacts, Error> {
        match run.data.source {
            DatasetSource::Shapes { size, .. } => Ok(Shapes::facts(size)),
            // However long a sequence is, so many of these could be made.
            DatasetSource::Arithmetic { .. } => {
                Ok(DataFacts { vocab: Some(Tokenizer::Arithmetic.vocab()), ..DataFacts::default() })
            }
            DatasetSource::Images { ref folder } => ImageFolder::facts_of(folder),
            _ => Ok(Dataset::open(run)?.facts()),
        }
    }

    /// The same as [`Dataset::open`] with so many bytes of memory.
    fn open_within(
        run: &RunFile,
        left: Option<u64>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Dataset, Error> {
        let (validation, validation_paths) = match &run.data.held_out {
            HeldOut::Fraction { validation } => (*validation, None),
            HeldOut::Files { validation_path } => (0.0, Some(validation_path)),
        };
        let fits = |name: &Path, needed: u64, advice| match left {
            Some(left) if needed > left => Err(Error::TooLarge { path: name.into(), needed, left, advice }),
            _ => Ok(()),
        };
        let augmentation = Augmentation {
            seed: run.seed,
            padding: run.data.variation.padding.unwrap_or(0),
            flip: run.data.variation.flip.unwrap_or(false),
        };
        let windows = || TokenWindows { seq: run.model.context().unwrap_or(1), validation, seed: run.seed };
        Ok(match &run.data.source {
            DatasetSource::Text { path, tokenizer, extensions } => {
                let (paths, extensions) = (path.clone(), extensions.clone());
                let text = TextFiles { paths, extensions, tokenizer: tokenizer.clone() };
                let mapped = "token files (`data.kind` = \"tokens\") are not held in memory";
                fits(&text.paths[0], total(&Dataset::files(&run.data)?)?, mapped)?;
                Dataset::Tokens(TokenDataset::text(&text, validation_paths.map(Vec::as_slice), windows())?)
            }
            DatasetSource::Jsonl { path, tokenizer, loss_on, pack } => {
                let rows = "fewer or shorter rows need less";
                fits(&path[0], total(&Dataset::files(&run.data)?)?, rows)?;
                let tokenizer = match tokenizer {
                    Some(path) => Tokenizer::open(path)?,
                    None => Tokenizer::Bytes,
                };
                let (settings, held_out) =
                    (RowSettings { loss_on: *loss_on, pack: *pack }, validation_paths.map(Vec::as_slice));
                Dataset::Documents(DocumentDataset::rows(
                    path,
                    held_out,
                    tokenizer,
                    settings,
                    windows(),
                    progress,
                )?)
            }
            DatasetSource::Tokens { path, dtype } => {
                let width = match dtype {
                    TokenType::U16 => TokenWidth::U16,
                    TokenType::U32 => TokenWidth::U32,
                };
                let vocab = run.model.vocab().expect("a run file with token files says how many there are");
                Dataset::Tokens(TokenDataset::files(
                    path,
                    validation_paths.map(Vec::as_slice),
                    width,
                    vocab,
                    windows(),
                )?)
            }
            source @ (DatasetSource::Idx { .. } | DatasetSource::Cifar10 { .. }) => {
                let learnt = learnt_images(source)?;
                // At least: what is zipped is looked at again when its header is known.
                fits(&learnt[0], total(&Dataset::files(&run.data)?)?, FEWER_IMAGES)?;
                let raw = match source {
                    DatasetSource::Cifar10 { path } => cifar::read(path)?,
                    _ => idx::read_pair(&learnt[0], &learnt[1])?,
                };
                let images = match validation_paths {
                    None => ImageDataset::new(raw, validation)?,
                    Some(paths) => {
                        check_disjoint(
                            &learnt,
                            &paths
                                .iter()
                                .map(|path| image_files(path))
                                .collect::<Result<Vec<_>, _>>()?
                                .concat(),
                        )?;
                        ImageDataset::with_validation(
                            raw,
                            paths.iter().map(|path| images(path)).collect::<Result<_, _>>()?,
                        )?
                    }
                };
                Dataset::Images(images.with_pixels(&run.data.pixels)?.augmented(augmentation))
            }
            DatasetSource::Images { folder } => {
                let flip = augmentation.flip;
                let images = ImageFolder::open(folder, flip, &run.data.held_out, run.seed, progress)?;
                Dataset::Folder(images.with_pixels(None, &run.data.pixels)?)
            }
            &DatasetSource::Shapes { count, size } => {
                let shapes = Shapes { count, size, seed: run.seed };
                fits(Path::new("data.shapes"), shapes.bytes(), FEWER)?;
                let images = ImageDataset::shapes(&shapes, validation)?.with_pixels(&run.data.pixels)?;
                Dataset::Images(images.augmented(augmentation))
            }
            &DatasetSource::Arithmetic { count, digits } => {
                let arithmetic = Arithmetic { count, digits: digits as u32, seed: run.seed };
                fits(Path::new("data.arithmetic"), arithmetic.least_bytes(), FEWER)?;
                Dataset::Tokens(TokenDataset::arithmetic(&arithmetic, windows())?)
            }
        })
    }
}

impl Inputs {
    /// Copies the inputs to a device, images in the type that its kernels compute in.
    pub fn upload(&self, device: &Device, dtype: DType) -> espalier_tensor::Result<Tensor> {
        match self {
            Inputs::Tokens { ids, shape } => Tensor::from_slice(device, shape, ids, Category::Transient),
            Inputs::Images(images) => images.upload(device, dtype),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Before any of it is read, whatever kind it is.
    #[test]
    fn files_that_do_not_fit_into_memory_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let idx = |magic: u8, sizes: &[u8], bytes: usize| {
            let head = [0, 0, 8, magic].into_iter().chain(sizes.iter().flat_map(|n| [0, 0, 0, *n]));
            head.chain(std::iter::repeat_n(1, bytes)).collect::<Vec<u8>>()
        };
        fs::write(at("train-images-idx3-ubyte"), idx(3, &[8, 10, 10], 800)).unwrap();
        fs::write(at("train-labels-idx1-ubyte"), idx(1, &[8], 8)).unwrap();
        (1..=5).for_each(|i| fs::write(at(&format!("data_batch_{i}.bin")), vec![1; 3073]).unwrap());
        fs::write(at("text.md"), "words ".repeat(100)).unwrap();
        let folder = folder.path().display();
        let (cnn, gpt) = ("\"simple-cnn\"", "\"gpt\"\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 8");
        let pair = [("images", "train-images-idx3-ubyte"), ("labels", "train-labels-idx1-ubyte")];
        let pair = pair.map(|(field, name)| format!("{field} = \"{folder}/{name}\"")).join("\n");
        let kinds = [
            (cnn, format!("\"idx\"\npath = \"{folder}\""), 832),
            (cnn, format!("\"idx\"\n{pair}"), 832),
            ("\"resnet8\"", format!("\"cifar10\"\npath = \"{folder}\""), 5 * 3073),
            (gpt, format!("\"text\"\npath = \"{folder}/text.md\""), 600),
        ];
        for (model, data, bytes) in kinds {
            let text =
                format!("[model]\nname = {model}\n[data]\nkind = {data}\n[train]\nsteps = 1\nbatch = 1");
            let run = RunFile::parse(&text, &[]).unwrap_or_else(|why| panic!("{text}: {why}"));
            let refused = Dataset::open_within(&run, Some(bytes - 1), &mut |_, _| ()).unwrap_err();
            assert!(
                matches!(refused, Error::TooLarge { needed, .. } if needed == bytes),
                "{data}: {refused}"
            );
            Dataset::open_within(&run, Some(bytes), &mut |_, _| ()).unwrap();
        }
    }
}

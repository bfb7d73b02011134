//! From the run file's `[data]` to an opened dataset, and from a batch on the host to one on the device.

use std::path::Path;

use espalier_plan::RunFile;
use espalier_plan::config::{HeldOut, IdxFiles, Source, TokenType};
use espalier_tensor::machine::memory_left;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::{Category, DType, Device, Tensor};

use super::error::FEWER;
use super::{Arithmetic, Dataset, Error, Images, Inputs, Shapes, Text, Tokens, Width, Windows};

impl Dataset {
    /// Opens the data that a run file names; reads its `[data]`, its seed, and the model's context and vocabulary. What
    /// is held in memory must fit there, unless the file says not to ask.
    pub fn open(run: &RunFile) -> Result<Dataset, Error> {
        let (validation, apart) = match &run.data.held_out {
            HeldOut::Share { validation } => (*validation, None),
            HeldOut::Files { validation_path } => (0.0, Some(validation_path)),
        };
        let left = if run.device.check_memory { memory_left() } else { None };
        let fits = |name: &Path, needed: u64, advice| match left {
            Some(left) if needed > left => Err(Error::TooLarge { path: name.into(), needed, left, advice }),
            _ => Ok(()),
        };
        let windows = || Windows { seq: run.model.context().unwrap_or(1), validation, seed: run.seed };
        Ok(match &run.data.source {
            Source::Text { path, tokenizer, extensions } => {
                let (paths, extensions) = (path.clone(), extensions.clone());
                let text = Text { paths, extensions, tokenizer: tokenizer.clone() };
                fits(
                    &text.paths[0],
                    text.bytes()?,
                    "token files (`data.kind` = \"tokens\") are not held in memory",
                )?;
                Dataset::Tokens(Tokens::text(&text, apart.map(Vec::as_slice), windows())?)
            }
            Source::Tokens { path, dtype } => {
                let width = match dtype {
                    TokenType::U16 => Width::U16,
                    TokenType::U32 => Width::U32,
                };
                let vocab = run.model.vocab().expect("a run file with token files says how many there are");
                Dataset::Tokens(Tokens::files(path, apart.map(Vec::as_slice), width, vocab, windows())?)
            }
            Source::Idx { files: IdxFiles::Folder { path } } => {
                Dataset::Images(Images::idx(path, validation)?)
            }
            Source::Idx { files: IdxFiles::Pair { images, labels } } => {
                Dataset::Images(Images::idx_pair(images, labels, validation)?)
            }
            Source::Cifar10 { path } => Dataset::Images(Images::cifar10(path, validation)?),
            &Source::Shapes { count, size } => {
                let shapes = Shapes { count, size, seed: run.seed };
                fits(Path::new("data.shapes"), shapes.bytes(), FEWER)?;
                Dataset::Images(Images::shapes(&shapes, validation)?)
            }
            &Source::Arithmetic { count, digits } => {
                let sums = Arithmetic { count, digits: digits as u32, seed: run.seed };
                fits(Path::new("data.arithmetic"), sums.least_bytes(), FEWER)?;
                Dataset::Tokens(Tokens::arithmetic(&sums, windows())?)
            }
        })
    }
}

impl Inputs {
    /// Copies the inputs to a device, images in the type that its kernels compute in.
    pub fn upload(&self, device: &Device, dtype: DType) -> espalier_tensor::Result<Tensor> {
        match self {
            Inputs::Tokens { ids, shape } => Tensor::from_slice(device, shape, ids, Category::Activations),
            Inputs::Images { pixels, shape } => {
                let pixels = Tensor::from_slice(device, shape, pixels, Category::Activations)?;
                if dtype == DType::F32 { Ok(pixels) } else { cast(&pixels, dtype, Category::Activations) }
            }
        }
    }
}

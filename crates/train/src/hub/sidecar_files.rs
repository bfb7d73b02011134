//! What stands beside the weights, so that other programs know what they are: a configuration, a tokenizer,
//! and how pixels become numbers. With them the folder of a checkpoint whose tensors are unsharded is one of
//! Hugging Face's.

use std::path::{Path, PathBuf};

use espalier_data::regular_file::{self, RECORDS, SETTINGS};
use espalier_data::{CIFAR10_CLASSES, Dataset, PictureFrame, PixelStats, SHAPES, Tokenizer};
use espalier_plan::Plan;
use espalier_plan::data::DatasetSource;
use espalier_plan::spec::{Input, Precision};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::architecture::OurModel;
use super::{CONFIG, TOKENIZER, families};
use crate::checkpoint::SidecarFile;
use crate::{Error, Result};

pub(super) const GENERATION: &str = "generation_config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";
const PREPROCESSOR: &str = "preprocessor_config.json";
/// The names of classes, in the order of their labels.
const CLASSES: &str = "classes.json";

/// How pixels, of 0 to 255, become numbers, and what of a picture is seen: as image processors of transformers
/// read it.
#[derive(Serialize, Deserialize)]
struct Preprocessor {
    do_rescale: bool,
    do_normalize: bool,
    image_mean: Vec<f64>,
    image_std: Vec<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    crop: Option<CenterCrop>,
}

/// The middle of a picture that is resized first.
#[derive(Serialize, Deserialize)]
struct CenterCrop {
    do_resize: bool,
    size: ShortestEdge,
    do_center_crop: bool,
    crop_size: CropSize,
    /// 2: bilinear.
    resample: u32,
}

#[derive(Serialize, Deserialize)]
struct ShortestEdge {
    shortest_edge: usize,
}

#[derive(Serialize, Deserialize)]
struct CropSize {
    height: usize,
    width: usize,
}

/// How a model reads images.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ImageInput {
    /// How pixels are standardised, where that is known.
    pub standard: Option<PixelStats>,
    /// What is seen of a picture of any size, where that is known.
    pub frame: Option<PictureFrame>,
    /// The names of classes, in the order of their labels, where they have some.
    pub classes: Option<Vec<String>>,
}

/// The files beside the weights of a run's checkpoints. A tokenizer that the data does not know is that of
/// what the run starts `from`.
pub fn sidecar_files(plan: &Plan, dataset: &Dataset, from: Option<&Path>) -> Result<Vec<SidecarFile>> {
    let dtype = match plan.storage.precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
    };
    match dataset {
        Dataset::Tokens(_) | Dataset::Documents(_) => for_text(plan, dtype, dataset.tokenizer(), from, false),
        Dataset::Images(images) => {
            let names = match plan.data.source {
                DatasetSource::Cifar10 { .. } => Some(CIFAR10_CLASSES),
                DatasetSource::Shapes { .. } => Some(SHAPES),
                _ => None,
            };
            let classes = names.map(|names| names.map(String::from).to_vec());
            Ok(for_images(&ImageInput { standard: Some(images.standard().clone()), frame: None, classes }))
        }
        Dataset::Folder(folder) => Ok(for_images(&ImageInput {
            standard: Some(folder.standard().clone()),
            frame: Some(folder.frame()),
            classes: Some(folder.classes().to_vec()),
        })),
    }
}

/// Those of a model of images.
pub(super) fn for_images(input: &ImageInput) -> Vec<SidecarFile> {
    let ImageInput { standard, frame, classes } = input;
    let preprocessor = standard.as_ref().map(|standard| preprocessor(standard, *frame));
    let classes = classes.as_ref().map(|classes| json_file(CLASSES, &json!(classes), false));
    preprocessor.into_iter().chain(classes).collect()
}

/// Those of a text model whose weights are of a type that PyTorch calls `dtype`. From `source_folder`, beside
/// which they are made, travel along how the model is to generate (temperature, top_k and the like) and
/// how a conversation becomes a text. Names of weights have the `prefix` of transformers' class, or not:
/// without it, it takes a separate head for one that it does not know.
pub(super) fn for_text(
    plan: &Plan,
    dtype: &str,
    tokenizer: Option<&Tokenizer>,
    source_folder: Option<&Path>,
    prefix: bool,
) -> Result<Vec<SidecarFile>> {
    let mut files = Vec::new();
    let end = tokenizer.and_then(Tokenizer::end);
    let theirs = generation_of(source_folder)?;
    let network = OurModel { model: &plan.network, vocab: plan.model.classes, dtype, end };
    let config = families::describe(&network).map(|(_, config)| config);
    let config = config.filter(|config| prefix || config["tie_word_embeddings"] == true);
    if let Some(config) = &config {
        files.push(json_file(CONFIG, config, true));
    }
    if config.is_some() || theirs.is_some() {
        // What is handed on must be there for whoever goes on from this checkpoint, whatever its ranks hold.
        let needs_unsharded_weights = theirs.is_none();
        let mut generation = theirs.unwrap_or_default();
        for key in ["bos_token_id", "eos_token_id"] {
            let known = generation.get(key).is_some_and(|id| !id.is_null());
            if !known {
                generation.insert(key.into(), json!(end));
            }
        }
        files.push(json_file(GENERATION, &generation.into(), needs_unsharded_weights));
    }
    let source = match tokenizer.and_then(Tokenizer::path) {
        Some(path) => Some(path.to_owned()),
        None => source_folder.and_then(Tokenizer::in_folder),
    };
    let joined = source.as_deref().map(Tokenizer::joined).transpose()?.flatten();
    let written = tokenizer.and_then(Tokenizer::to_json).or(joined);
    let file = |name: &str, bytes| SidecarFile { name: name.into(), bytes, needs_unsharded_weights: false };
    let read = |path: &Path| regular_file::read(path, RECORDS).map_err(|why| Error::unread(path, why));
    let folders = [source.as_deref().and_then(Path::parent), source_folder];
    let mut templates = folders.into_iter().flatten().map(|folder| folder.join(CHAT_TEMPLATE));
    if let Some(path) = templates.find(|path| path.is_file()) {
        files.push(file(CHAT_TEMPLATE, read(&path)?));
    }
    let tokenizer_config = source.as_ref().map(|path| path.with_file_name(TOKENIZER_CONFIG));
    match (written, &source) {
        (Some(text), _) => files.push(file(TOKENIZER, text.into_bytes())),
        (None, Some(path)) => files.push(file(TOKENIZER, read(path)?)),
        (None, None) => return Ok(files),
    }
    match tokenizer_config.filter(|path| path.is_file()) {
        Some(path) => files.push(file(TOKENIZER_CONFIG, read(&path)?)),
        None => {
            let Input::Tokens { seq, .. } = plan.model.input else { return Ok(files) };
            let mut config = json!({
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": seq,
                "clean_up_tokenization_spaces": false,
            });
            if let Some((end, _)) = tokenizer.and_then(Tokenizer::end_token) {
                config["eos_token"] = json!(end);
            }
            files.push(json_file(TOKENIZER_CONFIG, &config, false));
        }
    }
    Ok(files)
}

/// How pixels were standardised, and what of a picture is seen.
fn preprocessor(standard: &PixelStats, frame: Option<PictureFrame>) -> SidecarFile {
    let PixelStats { mean, std } = standard.clone();
    let crop = frame.map(|PictureFrame { shape: [height, width, _], resize }| CenterCrop {
        do_resize: true,
        size: ShortestEdge { shortest_edge: resize },
        do_center_crop: true,
        crop_size: CropSize { height, width },
        resample: 2,
    });
    let written =
        Preprocessor { do_rescale: false, do_normalize: true, image_mean: mean, image_std: std, crop };
    json_file(PREPROCESSOR, &serde_json::to_value(written).expect("plain data"), false)
}

/// How the model in a folder is to generate text, where it says so.
fn generation_of(folder: Option<&Path>) -> Result<Option<Map<String, Value>>> {
    let Some(path) = folder.map(|folder| folder.join(GENERATION)).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    let text = regular_file::read(&path, SETTINGS).map_err(|why| Error::unread(&path, why))?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|why| Error::file(path, format!("it is no JSON object: {why}")))
}

/// How the weights in a folder read images, as far as it says so as we do.
pub fn image_input_of(folder: &Path) -> Result<ImageInput> {
    let mut input = ImageInput::default();
    if let Some((path, classes)) = read_json(folder, CLASSES)? {
        input.classes = Some(serde_json::from_value(classes).map_err(|why| Error::file(path, why))?);
    }
    let Some((path, written)) = read_json(folder, PREPROCESSOR)? else { return Ok(input) };
    // Image processors of other kinds say less, or say it otherwise.
    if ["do_rescale", "do_normalize", "image_mean", "image_std"].iter().any(|field| written[field].is_null())
    {
        return Ok(input);
    }
    let channels = written["image_mean"].as_array().map_or(0, Vec::len);
    let Preprocessor { do_rescale, do_normalize, image_mean: mean, image_std: std, crop } =
        serde_json::from_value(written).map_err(|why| Error::file(&path, why))?;
    // Others give means of pixels of 0 to 1.
    let scale = if do_rescale { 255.0 } else { 1.0 };
    let scaled = |values: Vec<f64>| values.into_iter().map(|value| scale * value).collect();
    input.standard = do_normalize.then(|| PixelStats { mean: scaled(mean), std: scaled(std) });
    input.frame = crop.filter(|crop| crop.do_resize && crop.do_center_crop).map(|crop| {
        let CropSize { height, width } = crop.crop_size;
        PictureFrame::new([height, width, channels], crop.size.shortest_edge)
    });
    Ok(input)
}

/// A file of a folder, and what it holds; none where it is not there.
fn read_json(folder: &Path, name: &str) -> Result<Option<(PathBuf, Value)>> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    let text = regular_file::read(&path, SETTINGS).map_err(|why| Error::unread(&path, why))?;
    let value =
        serde_json::from_slice(&text).map_err(|why| Error::file(&path, format!("it is not JSON: {why}")))?;
    Ok(Some((path, value)))
}

fn json_file(name: &str, value: &Value, needs_unsharded_weights: bool) -> SidecarFile {
    let bytes = serde_json::to_vec_pretty(value).expect("plain data");
    SidecarFile { name: name.into(), bytes, needs_unsharded_weights }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn images_are_read_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let standard = PixelStats { mean: vec![101.3, 1.0 / 3.0], std: vec![7.7, 64.1] };
        let frame = Some(PictureFrame::new([24, 20, 2], 30));
        let classes = Some(vec!["a cat".into(), "a dog".into()]);
        let written = ImageInput { standard: Some(standard), frame, classes };
        for file in for_images(&written) {
            fs::write(folder.path().join(&file.name), &file.bytes).unwrap();
        }
        assert_eq!(image_input_of(folder.path()).unwrap(), written);
        fs::remove_file(folder.path().join(CLASSES)).unwrap();
        let theirs =
            json!({ "do_rescale": true, "do_normalize": true, "image_mean": [0.5], "image_std": [0.25] });
        fs::write(folder.path().join(PREPROCESSOR), theirs.to_string()).unwrap();
        let standard = Some(PixelStats { mean: vec![127.5], std: vec![63.75] });
        assert_eq!(image_input_of(folder.path()).unwrap(), ImageInput { standard, ..ImageInput::default() });
        // Of another type it is not as if nothing were said.
        let wrong =
            json!({ "do_rescale": 1, "do_normalize": true, "image_mean": [0.5], "image_std": [0.25] });
        fs::write(folder.path().join(PREPROCESSOR), wrong.to_string()).unwrap();
        let error = image_input_of(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("preprocessor_config.json: invalid type: integer `1`, expected a boolean"),
            "{error}"
        );
    }
}

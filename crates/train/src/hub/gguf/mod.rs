//! A GGUF file from any checkpoint: the model, its tokenizer and its chat template in the one file that
//! llama.cpp, Ollama and the like run.
//!
//! | what | file |
//! |---|---|
//! | the format: header, keys, table of tensors | `format` |
//! | types of numbers, and how weights become them | `quantize` |
//! | names and keys of each family, and order of rows | `names` |
//! | the tokenizer | `vocabulary` |
//!
//! What is written is what a folder of Hugging Face's would hold (`export`, `sidecar_files`), under other
//! names: nothing here knows our network. Tensors go one by one from the checkpoint to the file, so that no
//! more than one is in memory, and each number is rounded once, from the master weights where there are any.
//! The file is written under another name and renamed: it is complete or absent.

mod format;
mod names;
mod quantize;
mod vocabulary;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use espalier_data::TokenTable;
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::CONFIG;
use super::export::{
    ExportPrecision, ExportTensor, ExportedModel, numbers, sidecar_files_of, tensors_to_export,
};
use super::sidecar_files::{CHAT_TEMPLATE, GENERATION};
use crate::checkpoint::SidecarFile;
use crate::{Error, Result, durable};

use format::{GgufPair, GgufTensor, GgufValue, write_header, write_padded};
use names::{GgufModel, RowOrder};
pub use quantize::GgufType;
use quantize::{BLOCK, quantize};
use vocabulary::TextRules;

/// The version of the rules by which weights are quantised.
const QUANTIZATION_VERSION: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufReport {
    /// What most weights are stored in.
    pub dtype: GgufType,
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Whether it has a tokenizer: without one it takes and gives ids alone.
    pub has_tokenizer: bool,
}

/// A tensor on its way from the checkpoint to the file.
struct GgufSource {
    source: TensorSource,
    written: GgufTensor,
}

enum TensorSource {
    Checkpoint {
        tensor: ExportTensor,
        order: RowOrder,
    },
    /// Numbers that follow from the configuration.
    Derived(Vec<f32>),
}

/// Writes a trained model as one file; without a type in that which is stored.
pub(crate) fn export_gguf(
    source: &ExportedModel<'_>,
    file: &Path,
    dtype: Option<GgufType>,
) -> Result<GgufReport> {
    if fs::symlink_metadata(file).is_ok() {
        return Err(Error::file(file, "it is there already: choose another name"));
    }
    let checkpoint = source.checkpoint;
    let stored = tensors_to_export(source, None)?;
    let dtype = dtype.unwrap_or(match stored.first().map(|tensor| tensor.dtype) {
        Some(Dtype::BF16) => GgufType::Bf16,
        Some(Dtype::F16) => GgufType::F16,
        _ => GgufType::F32,
    });
    let beside = sidecar_files_of(source, &stored)?;
    let config = json_of(&beside, CONFIG);
    if config.is_null() {
        return Err(checkpoint.refuse(
            "llama.cpp has no architecture for this model: a GGUF file holds a GPT-2, a Llama, a Mistral, or a Qwen 2 or 3",
        ));
    }
    let model = GgufModel::of(&config).map_err(|why| checkpoint.refuse(why))?;
    let table = match source.tokenizer {
        Some(tokenizer) => Some(TokenTable::of(tokenizer)?.ok_or_else(|| {
            checkpoint.refuse(
                "llama.cpp has no name here for its kind of tokenizer: export a folder without --format, and try llama.cpp's \
                 convert_hf_to_gguf.py",
            )
        })?),
        None => None,
    };
    let template = bytes_of(&beside, CHAT_TEMPLATE).map(|text| String::from_utf8_lossy(text).into_owned());
    let rules =
        TextRules { configs: vec![json_of(&beside, GENERATION), config.clone()], chat_template: template };
    let vocabulary = rules.pairs(table.as_ref(), source.plan.model.classes);
    let vocabulary = vocabulary.map_err(|why| checkpoint.refuse(why))?;
    let tensors = tensors_of(source, &model, dtype)?;
    let pairs = [general(&model, file, dtype), model.pairs(), vocabulary].concat();
    let bytes = write(source, file, &pairs, &tensors)?;
    Ok(GgufReport { dtype, tensors: tensors.len(), bytes, has_tokenizer: table.is_some() })
}

/// What every file says of itself.
fn general(model: &GgufModel<'_>, file: &Path, dtype: GgufType) -> Vec<GgufPair> {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let mut pairs = vec![
        ("general.architecture".to_owned(), GgufValue::Text(model.architecture().into())),
        ("general.type".to_owned(), GgufValue::Text("model".into())),
        ("general.name".to_owned(), GgufValue::Text(name.into_owned())),
        ("general.file_type".to_owned(), GgufValue::U32(dtype.file_type())),
    ];
    if dtype.is_quantized() {
        pairs.push(("general.quantization_version".into(), GgufValue::U32(QUANTIZATION_VERSION)));
    }
    pairs
}

/// All tensors, in the order of the file.
fn tensors_of(source: &ExportedModel<'_>, model: &GgufModel<'_>, dtype: GgufType) -> Result<Vec<GgufSource>> {
    let checkpoint = source.checkpoint;
    let divisors = model.rotary_divisors().map(|divisors| GgufSource {
        written: GgufTensor {
            name: "rope_freqs.weight".into(),
            shape: vec![divisors.len()],
            dtype: GgufType::F32,
        },
        source: TensorSource::Derived(divisors),
    });
    let mut tensors: Vec<GgufSource> = divisors.into_iter().collect();
    for tensor in tensors_to_export(source, Some(ExportPrecision::F32))? {
        let named = model.tensor(&tensor.theirs);
        let named = named.ok_or_else(|| {
            checkpoint.refuse(format!(
                "llama.cpp has no name for {} of a {}",
                tensor.theirs,
                model.architecture()
            ))
        })?;
        let shape = named.order.shape(&tensor.shape);
        let dtype = if named.is_exact { GgufType::F32 } else { dtype };
        let row = shape.last().copied().unwrap_or(1);
        if dtype.is_quantized() && !row.is_multiple_of(BLOCK) {
            return Err(checkpoint.refuse(format!(
                "{} has rows of {row} weights, and {} takes {BLOCK} at a time: use --type f16, bf16 or f32",
                named.name,
                dtype.name()
            )));
        }
        let written = GgufTensor { name: named.name, shape, dtype };
        tensors.push(GgufSource { source: TensorSource::Checkpoint { tensor, order: named.order }, written });
    }
    Ok(tensors)
}

/// Writes the file, and says how long it is.
fn write(source: &ExportedModel<'_>, path: &Path, pairs: &[GgufPair], tensors: &[GgufSource]) -> Result<u64> {
    let unwritten = |why| Error::unwritten(path, why);
    let temporary = durable::beside(path);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        durable::create_folder(folder).map_err(unwritten)?;
    }
    let attempt = || -> Result<u64> {
        let mut out = BufWriter::new(File::create(&temporary).map_err(unwritten)?);
        let table: Vec<GgufTensor> = tensors.iter().map(|tensor| tensor.written.clone()).collect();
        write_header(&mut out, pairs, &table).map_err(unwritten)?;
        for GgufSource { source: from, written } in tensors {
            let weights = match from {
                TensorSource::Derived(weights) => weights.clone(),
                TensorSource::Checkpoint { tensor, order } => {
                    let bytes = numbers(source.checkpoint, tensor)?;
                    let weights = bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
                    order.apply(weights, &tensor.shape)
                }
            };
            let bytes = quantize(&weights, written.dtype).ok_or_else(|| {
                source.checkpoint.refuse(format!(
                    "{} has values beyond the range of {}: use --type bf16 or f32",
                    written.name,
                    written.dtype.name()
                ))
            })?;
            write_padded(&mut out, &bytes).map_err(unwritten)?;
        }
        out.flush().map_err(unwritten)?;
        let file = out.get_ref();
        durable::sync(file, &temporary).map_err(unwritten)?;
        let bytes = file.metadata().map_err(unwritten)?.len();
        durable::rename(&temporary, path).map_err(unwritten)?;
        Ok(bytes)
    };
    attempt().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

fn bytes_of<'a>(files: &'a [SidecarFile], name: &str) -> Option<&'a [u8]> {
    files.iter().find(|file| file.name == name).map(|file| &file.bytes[..])
}

/// A file beside the weights, null where there is none; one that is no JSON says nothing.
fn json_of(files: &[SidecarFile], name: &str) -> Value {
    bytes_of(files, name).and_then(|text| serde_json::from_slice(text).ok()).unwrap_or_default()
}

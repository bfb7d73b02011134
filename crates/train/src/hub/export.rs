//! A folder of Hugging Face's from any checkpoint: full tensors, in one file or several with an index, under
//! the names that transformers or torchvision give them. Written under another name and renamed: it is
//! complete or absent.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use espalier_data::Tokenizer;
use espalier_plan::Plan;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::architecture::OurModel;
use super::{families, files, image_input_of, sidecar_files};
use crate::checkpoint::{
    Checkpoint, CheckpointTensor, MODEL, NamedTensors, SidecarFile, convert, file_name, is_finite,
    write_tensors,
};
use crate::{Error, Result, durable};

/// How a folder is written.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// What weights become; left out: what they are. f32 are the masters of a bf16 run.
    pub dtype: Option<ExportPrecision>,
    /// A file of weights has at most so many bytes, unless one tensor alone has more.
    pub shard_bytes: usize,
}

/// What numbers are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportPrecision {
    /// Four bytes.
    F32,
    /// Two bytes, with the range of f32.
    Bf16,
    /// Two bytes, more exact than bf16, up to 65504.
    F16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    /// Files of weights.
    pub files: Vec<String>,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of these.
    pub bytes: usize,
    /// Whether it says what class of transformers it is for.
    pub has_config: bool,
}

impl ExportPrecision {
    fn dtype(self) -> Dtype {
        match self {
            ExportPrecision::F32 => Dtype::F32,
            ExportPrecision::Bf16 => Dtype::BF16,
            ExportPrecision::F16 => Dtype::F16,
        }
    }
}

/// A tensor on its way: what it is called here and there, and what it becomes.
pub(super) struct ExportTensor {
    ours: String,
    pub(super) theirs: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
}

impl ExportTensor {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A model that is exported.
pub(crate) struct ExportedModel<'a> {
    pub checkpoint: &'a Checkpoint,
    pub plan: &'a Plan,
    pub tokenizer: Option<&'a Tokenizer>,
}

/// Writes a trained model into a new folder.
pub(crate) fn export(source: &ExportedModel<'_>, folder: &Path, how: &ExportOptions) -> Result<ExportReport> {
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) || folder.is_file() {
        return Err(Error::file(folder, "it is there already: choose another folder"));
    }
    let tensors = tensors_to_export(source, how.dtype)?;
    let sidecars = sidecar_files_of(source, &tensors)?;
    let shards = split_into_files(tensors, how.shard_bytes);
    let temporary = durable::beside(folder);
    let attempt = || -> Result<ExportReport> {
        let unwritten = |why| Error::unwritten(folder, why);
        let _ = fs::remove_dir_all(&temporary);
        durable::create_folder(&temporary).map_err(unwritten)?;
        let mut exported = ExportReport { files: Vec::new(), tensors: 0, bytes: 0, has_config: false };
        let mut index = BTreeMap::new();
        for (i, shard) in shards.iter().enumerate() {
            let name = file_name(MODEL, i, shards.len());
            let named = |one: &ExportTensor| {
                let bytes = numbers(source.checkpoint, one)?;
                Ok((one.theirs.clone(), CheckpointTensor::Bytes(one.dtype, one.shape.clone(), bytes)))
            };
            let saved: NamedTensors<'_> = shard.iter().map(named).collect::<Result<_>>()?;
            let step = source.checkpoint.progress().step;
            write_tensors(&temporary.join(&name), &saved).map_err(|fault| fault.of(None, folder, step))?;
            index.extend(shard.iter().map(|one| (one.theirs.clone(), name.clone())));
            exported.tensors += shard.len();
            exported.bytes += shard.iter().map(ExportTensor::bytes).sum::<usize>();
            exported.files.push(name);
        }
        if shards.len() > 1 {
            let index = json!({ "metadata": { "total_size": exported.bytes }, "weight_map": index });
            let text = serde_json::to_vec_pretty(&index).expect("plain data");
            durable::write_synced(&temporary.join(files::INDEX), &text).map_err(unwritten)?;
        }
        for SidecarFile { name, bytes, .. } in &sidecars {
            durable::write_synced(&temporary.join(name), bytes).map_err(unwritten)?;
            exported.has_config |= name == super::CONFIG;
        }
        durable::sync_folder(&temporary).map_err(unwritten)?;
        // An empty folder of this name gives way.
        let _ = fs::remove_dir(folder);
        durable::rename(&temporary, folder).map_err(unwritten)?;
        Ok(exported)
    };
    attempt().inspect_err(|_| drop(fs::remove_dir_all(&temporary)))
}

/// All tensors of a model, as they are called where they go, in the type that is stored where none is asked
/// for.
pub(super) fn tensors_to_export(
    source: &ExportedModel<'_>,
    dtype: Option<ExportPrecision>,
) -> Result<Vec<ExportTensor>> {
    let ExportedModel { checkpoint, plan, .. } = source;
    let model = &plan.model;
    let network = OurModel { model: &plan.network, vocab: model.classes, dtype: "float32", end: None };
    let family = families::describe(&network).map(|(family, _)| family);
    let parameters = model.parameters().into_iter().map(|one| (one.name, one.shape));
    let statistics = model.buffers().into_iter().map(|one| (one.name, one.shape));
    let one = |(ours, shape): (String, Vec<usize>)| {
        let theirs = family.map_or_else(|| ours.clone(), |family| family.their_name(&ours));
        let there = checkpoint.dtype(MODEL, &ours);
        let there = there.ok_or_else(|| checkpoint.refuse(format!("{MODEL} has no tensor {ours}")))?;
        Ok(ExportTensor { ours, theirs, shape, dtype: dtype.map_or(there, ExportPrecision::dtype) })
    };
    parameters.chain(statistics).map(one).collect()
}

/// The numbers of a tensor, in the type that it leaves in.
pub(super) fn numbers(checkpoint: &Checkpoint, one: &ExportTensor) -> Result<Vec<u8>> {
    let ExportTensor { ours, shape, dtype, .. } = one;
    // Weights of a bf16 run are roundings of what it has in f32.
    if *dtype == Dtype::F32
        && let Some(master) = checkpoint.master(ours, shape)?
    {
        if !master.iter().all(|number| number.is_finite()) {
            return Err(checkpoint.not_finite(ours));
        }
        return Ok(master.iter().flat_map(|number| number.to_le_bytes()).collect());
    }
    let (there, numbers) = checkpoint
        .numbers(MODEL, ours, shape)?
        .ok_or_else(|| checkpoint.refuse(format!("{ours} is not {shape:?} there, as the model has it")))?;
    if !is_finite(&numbers, there) {
        return Err(checkpoint.not_finite(ours));
    }
    let bytes = convert(numbers, there, *dtype);
    if *dtype == Dtype::F16 {
        let largest = bytes.as_chunks().0.iter().any(|two| u16::from_le_bytes(*two) & 0x7fff >= 0x7c00);
        if largest {
            return Err(checkpoint
                .refuse(format!("{ours} has values beyond the range of f16: use --dtype bf16 or f32")));
        }
    }
    Ok(bytes)
}

/// The files beside the weights.
pub(super) fn sidecar_files_of(
    source: &ExportedModel<'_>,
    tensors: &[ExportTensor],
) -> Result<Vec<SidecarFile>> {
    let ExportedModel { checkpoint, plan, tokenizer } = source;
    let folder = checkpoint.path();
    if plan.facts.vocab.is_none() {
        return Ok(sidecar_files::for_images(&image_input_of(folder)?));
    }
    let dtype = match tensors.first().map(|one| one.dtype) {
        Some(Dtype::BF16) => "bfloat16",
        Some(Dtype::F16) => "float16",
        _ => "float32",
    };
    sidecar_files::for_text(plan, dtype, *tokenizer, Some(folder), true)
}

/// In the order of the model, as many in a file as go into it.
fn split_into_files(tensors: Vec<ExportTensor>, most: usize) -> Vec<Vec<ExportTensor>> {
    let mut shards: Vec<Vec<ExportTensor>> = Vec::new();
    let mut filled = 0;
    for one in tensors {
        let bytes = one.bytes();
        match shards.last_mut().filter(|_| filled + bytes <= most) {
            Some(shard) => shard.push(one),
            None => {
                filled = 0;
                shards.push(vec![one]);
            }
        }
        filled += bytes;
    }
    shards
}

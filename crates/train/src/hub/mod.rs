//! Other people's files: what a folder of Hugging Face's, or a state dict of torchvision's, says of a model,
//! and such folders made of ours. The engine knows nothing of them: it is handed a model as a run file has it
//! and tensors under its own names.
//!
//! | what | file |
//! |---|---|
//! | which files hold the weights | `files` |
//! | what a family of models is: its configuration, its names | `architecture` |
//! | which families there are | `families` |
//! | fields of a config.json | `config_fields` |
//! | GPT-2, by its config.json | `gpt2` |
//! | Llama, Mistral, Qwen and SmolLM, by theirs | `llama` |
//! | torchvision's networks, by their tensors | `torchvision` |
//! | what stands beside weights: configuration, tokenizer, how pixels are standardised | `sidecar_files` |
//! | a folder of Hugging Face's, from any checkpoint | `export` |
//! | a GGUF file, from any checkpoint | `gguf` |
//!
//! Our tensors bear the names of Hugging Face's models, or of torchvision, and lie in memory as theirs do, so
//! that reading is a matter of prefixes and of what is left out.

mod architecture;
mod config_fields;
mod export;
mod families;
mod files;
mod gguf;
mod gpt2;
mod llama;
mod sidecar_files;
mod torchvision;

use std::path::{Path, PathBuf};

use espalier_data::Tokenizer;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::Plan;
use espalier_plan::config::{ModelConfig, RunTable};
use espalier_plan::data::{DatasetSource, DatasetSpec};
use espalier_plan::spec::presets::ImageSize;
use serde_json::Value;

use crate::checkpoint::{Checkpoint, MODEL, ReadFault, retry};
use crate::parallel::{Ranks, all_gather_results};
use crate::resolved::read_resolved;
use crate::{Error, Result};

use architecture::{ForeignFiles, ForeignModel, HEAD};

pub use export::{ExportOptions, ExportPrecision, ExportReport};
pub(crate) use export::{ExportedModel, export};
pub use files::is_foreign;
pub(crate) use gguf::export_gguf;
pub use gguf::{GgufReport, GgufType};
pub use sidecar_files::{ImageInput, image_input_of, sidecar_files};

/// What a model is called in a folder of Hugging Face's.
const CONFIG: &str = "config.json";
/// The tokenizer's vocabulary and rules.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Opens what a run can start from: a checkpoint of ours or the newest intact one of a run folder, of which
/// `report` hears as [`Checkpoint::find`] says; or files of weights that another program wrote. All ranks
/// must.
pub fn find(path: &Path, ranks: &Ranks, report: impl FnMut(&Error)) -> Result<Checkpoint> {
    if !is_foreign(path) {
        return Checkpoint::find(path, ranks, report);
    }
    let mut opened = None;
    let outcome = all_gather_results(ranks, || Ok(open(path).map(|found| opened = Some(found))))?;
    let outcomes: Result<Vec<()>, ReadFault> =
        outcome.expect("faults are gathered as results").into_iter().collect();
    outcomes.map_err(|fault| of_fault(path, fault))?;
    Ok(opened.expect("nothing was wrong"))
}

/// Opens files of another program under our names.
fn open(path: &Path) -> Result<Checkpoint, ReadFault> {
    let files::WeightFiles { folder, names, index } = files::find(path)?;
    let mut checkpoint = Checkpoint::of_files(path, &folder, &names)?;
    for (tensor, file) in index.iter().flatten() {
        if checkpoint.file_of(tensor) != Some(file) {
            let index = files::INDEX;
            return Err(format!("{index} says that {file} holds {tensor}, which it does not").into());
        }
    }
    let config = config(path)?;
    let our_name = |theirs: &str| families::our_name(&config, theirs);
    let tied_to = match families::find(&config) {
        Ok(family) => family.tied_to(&config)?,
        // Whoever asks what it is gets the error.
        Err(_) => None,
    };
    let is_copy = match tied_to {
        Some(embedding) => has_copied_head(&checkpoint, |name| our_name(name).as_deref() == Some(embedding))?,
        None => false,
    };
    checkpoint.rename(|name| our_name(name).filter(|ours| !(is_copy && ours == HEAD)))?;
    Ok(checkpoint)
}

/// Whether the head of a model that should share the token embedding's weight is a copy of it. One that is
/// not has been trained by itself, whatever the configuration says: transformers uses it, and so do we.
fn has_copied_head(checkpoint: &Checkpoint, is_embedding: impl Fn(&str) -> bool) -> Result<bool, String> {
    let mut embedding = checkpoint.names(MODEL).filter(|name| is_embedding(name));
    let embedding = embedding.find_map(|name| Some((name, checkpoint.shape(MODEL, name)?)));
    let (Some((embedding, shape)), Some(_)) = (embedding, checkpoint.shape(MODEL, HEAD)) else {
        return Ok(true);
    };
    let numbers = |name: &str| checkpoint.numbers(MODEL, name, shape).map_err(|why| why.to_string());
    Ok(numbers(HEAD)? == numbers(embedding)?)
}

/// A model as somebody else's files describe it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDescription {
    /// The `[model]` of a run file.
    pub model: ModelConfig,
    /// What images it takes, unless others are at hand: none where it takes text, or where the run file says it.
    pub image: Option<ImageSize>,
    /// The tokenizer's file beside it, a tokenizer.json, or a vocab.json with its merges.txt; of a run of
    /// ours that which it names.
    pub tokenizer: Option<PathBuf>,
}

/// What the model of such files is: by config.json, or else by the names and shapes of its tensors.
pub(crate) fn describe(checkpoint: &Checkpoint) -> Result<ModelDescription> {
    let path = checkpoint.path();
    let config = config(path).map_err(|fault| of_fault(path, fault))?;
    let refused = |why: String| match config.get("model_type") {
        Some(_) => Error::file(folder_of(path).join(CONFIG), why),
        None => Error::file(path, why),
    };
    let shapes = checkpoint.names(MODEL).filter_map(|name| Some((name, checkpoint.shape(MODEL, name)?)));
    let files = ForeignFiles { config: &config, shapes: shapes.collect() };
    let family = families::find(&config).map_err(refused)?;
    let ForeignModel { model, image } = family.read(&files).map_err(refused)?;
    Ok(ModelDescription { model, image, tokenizer: Tokenizer::in_folder(folder_of(path)) })
}

/// Has text read by the tokenizer in a checkpoint's folder where the one that is meant is gone: what a run
/// starts from need not stay.
pub fn find_tokenizer(data: &mut DatasetSpec, checkpoint: &Path) {
    if let DatasetSource::Text { tokenizer: Some(path), .. }
    | DatasetSource::Jsonl { tokenizer: Some(path), .. } = &mut data.source
        && !path.exists()
        && let Some(beside) = Tokenizer::in_folder(checkpoint)
    {
        *path = beside;
    }
}

/// An error where text would be read as bytes, and what a run starts from knows other tokens.
pub fn check_tokens(checkpoint: &Checkpoint, plan: &Plan) -> Result<()> {
    let reads_bytes = matches!(
        plan.data.source,
        DatasetSource::Text { tokenizer: None, .. } | DatasetSource::Jsonl { tokenizer: None, .. }
    );
    if !reads_bytes {
        return Ok(());
    }
    let bytes = Tokenizer::Bytes.vocab();
    let folder = folder_of(checkpoint.path());
    let its = match Tokenizer::in_folder(folder) {
        // One that cannot be read here is not one of bytes, which we write ourselves.
        Some(path) => Tokenizer::open(&path).map_or(0, |tokenizer| tokenizer.vocab()),
        None if is_foreign(checkpoint.path()) => plan.model.classes,
        None => return Ok(()),
    };
    if its == bytes {
        return Ok(());
    }
    let name = folder.display();
    let problem = match Tokenizer::in_folder(folder) {
        Some(_) => format!(
            "is missing, and text would be read as {bytes} byte tokens: {name} has a tokenizer; use it"
        ),
        None => format!(
            "is missing, and {name} has none (no {TOKENIZER}, nor vocab.json and merges.txt): text would be read as bytes by a model \
             of {its} tokens"
        ),
    };
    Err(espalier_plan::Error::Conflict { field: "data.tokenizer".into(), problem }.into())
}

/// The `[model]` that a run file means by "auto", whose run starts from `path`: that of the checkpoint's own
/// run, or what `describe` finds.
pub fn model_of(path: &Path, report: impl FnMut(&Error)) -> Result<ModelDescription> {
    let checkpoint = find(path, &Ranks::single(), report)?;
    let run_file = checkpoint.run_file();
    match read_resolved(&run_file)? {
        Some(text) if !is_foreign(path) => {
            let run = RunTable::parse(&text, &[])?;
            let beside = Some(checkpoint.path().join(TOKENIZER)).filter(|path| path.is_file());
            Ok(ModelDescription { model: run.model()?, image: None, tokenizer: beside.or(run.tokenizer()) })
        }
        _ => describe(&checkpoint),
    }
}

/// The configuration beside some weights; null where there is none.
fn config(path: &Path) -> Result<Value, ReadFault> {
    let file = folder_of(path).join(CONFIG);
    if !file.is_file() {
        return Ok(Value::Null);
    }
    let text = retry(|| regular_file::read(&file, SETTINGS)).map_err(|why| ReadFault::of(CONFIG, &why))?;
    serde_json::from_slice(&text).map_err(|why| format!("{CONFIG} is not JSON: {why}").into())
}

/// What is wrong with files of another program; none of them is a checkpoint that another could replace.
fn of_fault(path: &Path, fault: ReadFault) -> Error {
    match fault {
        ReadFault::Damaged(why) => Error::file(path, why),
        ReadFault::Unread(why) => Error::Disk { path: path.into(), why: format!("cannot be read: {why}") },
    }
}

/// The folder of some weights, which may be one file in it.
fn folder_of(path: &Path) -> &Path {
    match path.is_dir() {
        true => path,
        false => path.parent().unwrap_or(path),
    }
}

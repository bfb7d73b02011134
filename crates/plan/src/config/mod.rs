//! The run file: what a person writes, checked and completed.
//!
//! TOML in, a [`RunFile`] with a value for every field out, or one sentence naming the field that is wrong.
//! Written back with [`RunFile::to_toml`] and read again it is the same value. Nothing here touches the disk:
//! the caller reads the text, and [`RunFile::resolve_paths`] only joins paths. `docs/run-file.md` has a line
//! for each field.

mod changes;
mod data;
mod fields;
mod layers;
mod learning_rate;
mod llama;
mod model;
mod optimizer;
mod other_names;
mod overrides;
mod parallel;
mod pipeline;
mod prune;
pub mod reader;
mod resolved;
mod run_table;
mod sample;
#[cfg(test)]
mod tests;
mod train;
mod used;

pub use changes::{FieldChange, check_name, covers};
pub use llama::{LlamaConfig, ScalingKind};
pub use model::{Family, FormChoice, GptConfig, InitVariance, ModelConfig};
pub use overrides::Override;
pub use parallel::{Parallel, SpatialGrid};
pub use pipeline::PipelineConfig;
pub use run_table::RunTable;
pub use train::Train;
pub use used::Purpose;

use std::path::Path;

use serde::Serialize;
use toml::Table;

use reader::Section;

use crate::batch::BatchNormSync;
use crate::data::{DatasetSource, DatasetSpec};
use crate::device::{DeviceChoice, DeviceKind};
use crate::edit_distance::nearest;
use crate::error::Error;
use crate::intervals::CheckpointPolicy;
use crate::learning_rate::LearningRate;
use crate::optimizer::{MasterForm, OptimizerSpec};
use crate::pruning::{Pruning, StateForm};
use crate::sample::SampleConfig;
use crate::spec::Precision;

/// More layers than any model has; a slip of the finger should not fill the memory.
const LAYERS_MOST: usize = 10_000;

/// A whole run file, every field with a value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunFile {
    /// Where all randomness comes from: initial weights, order of samples, dropout.
    pub seed: u64,
    /// The network, built in or written layer by layer.
    pub model: ModelConfig,
    /// What it learns from.
    pub data: DatasetSpec,
    /// How long, in what portions, how exactly.
    pub train: Train,
    /// The rule of a step.
    pub optimizer: OptimizerSpec,
    /// The size of a step.
    pub learning_rate: LearningRate,
    /// Which weights are pruned, and when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prune: Option<Pruning>,
    /// Over how many ranks.
    pub parallel: Parallel,
    /// When the state is saved.
    pub checkpoint: CheckpointPolicy,
    /// Text that the model generates in the course of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<SampleConfig>,
    /// The processor and its threads, or a GPU.
    pub device: DeviceChoice,
    /// What a person should know of how it was read: fields of the file that an override has made moot.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl RunFile {
    /// Reads a run file's text after putting in what is set.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<RunFile, Error> {
        RunTable::parse(text, overrides)?.read()
    }

    /// A run of a model that says nothing else.
    pub fn of_model(model: ModelConfig) -> Result<RunFile, Error> {
        let mut run = RunTable::from(Table::new());
        run.set_model(&model, None)?;
        run.read()
    }

    /// The run after an edit, which must be one that could have been written so. A schedule of the user's own
    /// is to be [brought](RunFile::bring_schedule) again.
    pub fn with(&self, edit: impl FnOnce(&mut RunFile)) -> Result<RunFile, Error> {
        let mut edited = self.clone();
        edit(&mut edited);
        Ok(RunFile { notes: self.notes.clone(), ..RunTable::of(&edited)?.read()? })
    }

    /// Every section by itself.
    fn read(table: &Table, started: Option<usize>) -> Result<RunFile, Error> {
        let empty = Table::new();
        let mut top = Section::new("", table);
        let seed = top.read_field(&fields::TOP[0])?;
        for (name, _) in fields::ALL.iter().filter(|(name, _)| !name.is_empty()) {
            top.section(name, &empty)?;
        }
        // Misspelt sections first: what they hold would otherwise seem to be missing from the others.
        top.finish()?;
        let section = |name| Section::new("", table).section(name, &empty);
        let model = ModelConfig::read(&mut section("model")?)?;
        let data = DatasetSpec::read(&mut section("data")?, model.takes_text())?;
        let train = Train::read(&mut section("train")?)?;
        let optimizer = OptimizerSpec::read(&mut section("optimizer")?)?;
        Ok(RunFile {
            seed: seed.and_then(|seed| seed.as_integer()).unwrap_or_default() as u64,
            model,
            data,
            train,
            optimizer,
            learning_rate: LearningRate::read(&mut section("learning_rate")?, optimizer.usual_rate())?,
            prune: Pruning::read(&mut section("prune")?)?,
            parallel: Parallel::read(&mut section("parallel")?, started)?,
            checkpoint: CheckpointPolicy::read(&mut section("checkpoint")?)?,
            sample: SampleConfig::read(&mut section("sample")?)?,
            device: section("device")?.read(fields::DEVICE)?.all(),
            notes: Vec::new(),
        })
    }

    /// What no section can see alone.
    fn check(&self) -> Result<(), Error> {
        let (model, kind) = (&self.model.name, self.data.kind());
        if self.model.takes_text() != self.data.is_text() {
            let (takes, gives) = if self.data.is_text() { ("images", "text") } else { ("text", "images") };
            let problem = format!("is \"{kind}\", which gives {gives}, but the model {model} takes {takes}");
            return Err(Error::conflict("data.kind", problem));
        }
        if matches!(self.data.source, DatasetSource::Tokens { .. }) && self.model.vocab().is_none() {
            let expected = "how many tokens there are, which token files do not say".into();
            return Err(Error::Missing { field: "model.vocab".into(), expected });
        }
        if self.optimizer.master == MasterForm::LowBits && self.train.precision == Precision::F32 {
            let why = "with `train.precision` = \"f32\": the weights are exact themselves";
            return Err(Error::no_effect("optimizer.master", why));
        }
        if let Some(prune) = &self.prune {
            prune.check_weights()?;
            prune.check_kernels(self)?;
            prune.check_optimizer(self)?;
        } else if self.learning_rate.by_density > 0.0 {
            let why = "without a section `[prune]`: the network stays dense";
            return Err(Error::no_effect("learning_rate.by_density", why));
        }
        if let Some(sample) = &self.sample {
            sample.check(self)?;
        }
        let train = &self.train;
        self.parallel.check(train)?;
        self.parallel.check_state(self)?;
        self.parallel.check_integrated(self)?;
        if let Some(pipeline) = &self.parallel.pipeline {
            pipeline.check(self)?;
        }
        if train.noise_scale && train.micro_batches * self.parallel.data < 2 {
            let why = "with `train.micro_batches` = 1 on one rank: it compares gradients of at least 2";
            return Err(Error::no_effect("train.noise_scale", why));
        }
        let (group, micro_batch) = (train.batch_norm_group, self.batch().micro_batch);
        if group > 0 && !micro_batch.is_multiple_of(group) {
            let problem = format!(
                "is {group}, which does not divide the {micro_batch} samples of a micro-batch (`train.batch` = {}, \
                 `parallel.data` = {}, `train.micro_batches` = {})",
                train.batch, self.parallel.data, train.micro_batches
            );
            return Err(Error::conflict("train.batch_norm_group", problem));
        }
        if group > 0 && self.parallel.batch_norm == BatchNormSync::Synchronised {
            let problem =
                format!("is {group}, but `parallel.batch_norm` = \"synchronised\" takes all ranks' samples");
            return Err(Error::conflict("train.batch_norm_group", problem));
        }
        let evaluations = [
            ("eval_every", train.eval_every),
            ("eval_samples", train.eval_samples),
            ("eval_batch", train.eval_batch),
        ];
        for (key, value) in evaluations {
            if value > 0 && self.data.holds_out_nothing() {
                return Err(Error::no_effect(format!("train.{key}"), "with `data.validation` = 0"));
            }
        }
        Ok(())
    }

    /// The same run on one rank, in micro-batches of the same size and with the same form of state.
    pub fn single_rank(&self) -> RunFile {
        let mut single = self.clone();
        single.train.micro_batches *= self.parallel.data;
        single.parallel = Parallel { timeout_s: self.parallel.timeout_s, ..Parallel::default() };
        if let Some(prune) = single.prune.as_mut().filter(|_| self.storage().compressed) {
            prune.state = StateForm::Compressed;
        }
        single
    }

    /// The run with the layout of another: its ranks, micro-batches, recomputation and form of state.
    pub fn laid_out_as(&self, other: &RunFile) -> Result<RunFile, Error> {
        let mut run = self.clone();
        run.parallel = other.parallel.clone();
        run.train.micro_batches = other.train.micro_batches;
        run.train.recompute = other.train.recompute;
        if let (Some(own), Some(other)) = (&mut run.prune, &other.prune) {
            (own.state, own.weights) = (other.state, other.weights);
        }
        run.check()?;
        Ok(run)
    }

    /// The resolved file: every field, also those that were left out.
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(self).map_err(|_| no_unicode())
    }

    /// Makes relative paths relative to the folder of the run file.
    pub fn resolve_paths(&mut self, folder: &Path) {
        self.data.resolve_paths(folder);
        if let Some(path) =
            self.parallel.pipeline.as_mut().and_then(|pipeline| pipeline.schedule_file.as_mut())
        {
            *path = folder.join(&*path);
        }
        // A name that comes with the program has no extension.
        if let Some(path) = self.device.cluster.as_mut().filter(|path| path.extension().is_some()) {
            *path = folder.join(&*path);
        }
    }

    /// The file of the user's own schedule, whose text is to be [brought](RunFile::bring_schedule).
    pub fn schedule_file(&self) -> Option<&Path> {
        self.parallel.pipeline.as_ref()?.schedule_file.as_deref()
    }

    /// Takes the text of the user's own schedule.
    pub fn bring_schedule(&mut self, text: &str) -> Result<(), Error> {
        let micro_batches = self.train.micro_batches;
        if let Some(pipeline) = &mut self.parallel.pipeline {
            pipeline.bring(text, micro_batches)?;
        }
        self.check()
    }
}

/// Numbers and texts always can be written; a path can hold bytes that are not text.
fn no_unicode() -> Error {
    Error::value("data.path", "a path that is valid Unicode", "one that is not")
}

/// The value that overrides give a field, as it would be written; the last one counts.
pub fn overridden(overrides: &[Override], field: &str) -> Option<String> {
    overrides::value_of(overrides, field).map(reader::show)
}

/// The field of a run file that other tools call so.
pub fn by_another_name(name: &str) -> Option<&'static str> {
    other_names::ours(name).next()
}

/// A file's text as a table, with what is set put in.
pub fn table(text: &str, overrides: &[Override]) -> Result<Table, Error> {
    let mut table = text.parse::<Table>().map_err(|error| syntax(text, &error))?;
    for setting in overrides {
        setting.apply(&mut table)?;
    }
    Ok(table)
}

/// One sentence of the TOML reader, and the line it speaks of.
fn syntax(text: &str, error: &toml::de::Error) -> Error {
    let start = error.span().map_or(0, |span| span.start.min(text.len()));
    let line = text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count() + 1;
    Error::Syntax { line, message: error.message().lines().collect::<Vec<_>>().join(", ") }
}

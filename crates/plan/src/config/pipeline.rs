//! The fields of `[parallel]` that say how a model is cut into stages and in which order they work.

use std::path::PathBuf;

use serde::{Serialize, Serializer};
use toml::{Table, Value};

use super::reader::{FieldValues, Section, integer};
use super::{Error, Override, RunFile, overrides};
use crate::field::LARGEST;
use crate::pipeline::ScheduleSource;
use crate::schedule::{Schedule, ScheduleName, Updates};

/// Steps after which an asynchronous pipeline runs empty, unless the run file says otherwise.
const DRAIN: usize = 100;

/// The fields of `[parallel]` that mean nothing with one stage.
const OF_STAGES: [&str; 6] = ["schedule", "schedule_file", "chunks", "pipelines", "cut", "drain"];

/// A model cut into stages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PipelineConfig {
    /// Pipeline stages: ranks that hold consecutive blocks of the model.
    #[serde(rename = "pipeline")]
    pub stages: usize,
    /// The order of their work.
    #[serde(serialize_with = "word")]
    pub schedule: ScheduleName,
    /// A file with a schedule of the user's own, instead of a named one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_file: Option<PathBuf>,
    /// What is in it, once it was read.
    #[serde(skip)]
    brought: Option<Schedule>,
    /// Virtual stages on a rank, for interleaving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Copies of the model, for Chimera.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipelines: Option<usize>,
    /// The first block of every virtual stage but the first; empty: stages of about equal cost.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cut: Vec<usize>,
    /// Steps between which an asynchronous pipeline runs empty, besides those after which it is evaluated or
    /// saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<usize>,
}

fn word<S: Serializer>(name: &ScheduleName, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name.as_str())
}

impl PipelineConfig {
    /// Stages of about equal cost in a named order.
    pub fn new(stages: usize, schedule: ScheduleName, chunks: Option<usize>) -> PipelineConfig {
        let (schedule_file, brought, pipelines, cut, drain) = (None, None, None, Vec::new(), None);
        PipelineConfig { stages, schedule, schedule_file, brought, chunks, pipelines, cut, drain }
    }

    /// Reads its fields; none where there is one stage, and then they must not be written.
    pub(super) fn read(section: &mut Section, values: &FieldValues) -> Result<Option<PipelineConfig>, Error> {
        let (stages, schedule) = (values.get("pipeline"), values.get::<String>("schedule"));
        let pipeline = PipelineConfig {
            stages,
            schedule: schedule.parse().expect("one of the words"),
            schedule_file: values.find("schedule_file"),
            brought: None,
            chunks: values.find("chunks"),
            pipelines: values.find("pipelines"),
            cut: read_cut(section)?,
            drain: values.find("drain"),
        };
        if stages > 1 {
            // A resolved file has both, and the named one is then the usual.
            if pipeline.schedule_file.is_some() && pipeline.schedule != ScheduleName::OneFOneB {
                let why = "with `parallel.schedule_file`, which defines its own order";
                return Err(section.no_effect("schedule", why));
            }
            let of_names = [("chunks", pipeline.chunks), ("pipelines", pipeline.pipelines)];
            if let Some((key, _)) = of_names.into_iter().find(|(_, value)| value.is_some())
                && pipeline.schedule_file.is_some()
            {
                let why = "with `parallel.schedule_file`, which places the stages itself";
                return Err(section.no_effect(key, why));
            }
            return Ok(Some(pipeline));
        }
        match OF_STAGES.into_iter().find(|key| section.has(key)) {
            None => Ok(None),
            Some(key) => {
                Err(section.no_effect(key, "with `parallel.pipeline` = 1: the model is on one rank"))
            }
        }
    }

    /// Where an override makes one stage of a file's pipeline, its other fields go, but for those that are
    /// overrides themselves. Returns a sentence on what went.
    pub(super) fn drop_moot(table: &mut Table, overrides: &[Override]) -> Vec<String> {
        let is_set = |key: &str| overrides::value_of(overrides, &format!("parallel.{key}"));
        if is_set("pipeline") != Some(&Value::Integer(1)) {
            return Vec::new();
        }
        let Some(Value::Table(parallel)) = table.get_mut("parallel") else { return Vec::new() };
        let moot = OF_STAGES.into_iter().filter(|key| is_set(key).is_none() && parallel.contains_key(*key));
        let moot: Vec<&str> = moot.collect();
        moot.iter().for_each(|key| drop(parallel.remove(*key)));
        let names: Vec<String> = moot.iter().map(|key| format!("`parallel.{key}`")).collect();
        match &names[..] {
            [] => Vec::new(),
            [name] => vec![format!(
                "{name} of the run file is ignored: it has no effect with `parallel.pipeline` = 1"
            )],
            names => vec![format!(
                "{} of the run file are ignored: they have no effect with `parallel.pipeline` = 1",
                names.join(", ")
            )],
        }
    }

    /// Takes the text of the user's own schedule, which must be for as many stages and micro-batches, and end
    /// every step.
    pub(super) fn bring(&mut self, text: &str, micro_batches: usize) -> Result<(), Error> {
        let conflict = |problem: String| Error::conflict("parallel.schedule_file", problem);
        let schedule = Schedule::parse(text).map_err(|error| conflict(format!("cannot be read: {error}")))?;
        schedule.validate().map_err(|error| conflict(format!("cannot be run: {error}")))?;
        let found = (schedule.stages(), schedule.micro_batches, schedule.batches);
        if found != (self.stages, micro_batches, 1) {
            return Err(conflict(format!(
                "is for {} ranks, {} micro-batches and {} batches, but `parallel.pipeline` = {}, \
                 `train.micro_batches` = {micro_batches} and a step is one batch",
                found.0, found.1, found.2, self.stages
            )));
        }
        if schedule.updates != Updates::Flush {
            return Err(conflict(format!(
                "updates weights \"{}\": only \"flush\" can be run",
                schedule.updates.as_str()
            )));
        }
        self.brought = Some(schedule);
        Ok(())
    }

    /// Where the order of work comes from.
    pub(super) fn order(&self) -> ScheduleSource {
        match &self.brought {
            Some(schedule) => ScheduleSource::Given(Box::new(schedule.clone())),
            None => {
                ScheduleSource::Named { name: self.schedule, chunks: self.chunks, pipelines: self.pipelines }
            }
        }
    }

    /// Whether a batch begins before the one before it has ended.
    pub fn is_asynchronous(&self) -> bool {
        self.schedule.updates() != Updates::Flush
    }

    /// Steps between which an asynchronous pipeline runs empty.
    pub(crate) fn drains_every(&self) -> u64 {
        self.drain.unwrap_or(DRAIN) as u64
    }

    /// What a schedule cannot do together with the rest of a run.
    pub(super) fn check(&self, run: &RunFile) -> Result<(), Error> {
        if self.schedule_file.is_some() && self.brought.is_none() {
            // It is checked when it has been read.
            return Ok(());
        }
        let schedule = self.order().schedule(self.stages, run.train.micro_batches, 1)?;
        let virtual_stages = schedule.placement.virtual_stages();
        if !self.cut.is_empty() && self.cut.len() + 1 != virtual_stages {
            let problem =
                format!("cuts the model into {} stages, but there are {virtual_stages}", self.cut.len() + 1);
            return Err(Error::conflict("parallel.cut", problem));
        }
        if run.train.noise_scale {
            let why =
                format!("with `parallel.pipeline` = {}: it needs the full model on each rank", self.stages);
            return Err(Error::no_effect("train.noise_scale", why));
        }
        if run.parallel.is_local() {
            let problem = format!(
                "is {}, but pipeline stages cannot take local steps: remove it with `parallel.pipeline` = {}",
                run.parallel.average_every, self.stages
            );
            return Err(Error::conflict("parallel.average_every", problem));
        }
        if !self.is_asynchronous() {
            return match self.drain {
                None => Ok(()),
                Some(_) => {
                    let why =
                        format!("with `parallel.schedule` = \"{}\", which flushes every step", self.schedule);
                    Err(Error::no_effect("parallel.drain", why))
                }
            };
        }
        if run.train.clip > 0.0 {
            let problem = format!(
                "is {}, but \"{}\" never has the gradient of the full model at one time: set it to 0",
                run.train.clip, self.schedule
            );
            return Err(Error::conflict("train.clip", problem));
        }
        match &run.prune {
            Some(prune) if prune.method.goes_on() => Err(Error::conflict(
                "prune.method",
                format!(
                    "prunes during training, but with \"{}\" micro-batches are always in flight: prune before the \
                     first step, or use a schedule that flushes every step",
                    self.schedule
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// Ascending block numbers.
fn read_cut(section: &mut Section) -> Result<Vec<usize>, Error> {
    let expected = "a list of block numbers, ascending, such as [3, 6]";
    let Some(value) = section.get("cut") else { return Ok(Vec::new()) };
    let wrong = || section.wrong("cut", expected, value);
    let Value::Array(values) = value else { return Err(wrong()) };
    let cut: Vec<usize> = values
        .iter()
        .map(|value| integer(value, 1, LARGEST))
        .collect::<Result<_, _>>()
        .map_err(|_| wrong())?;
    if cut.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(wrong());
    }
    Ok(cut)
}

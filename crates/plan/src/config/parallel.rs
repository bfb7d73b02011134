//! `[parallel]`: over how many ranks a run is spread, and what they share.

use serde::{Serialize, Serializer};
use toml::{Table, Value};

use crate::batch::BatchNormSync;
use crate::layout::{LinearForm, Mixture};
use crate::mesh::{Mesh, PerAxis};
use crate::spec::Named;

use super::reader::{Section, integer};
use super::{Error, MasterForm, PipelineConfig, Precision, RunFile, StateForm, Train, fields};
use crate::field::{Field, FieldType, LARGEST, texts};

/// `[parallel]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parallel {
    /// Ranks that each hold the full model and take a slice of every batch.
    pub data: usize,
    /// Ranks that each hold a shard of every large layer.
    pub tensor: usize,
    /// Whether these cut what lies between such layers along the sequence.
    pub sequence: bool,
    /// How linear layers are cut over them.
    pub linear: LinearForm,
    /// Ranks that each hold a tile of every image.
    pub spatial: SpatialGrid,
    /// Whether the ranks of `tensor`, or of `spatial`, split each layer in the way that suits it.
    pub integrated: Option<Mixture>,
    /// Over which samples batch norm takes its statistics.
    pub batch_norm: BatchNormSync,
    /// What ranks along the data axis shard, by ZeRO's stages: nothing, the optimizer's state, gradients too, or
    /// weights too.
    pub zero: usize,
    /// Steps that a rank takes by itself until weights are averaged: local SGD.
    pub average_every: usize,
    /// Steps that they take together before: post-local SGD (Lin et al. 2020).
    pub local_after: usize,
    /// Seconds that a rank waits for another at most.
    pub timeout_s: usize,
    /// How the model is cut into stages, where it is.
    #[serde(flatten)]
    pub pipeline: Option<PipelineConfig>,
}

/// A grid of ranks over an image: its rows and its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpatialGrid(pub [usize; 2]);

impl SpatialGrid {
    fn read(section: &mut Section) -> Result<SpatialGrid, Error> {
        let Some(value) = section.get("spatial") else { return Ok(SpatialGrid([1, 1])) };
        let wrong =
            || section.wrong("spatial", "a whole number of at least 1, or two: [rows, columns]", value);
        let number = |value: &Value| integer(value, 1, LARGEST).map_err(|_| wrong());
        match value {
            Value::Array(both) => match &both[..] {
                [rows, columns] => Ok(SpatialGrid([number(rows)?, number(columns)?])),
                _ => Err(wrong()),
            },
            one => Ok(SpatialGrid([number(one)?, 1])),
        }
    }

    /// Ranks on the grid: rows times columns.
    pub fn ranks(self) -> usize {
        self.0[0].saturating_mul(self.0[1])
    }
}

/// As it is written: one number, unless there are columns.
impl Serialize for SpatialGrid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            [rows, 1] => serializer.serialize_u64(rows as u64),
            both => both.serialize(serializer),
        }
    }
}

fn linear_form(section: &mut Section) -> Result<LinearForm, Error> {
    const FIELD: Field = texts("linear", "\"paired\", \"plain\", or a list of layers' names");
    match section.get(FIELD.name).map(|value| (value, value.as_str())) {
        None | Some((_, Some("paired"))) => Ok(LinearForm::Paired),
        Some((_, Some("plain"))) => Ok(LinearForm::Plain),
        Some((value, _)) => Ok(LinearForm::PlainFor(names(section, &FIELD, value)?)),
    }
}

fn mixture(section: &mut Section) -> Result<Option<Mixture>, Error> {
    const FIELD: Field = texts("integrated", "\"auto\", or a list of the names of model-parallel layers");
    match section.get(FIELD.name).map(|value| (value, value.as_str())) {
        None => Ok(None),
        Some((_, Some("auto"))) => Ok(Some(Mixture::Auto)),
        Some((value, _)) => Ok(Some(Mixture::ByModel(names(section, &FIELD, value)?))),
    }
}

/// A list of layers, at least one.
fn names(section: &mut Section, field: &Field, value: &Value) -> Result<Named, Error> {
    let names =
        section.read_field(field)?.filter(|names| value.is_array() && names.as_array() != Some(&Vec::new()));
    let FieldType::Texts(expected) = field.takes else { unreachable!("they are texts") };
    let names = names.ok_or_else(|| section.wrong(field.name, expected, value))?;
    Ok(Named(names.try_into().expect("a list of texts")))
}

/// A stage of ZeRO; `true` is the first.
fn read_zero(section: &mut Section) -> Result<usize, Error> {
    match section.get("zero") {
        None | Some(Value::Boolean(false)) => Ok(0),
        Some(Value::Boolean(true)) => Ok(1),
        Some(value) => {
            integer(value, 0, 3).map_err(|_| section.wrong("zero", "true, false, 0, 1, 2 or 3", value))
        }
    }
}

impl Default for Parallel {
    /// One rank.
    fn default() -> Parallel {
        Parallel::read(&mut Section::new("parallel", &Table::new()), None).expect("every field has a default")
    }
}

impl Parallel {
    /// `started` is the number of ranks that a launcher has started, where one has: they are all there is, so that
    /// what is left out follows from it.
    pub(super) fn read(section: &mut Section, started: Option<usize>) -> Result<Parallel, Error> {
        let values = section.read(fields::PARALLEL)?;
        let pipeline = PipelineConfig::read(section, &values)?;
        let stages = pipeline.as_ref().map_or(1, |pipeline| pipeline.stages);
        let tensor = values.get("tensor");
        let spatial = SpatialGrid::read(section)?;
        let others = stages.saturating_mul(tensor).saturating_mul(spatial.ranks());
        let data = values.find("data").or(started.map(|started| started / others)).unwrap_or(1).max(1);
        let parallel = Parallel {
            data,
            tensor,
            sequence: values.get("sequence"),
            linear: linear_form(section)?,
            spatial,
            integrated: mixture(section)?,
            batch_norm: values.get("batch_norm"),
            zero: read_zero(section)?,
            average_every: values.get("average_every"),
            local_after: values.get("local_after"),
            timeout_s: values.get("timeout_s"),
            pipeline,
        };
        if parallel.sequence && tensor == 1 {
            return Err(section.no_effect("sequence", "with `parallel.tensor` = 1: no layer is split"));
        }
        if parallel.linear != LinearForm::Paired {
            let field = section.field("linear");
            if tensor == 1 {
                return Err(Error::no_effect(field, "with `parallel.tensor` = 1: no layer is split"));
            }
            if parallel.sequence {
                let problem = "splits layers one by one, but with `parallel.sequence` activations between layers are split along the sequence";
                return Err(Error::conflict(field, problem));
            }
        }
        if parallel.local_after > 0 && !parallel.is_local() {
            let why = "with `parallel.average_every` = 1: gradients are reduced in every step";
            return Err(section.no_effect("local_after", why));
        }
        let Some(started) = started else { return Ok(parallel) };
        match Mesh::for_ranks(parallel.axis_sizes(), started) {
            Ok(_) => Ok(parallel),
            Err(error) => Err(Error::Ranks(error.to_string())),
        }
    }

    /// Pipeline stages: ranks that hold consecutive blocks of the model.
    pub fn stages(&self) -> usize {
        self.pipeline.as_ref().map_or(1, |pipeline| pipeline.stages)
    }

    /// Ranks along each axis.
    pub fn axis_sizes(&self) -> PerAxis {
        let spatial = self.spatial.ranks();
        PerAxis { data: self.data, pipeline: self.stages(), tensor: self.tensor, spatial }
    }

    /// Whether ranks go apart for some steps.
    pub fn is_local(&self) -> bool {
        self.average_every > 1
    }

    /// That ranks can shard state, or step by themselves, as the file says.
    pub(super) fn check_state(&self, run: &RunFile) -> Result<(), Error> {
        let asked = [
            ("zero", self.zero > 0, self.zero.to_string()),
            ("average_every", self.is_local(), self.average_every.to_string()),
        ];
        for (key, _, value) in asked.into_iter().filter(|(_, asked, _)| *asked) {
            let field = format!("parallel.{key}");
            if self.data == 1 {
                let why = "with `parallel.data` = 1: there is no other rank along the data axis";
                return Err(Error::no_effect(field, why));
            }
            if let Some(pipeline) = self.pipeline.as_ref().filter(|pipeline| pipeline.is_asynchronous()) {
                let problem = format!(
                    "is {value}, but with `parallel.schedule` = \"{}\" weights change while micro-batches are in flight: use \
                     a schedule that flushes every step",
                    pipeline.schedule
                );
                return Err(Error::conflict(field, problem));
            }
        }
        if self.zero > 0 && run.prune.as_ref().is_some_and(|prune| prune.state == StateForm::Dense) {
            let problem = "is \"dense\", but `parallel.zero` shards compressed state only: remove it";
            return Err(Error::conflict("prune.state", problem));
        }
        for (axis, is_split) in [("spatial", self.spatial.ranks() > 1), ("sequence", self.sequence)] {
            if is_split && run.train.noise_scale {
                return Err(partial_gradient(axis));
            }
        }
        if self.spatial.ranks() > 1 && run.train.batch_norm_group > 0 {
            let problem = format!(
                "is {}, but with `parallel.spatial` ranks hold tiles of every sample",
                run.train.batch_norm_group
            );
            return Err(Error::conflict("train.batch_norm_group", problem));
        }
        if !self.is_local() {
            return Ok(());
        }
        let apart = format!(
            "but with `parallel.average_every` = {} each rank takes its own steps",
            self.average_every
        );
        for (axis, ranks, group) in [
            ("pipeline", self.stages(), "pipeline"),
            ("tensor", self.tensor, "tensor-parallel group"),
            ("spatial", self.spatial.ranks(), "spatial group"),
        ] {
            if ranks > 1 {
                let problem = format!("is {ranks}, {apart}: a rank here would be a {group} of {ranks} ranks");
                return Err(Error::conflict(format!("parallel.{axis}"), problem));
            }
        }
        if self.zero > 0 {
            let problem = format!("is {}, {apart} and needs its full state", self.zero);
            return Err(Error::conflict("parallel.zero", problem));
        }
        if self.batch_norm == BatchNormSync::Synchronised {
            return Err(Error::conflict("parallel.batch_norm", format!("is \"synchronised\", {apart}")));
        }
        if run.train.precision == Precision::Bf16 && run.optimizer.master == MasterForm::LowBits {
            let problem =
                format!("is \"low-bits\", {apart} and f32 master weights are averaged: set it to \"f32\"");
            return Err(Error::conflict("optimizer.master", problem));
        }
        if run.train.noise_scale {
            let problem = format!("is true, {apart} and never has the gradient of the full batch");
            return Err(Error::conflict("train.noise_scale", problem));
        }
        Ok(())
    }

    /// That one group of ranks can split each layer in its own way.
    pub(super) fn check_integrated(&self, run: &RunFile) -> Result<(), Error> {
        if self.integrated.is_none() {
            return Ok(());
        }
        let spatial = self.spatial.ranks();
        let (axis, ranks) =
            if spatial > 1 { ("parallel.spatial", spatial) } else { ("parallel.tensor", self.tensor) };
        if ranks == 1 {
            let why = "with `parallel.tensor` = 1 and `parallel.spatial` = 1: there is no group of ranks";
            return Err(Error::no_effect("parallel.integrated", why));
        }
        if self.tensor > 1 && spatial > 1 {
            let problem = format!(
                "is {}, but `parallel.integrated` is for one group of ranks, and `parallel.spatial` = {spatial}: leave one \
                 of them out",
                self.tensor
            );
            return Err(Error::conflict("parallel.tensor", problem));
        }
        if self.linear != LinearForm::Paired {
            let problem = "is written, but `parallel.integrated` decides how linear layers are split";
            return Err(Error::conflict("parallel.linear", problem));
        }
        let micro_batch = run.batch().micro_batch;
        if micro_batch < ranks {
            let problem = format!(
                "is {ranks}, but with `parallel.integrated` these ranks split the {micro_batch} samples of a micro-batch"
            );
            return Err(Error::conflict(axis, problem));
        }
        if run.train.noise_scale {
            return Err(partial_gradient("integrated"));
        }
        if run.train.batch_norm_group > 0 {
            let problem = format!(
                "is {}, but with `parallel.integrated` ranks split the samples of a micro-batch",
                run.train.batch_norm_group
            );
            return Err(Error::conflict("train.batch_norm_group", problem));
        }
        if let Some(pipeline) = &self.pipeline {
            let problem = format!(
                "is {}, but `parallel.integrated` does not work with pipeline parallelism",
                pipeline.stages
            );
            return Err(Error::conflict("parallel.pipeline", problem));
        }
        Ok(())
    }

    /// That every rank gets the same number of micro-batches of the same size.
    pub(super) fn check(&self, train: &Train) -> Result<(), Error> {
        let portions = self.data * train.micro_batches;
        if train.batch.is_multiple_of(portions) {
            return Ok(());
        }
        let problem = format!(
            "is {}, but `train.batch` = {} cannot be split into {portions} equal parts ({} ranks with \
             `train.micro_batches` = {})",
            self.data, train.batch, self.data, train.micro_batches
        );
        Err(Error::conflict("parallel.data", problem))
    }
}

/// The noise scale compares gradients that ranks have whole.
fn partial_gradient(axis: &str) -> Error {
    let problem = format!(
        "is true, but with `parallel.{axis}` a rank has only a partial sum of a micro-batch's gradient"
    );
    Error::conflict("train.noise_scale", problem)
}

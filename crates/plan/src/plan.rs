//! The plan: a run file and the facts of its data, resolved once into everything a run needs to know. After this,
//! nothing reads the run file for a size.

mod checks;
mod network;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

use crate::batch::BatchSizes;
use crate::config::{self, FieldChange, RunFile};
use crate::data::DatasetSpec;
use crate::data_parallel::DataParallelMode;
use crate::device::{DeviceChoice, DeviceKind};
use crate::error::Error;
use crate::intervals::TrainIntervals;
use crate::layout::{Layout, LocalModel};
use crate::memory::{MemoryPlan, ModelParallelRank, Prediction, PredictionInputs, StateBytes, StatePhases};
use crate::mesh::{Mesh, PerAxis};
use crate::optimization::Optimization;
use crate::pipeline::PipelinePlan;
use crate::pruning::{PruneMethod, Pruning};
use crate::rounds::Rounds;
use crate::sample::SampleConfig;
use crate::schedule::{Placement, Schedule};
use crate::scoring::{self, ScoredBatch, Scoring};
use crate::spec::presets::ImageSize;
use crate::spec::{ModelSpec, Precision};
use crate::stages::{self, StageBlocks};
use crate::storage::StorageForms;
use crate::tiles::Region;

/// What only the data knows. What does not apply is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DataFacts {
    /// Tokens there are: every id is below this.
    pub vocab: Option<usize>,
    /// Rows, columns and colours of an image.
    pub image: Option<ImageSize>,
    /// Kinds of image: every label is below this.
    pub classes: Option<usize>,
}

/// A resolved run: what was decided, and what follows from it. The same on every rank; [`Plan::rank`] says
/// what one of them holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What the data said.
    pub facts: DataFacts,
    /// The network as a run file names it: what other programs' formats call it follows from that.
    pub network: config::ModelConfig,
    /// The model that it is, every size known, all shapes checked.
    pub model: ModelSpec,
    /// What is learnt from.
    pub data: DatasetSpec,
    /// Where all randomness comes from: initial weights, order of samples, dropout.
    pub seed: u64,
    /// How the samples of a step are cut.
    pub batch: BatchSizes,
    /// In which form a rank keeps what it trains.
    pub storage: StorageForms,
    /// What is done with the gradient of a step.
    pub optimization: Optimization,
    /// How replicas come to the same weights.
    pub data_parallel: DataParallelMode,
    /// Which weights go, and when.
    pub pruning: Option<Pruning>,
    /// Whether prunable weights that are zero in what the run starts from stay so.
    pub keep_zeros: bool,
    /// Which ranks there are.
    pub mesh: Mesh,
    /// What each of them has of the model's tensors.
    pub layout: Layout,
    /// The stages, and the order in which they work.
    pub pipeline: PipelinePlan,
    /// The blocks of each virtual stage.
    pub stage_blocks: StageBlocks,
    /// What happens after which step.
    pub intervals: TrainIntervals,
    /// Text that the model generates in the course of the run, where a person wants to see it.
    pub sample: Option<SampleConfig>,
    /// What is to compute it.
    pub device: DeviceChoice,
    /// How long a rank waits for another.
    pub timeout: Duration,
    /// What a person should know of how the run file was read.
    pub notes: Vec<String>,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Flops of one step, forward and backward, recomputation included.
    pub step_flops: f64,
    /// Predicted bytes of a rank, the most that any has of each category.
    pub memory: MemoryPlan,
    /// Predicted bytes of all stages together: what one replica takes where its ranks share a machine.
    pub replica_memory: MemoryPlan,
    /// What the model itself takes at most, before and after pruning.
    pub state_phases: StatePhases,
    /// Predicted bytes of those of the same model-parallel group, stage by stage.
    rank_memory: Vec<Vec<MemoryPlan>>,
    record: ResolvedRun,
}

/// The run file that a plan was made from, to be written, compared and printed: nothing else can be read of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ResolvedRun(RunFile);

impl ResolvedRun {
    /// The resolved file: every field, also those that were left out.
    pub fn to_toml(&self) -> Result<String, Error> {
        self.0.to_toml()
    }

    /// What differs from what the run `was`; see [`RunFile::changes`].
    pub fn changes(
        &self,
        was: &RunFile,
        same_file: impl Fn(&str, &str) -> bool,
    ) -> Result<Vec<FieldChange>, Error> {
        self.0.changes(was, same_file)
    }

    /// One sentence where the run has another length than the run `was`; see [`RunFile::new_length`].
    pub fn new_length(&self, was: &RunFile, done: u64, samples: usize) -> Option<String> {
        self.0.new_length(was, done, samples)
    }
}

/// What one rank of a plan holds.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPlan {
    /// Its coordinate on each axis.
    pub coordinates: PerAxis,
    /// The blocks of its chunks of the model, in the order of its chunks.
    pub blocks: Vec<Range<usize>>,
    /// Its tile of every image, where images are cut.
    pub tile: Option<Region>,
    /// Numbers of the model that it holds, pruned ones included.
    pub parameters: u64,
    /// Predicted bytes, at the peak of each category.
    pub memory: MemoryPlan,
}

impl Plan {
    /// Resolves a run, or says what in it does not fit the data or itself.
    pub fn new(run: RunFile, facts: DataFacts) -> Result<Plan, Error> {
        let mut model = network::build(&run.model, facts)?;
        model.check()?;
        let (batch, storage, data_parallel) = (run.batch(), run.storage(), run.data_parallel());
        let (pruning, pipeline, intervals) = (run.prune.clone(), run.stages_and_order(), run.intervals());
        model.group_batch_norms(batch.norm_group.unwrap_or(0));
        let parameters = model.parameters();
        if let Some(pruning) = &pruning {
            checks::pruning(pruning, &model, &parameters, intervals.length)?;
        }
        checks::norms(&batch, &model)?;
        checks::recompute(storage.recompute, &model)?;
        let each = 2 * storage.precision.size() + storage.optimizer_bytes;
        let stage_blocks = stages::stage_blocks(&model, &pipeline, run.cut(), each)?;
        checks::ties(&pipeline, &model, &stage_blocks)?;
        let schedule = match (pipeline.stages, pipeline.is_asynchronous()) {
            // One micro-batch after the other.
            (1, _) => PipelinePlan { micro_batches: 1, ..pipeline.clone() }.schedule(1)?,
            (_, false) => pipeline.schedule(1)?,
            // Enough batches that one that never ends has come into its stride.
            (stages, true) => pipeline.schedule(2 + stages)?,
        };
        let mesh = run.mesh();
        let layout = Layout::new(&model, &parameters, run.cuts())?;
        checks::scattering(data_parallel, &schedule)?;
        let stages_of = |(peer, local): (usize, &LocalModel), pruning: Option<&Pruning>, is_pruned: bool| {
            let kept = pruning.map(|pruning| local.kept(pruning.kept_by_parameter(&parameters)));
            let on_gpu = run.device.kind == DeviceKind::Cuda;
            let prediction = Prediction {
                inputs: PredictionInputs::of(&local.model, &local.parameters, batch.micro_batch),
                parameters: &local.parameters,
                storage,
                data_parallel,
                batch,
                pruning,
                kept,
                is_pruned,
                model_parallel: ModelParallelRank::of(&layout, peer, &parameters, on_gpu),
            };
            prediction.stages(&local.model, &stage_blocks, &schedule)
        };
        let of_ranks = |pruning: Option<&Pruning>, is_pruned| {
            let model_parallel = layout.local_models().iter().enumerate();
            model_parallel
                .map(|peer| stages_of(peer, pruning, is_pruned))
                .collect::<Result<Vec<Vec<MemoryPlan>>, _>>()
        };
        let rank_memory = of_ranks(pruning.as_ref(), false)?;
        let state_phases = match pruning.as_ref().filter(|pruning| !pruning.method.at_start()) {
            None => StatePhases::of(&rank_memory.concat(), &[], &rank_memory.concat()),
            Some(last) => {
                let first = Pruning { sparsity: last.first_sparsity(intervals.length), ..last.clone() };
                let [first, last] = [&first, last].map(|pruning| of_ranks(Some(pruning), true));
                StatePhases::of(&rank_memory.concat(), &first?.concat(), &last?.concat())
            }
        };
        let all = |both: fn(u64, u64) -> u64| {
            rank_memory.iter().flatten().fold(MemoryPlan::default(), |sum, rank| sum.with(*rank, both))
        };
        Ok(Plan {
            parameters: parameters.iter().fold(0, |sum: u64, one| sum.saturating_add(one.elements())),
            step_flops: model.train_flops(batch.samples, storage.recompute)?,
            memory: all(u64::max),
            replica_memory: all(u64::saturating_add),
            state_phases,
            rank_memory,
            data: run.data.clone(),
            seed: run.seed,
            batch,
            storage,
            optimization: run.optimization(),
            data_parallel,
            pruning,
            keep_zeros: run.train.keep_zeros,
            mesh,
            layout,
            pipeline,
            stage_blocks,
            intervals,
            sample: run.sample.clone(),
            device: run.device.clone(),
            timeout: run.timeout(),
            notes: run.notes.clone(),
            network: run.model.clone(),
            model,
            facts,
            record: ResolvedRun(run),
        })
    }

    /// The same run on one rank, in micro-batches of the same size and with the same form of state.
    pub fn single_rank(&self) -> Result<Plan, Error> {
        Plan::new(self.record.0.single_rank(), self.facts)
    }

    /// The same ranks as they generate text: each has the same parameters, and nothing is split along the
    /// sequence, of which one position comes at a time. None where they can as they are.
    pub fn for_generation(&self) -> Result<Option<Plan>, Error> {
        if !self.layout.has_sequence() {
            return Ok(None);
        }
        let mut run_file = self.record.0.clone();
        run_file.parallel.sequence = false;
        // Stages stay where they are: their weights are.
        Ok(Some(Plan { stage_blocks: self.stage_blocks.clone(), ..Plan::new(run_file, self.facts)? }))
    }

    /// The run file that it was made from.
    pub fn record(&self) -> &ResolvedRun {
        &self.record
    }

    /// What the ranks of a pipeline do for so many batches in a row; without one, what the only rank does.
    pub fn schedule(&self, batches: usize) -> Result<Schedule, Error> {
        let schedule = self.pipeline.schedule(batches)?;
        Ok(if self.data_parallel.is_sharded() { schedule.gathering() } else { schedule })
    }

    /// Steps of the whole run when there are so many training samples.
    pub fn total_steps(&self, samples: usize) -> usize {
        self.intervals.length.steps(samples, self.batch.samples)
    }

    /// What a rank of the mesh holds.
    pub fn rank(&self, rank: usize) -> Result<RankPlan, Error> {
        let coordinates = self.mesh.coordinates(rank);
        let blocks = self.blocks_of(&self.schedule(1)?.placement, coordinates.pipeline);
        let local = self.layout.of(coordinates);
        let held = self.model.block_tensors().held(&blocks);
        Ok(RankPlan {
            coordinates,
            blocks,
            tile: local.tile(),
            parameters: held.into_iter().map(|id| local.parameters[id].elements()).sum(),
            memory: self.rank_memory[self.layout.model_parallel_rank(coordinates)][coordinates.pipeline],
        })
    }

    /// The blocks of a stage's chunks.
    fn blocks_of(&self, placement: &Placement, stage: usize) -> Vec<Range<usize>> {
        placement.chunks(stage).iter().map(|chunk| self.stage_blocks[chunk.virtual_stage].clone()).collect()
    }

    /// Bytes for each weight that pruning may touch, once it has.
    pub fn state_bytes(&self) -> StateBytes {
        StateBytes::predict(self.storage, self.data_parallel, self.batch.replicas, self.pruning.as_ref())
    }

    /// Steps of a run of so many after which all is pruned that is to go, at the latest: 0 before the first
    /// one, none where nothing is pruned.
    pub fn pruned_after(&self, steps: u64) -> Option<u64> {
        let pruning = self.pruning.as_ref()?;
        match Rounds::of(&self.model, pruning) {
            None => Some(pruning.method.pruned_after(steps)),
            Some(rounds) => {
                let trainings = rounds.trainings(self.intervals.length, steps as usize).ok()?;
                Some(trainings.last_begins())
            }
        }
    }

    /// How the samples run that weights are scored by.
    pub fn scored_batch(&self) -> ScoredBatch {
        let method = self.pruning.as_ref().map(|pruning| pruning.method);
        ScoredBatch::of(method, &self.batch, !self.model.buffers().is_empty())
    }

    /// How candidates are scored on a device of so much memory, what the system and the kernels take
    /// included; None where the method needs no gradients. An error where it does not fit, however it is split.
    pub fn scoring(&self, memory: Option<u64>) -> Result<Option<Scoring>, Error> {
        let Some(pruning) = &self.pruning else { return Ok(None) };
        let placement = self.schedule(1)?.placement;
        let tensors = self.model.block_tensors();
        let of_stages = |local: &LocalModel| {
            let all = &local.parameters;
            let of_stage = |stage| {
                let held = tensors.held(&self.blocks_of(&placement, stage));
                scoring::ScoringMemory::of(all, &held, Some(pruning))
            };
            (0..self.pipeline.stages).map(of_stage).collect::<Vec<_>>()
        };
        let needs = self.layout.local_models().iter().flat_map(of_stages).collect::<Option<Vec<_>>>();
        let Some(needs) = needs else { return Ok(None) };
        // GraSP's passes are in f32, and what its gates chose stays beside them.
        let activations = match pruning.method {
            PruneMethod::Grasp { .. } => {
                let samples = self.scored_batch().most();
                let recompute = self.storage.recompute;
                self.model.activation_bytes(samples, Precision::F32, recompute)?.saturating_mul(2)
            }
            _ => self.memory.activations,
        };
        scoring::fit(pruning.method.name(), &needs, memory, self.memory.weights, activations).map(Some)
    }
}

#[cfg(test)]
impl Plan {
    /// Of a run on text of 256 tokens, or on images of 32 x 32 in ten classes.
    pub(crate) fn of_text(text: &str) -> Plan {
        let facts = DataFacts { vocab: Some(256), image: Some((32, 32, 3)), classes: Some(10) };
        Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap()
    }
}

/// As `plan.json` has it.
impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut plan = serializer.serialize_struct("Plan", 10)?;
        plan.serialize_field("run", &self.record)?;
        plan.serialize_field("facts", &self.facts)?;
        plan.serialize_field("model", &self.model)?;
        plan.serialize_field("micro_batch", &self.batch.micro_batch)?;
        plan.serialize_field("learning_rate", &self.optimization.learning_rate)?;
        plan.serialize_field("parameters", &self.parameters)?;
        plan.serialize_field("step_flops", &self.step_flops)?;
        plan.serialize_field("memory", &self.memory)?;
        plan.serialize_field("replica_memory", &self.replica_memory)?;
        plan.serialize_field("parts", &self.stage_blocks)?;
        plan.end()
    }
}

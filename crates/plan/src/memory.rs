//! Predicted bytes of one rank, by the categories in which memory is counted during a run.
//!
//! For each parameter: its weight and its gradient in the precision of the run (over several micro-batches
//! the gradient is accumulated in f32), the optimizer's moments in f32 or bf16, and in bf16 a master weight
//! in f32 (or its low bits). Pruned, gradients and state are those of kept weights, and a mask is added.
//! Buffers are f32 whatever the precision. Where ranks shard the optimizer's state, or gradients or weights
//! too, a rank has its shard of each parameter's (exact where it is known how much of each is kept).
//! Activations are those of one micro-batch.

mod dense_blocks;
mod inputs;
mod memory_plan;
mod messages;
mod model_parallel;
mod state_bytes;
mod state_phases;

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use crate::batch::BatchSizes;
use crate::data_parallel::{DataParallelMode, ZeroStage};
use crate::packets::{BUCKET, SharedVector, arrive_last, average_bytes, message_bytes, scattered_bytes};
use crate::pruning::{PrunedKernels, Pruning};
use crate::schedule::{Action, Chunk, Pass, Placement, Schedule, Updates};
use crate::scoring::{GrowthCandidate, ScoredBatch, ScoringMemory, growth_bytes};
use crate::spec::activations::StageActivations;
use crate::spec::message_sizes::shared_logit_bytes;
use crate::spec::{ModelSpec, Parameter, ShapeError};
use crate::stages::StageBlocks;
use crate::storage::StorageForms;

use self::dense_blocks::ParamSharers;
use self::messages::{ReducedGradient, most_in_passes};
pub use inputs::{PredictionInputs, Tensors};
pub use memory_plan::MemoryPlan;
pub use model_parallel::ModelParallelRank;
pub use state_bytes::StateBytes;
pub use state_phases::StatePhases;

/// What the bytes of a model's ranks follow from, listed once for all of them.
pub struct Prediction<'a> {
    /// The form of what is kept.
    pub storage: StorageForms,
    /// What replicas do with updates,
    pub data_parallel: DataParallelMode,
    /// and how the samples of a step are cut.
    pub batch: BatchSizes,
    /// Which weights go, and when.
    pub pruning: Option<&'a Pruning>,
    /// Of the rank.
    pub parameters: &'a [Parameter],
    pub inputs: PredictionInputs,
    /// Weights of each parameter that stay, where some are to go.
    pub kept: Option<Vec<Option<u64>>>,
    /// Whether pruning is behind, whenever it comes.
    pub is_pruned: bool,
    /// Which shards of layers it has.
    pub model_parallel: ModelParallelRank,
}

impl Prediction<'_> {
    /// Of the ranks of a pipeline, at the peak of each category: where pruning comes after the first step,
    /// state is dense until then.
    pub fn stages(
        &self,
        model: &ModelSpec,
        stage_blocks: &StageBlocks,
        schedule: &Schedule,
    ) -> Result<Vec<MemoryPlan>, ShapeError> {
        let StorageForms { precision, recompute, .. } = self.storage;
        let activations = |samples| {
            model.stage_activations(stage_blocks.iter().cloned(), samples, precision, recompute).map(Rc::new)
        };
        self.stages_with(stage_blocks, schedule, activations)
    }

    /// The same where it is known what each stage keeps of a micro-batch of so many samples.
    pub(crate) fn stages_with<E>(
        &self,
        stage_blocks: &StageBlocks,
        schedule: &Schedule,
        activations: impl Fn(usize) -> Result<Rc<Vec<StageActivations>>, E>,
    ) -> Result<Vec<MemoryPlan>, E> {
        let each = activations(self.batch.micro_batch)?;
        let scored = self.pruning.map(|pruning| {
            let norms = !self.inputs.tensors.buffers.is_empty();
            ScoredBatch::of(Some(pruning.method), &self.batch, norms).most()
        });
        let scored = match scored.filter(|samples| *samples > self.batch.micro_batch) {
            Some(samples) => {
                Some((activations(samples)?, Schedule::forward_and_backward(&schedule.placement)))
            }
            None => None,
        };
        let sharers = self.sharers(stage_blocks, &schedule.placement);
        let of_rank = |rank: usize| {
            let chunks = schedule.placement.chunks(rank);
            let blocks_of = |chunk: &Chunk| stage_blocks[chunk.virtual_stage].clone();
            let held = in_flight(&schedule.ranks[rank], |chunk| each[chunks[chunk].virtual_stage]);
            let blocks: Vec<Range<usize>> = chunks.iter().map(blocks_of).collect();
            let scored = scored.as_ref().map_or(0, |(each, list)| {
                in_flight(&list.ranks[rank], |chunk| each[chunks[chunk].virtual_stage]).activations
            });
            let held = PeakMemory { activations: held.activations.max(scored), ..held };
            let mut memory = self.of_blocks(&blocks, &sharers, schedule.placement.copies() > 1, held);
            if schedule.updates == Updates::DoubleBuffered && rank > 0 {
                // Those of one batch wait until the first stage has seen that all are finite.
                memory.gradients = memory.gradients.saturating_mul(2);
            }
            memory
        };
        Ok((0..schedule.stages()).map(of_rank).collect())
    }

    /// Who shares each parameter: those with a partial sum of its gradient, in every copy of the stages that
    /// use it and in every replica.
    fn sharers(&self, stage_blocks: &StageBlocks, placement: &Placement) -> Vec<ParamSharers> {
        let mut stages: Vec<HashSet<usize>> = vec![HashSet::new(); self.parameters.len()];
        for (virtual_stage, blocks) in stage_blocks.iter().enumerate() {
            for id in self.inputs.tensors.blocks.parameters(blocks.clone()) {
                stages[id].extend(placement.holders(virtual_stage));
            }
        }
        let replicas = self.batch.replicas as u64;
        let sharers = stages.iter().zip(&self.model_parallel.partial_ranks);
        let of_param = |(stages, partial_ranks): (&HashSet<usize>, &u64)| {
            let ranks = replicas * partial_ranks * stages.len().max(1) as u64;
            let shards_weight = self.data_parallel.shards_weights() && stages.len() < 2;
            ParamSharers { ranks, of_weight: if shards_weight { ranks } else { 1 } }
        };
        sharers.map(of_param).collect()
    }

    /// What some blocks of a model need, beside activations and old versions of the weights. So many ranks
    /// share each parameter; `copies` says whether those of one replica have copies of each other's blocks.
    fn of_blocks(
        &self,
        blocks: &[Range<usize>],
        sharers: &[ParamSharers],
        copies: bool,
        held: PeakMemory,
    ) -> MemoryPlan {
        let Prediction { storage, data_parallel, pruning, .. } = *self;
        let PeakMemory { activations, versions } = held;
        let held = self.inputs.tensors.blocks.held(blocks);
        let scoring = ScoringMemory::of(self.parameters, &held, pruning).map_or(0, |needs| needs.bytes(1));
        let grown = pruning
            .map_or(0, |pruning| growth_bytes(pruning, self.batch.micro_batches, &self.candidates(&held)));
        let (precision, each) = (storage.precision, storage.optimizer_bytes);
        let mut largest = 0;
        let (mut dense, mut candidates, mut kept_sum, mut mask, mut packed) = (0u64, 0u64, 0u64, 0u64, 0u64);
        let (mut vectors, mut tied) = (Vec::new(), Vec::new());
        let mut full_weights = Vec::new();
        // Elements of weights on a rank, before they are pruned and once they are.
        let (mut first_weights, mut rest_weights) = (0u64, 0u64);
        let mut sent_bytes = vec![None; self.parameters.len()];
        let is_pruned = pruning.is_some_and(|pruning| self.is_pruned || pruning.method.at_start());
        let compressed = storage.compressed && is_pruned;
        let pulled = pruning.map_or(0, |pruning| if is_pruned { 0 } else { pruning.method.pull_bytes() });
        for id in held {
            let parameter = &self.parameters[id];
            let elements = parameter.elements();
            let mut sent = elements;
            match self.kept.as_ref().and_then(|kept| kept[id]) {
                None => dense = dense.saturating_add(elements),
                Some(kept) => {
                    candidates = candidates.saturating_add(elements);
                    largest = elements.max(largest);
                    kept_sum = kept_sum.saturating_add(kept);
                    mask = mask.saturating_add(mask_bytes(elements, kept));
                    if self.is_multiplied_sparsely(id, kept) {
                        mask = mask.saturating_add(sparse_bytes(parameter, kept));
                    }
                    sent = if compressed { kept } else { elements };
                }
            }
            let ParamSharers { ranks, of_weight } = sharers[id];
            first_weights = first_weights.saturating_add(elements.div_ceil(of_weight));
            rest_weights = rest_weights.saturating_add(sent.div_ceil(of_weight));
            let vector = SharedVector { elements: sent, ranks };
            if of_weight == 1 && ranks > 1 {
                full_weights.push(vector);
            }
            if self.inputs.tensors.tied.contains(&id) { &mut tied } else { &mut vectors }.push(vector);
            let bytes = sent.saturating_mul(precision.size());
            if ranks > 1 {
                packed += if bytes < BUCKET { bytes } else { 0 };
                let tied = self.inputs.tensors.tied.contains(&id);
                sent_bytes[id] = (!tied).then_some(ReducedGradient {
                    partial_ranks: self.model_parallel.partial_ranks[id],
                    bytes,
                });
            }
        }
        let parameters = dense.saturating_add(candidates);
        let stored = match pruning.filter(|_| compressed) {
            Some(pruning) if pruning.method.is_by_layer() => dense.saturating_add(kept_sum),
            Some(pruning) => dense.saturating_add(pruning.kept_of(candidates)),
            None => parameters,
        };
        let all: Vec<SharedVector> = vectors.iter().chain(&tied).copied().collect();
        let sum = |numbers: &mut dyn Iterator<Item = u64>| numbers.fold(0, u64::saturating_add);
        let shards = |of: &[SharedVector]| sum(&mut of.iter().map(|one| one.shard_elements()));
        let each_gradient = storage.gradient_bytes();
        let (local, summed) = match data_parallel {
            DataParallelMode::Sharded(ZeroStage::State) => {
                (shards(&all), stored.saturating_mul(each_gradient))
            }
            DataParallelMode::Sharded(_) => {
                // Those of tied parameters are complete until the last use has made its gradient; they are
                // rounded for their message before what arrives last.
                let tied = sum(&mut tied.iter().map(|one| one.elements));
                let is_rounded =
                    blocks.len() == 1 && arrive_last(&vectors, precision.size(), self.batch.micro_batches);
                let each_tied = if is_rounded { precision.size() } else { each_gradient };
                let arrived = shards(&vectors).saturating_mul(each_gradient);
                let together = arrived.saturating_add(tied.saturating_mul(each_tied));
                (shards(&all), together.max(tied.saturating_mul(each_gradient)))
            }
            _ => (stored, stored.saturating_mul(each_gradient)),
        };
        let mut statistics: Vec<usize> = blocks
            .iter()
            .flat_map(|virtual_stage| self.inputs.tensors.blocks.buffers(virtual_stage.clone()))
            .collect();
        statistics.sort_unstable();
        statistics.dedup();
        let buffers: u64 =
            statistics.into_iter().map(|id| 4 * self.inputs.tensors.buffers[id].elements()).sum();
        // Until it is known what is kept, weights are dense, unless they are not there at all.
        let shards_weights = data_parallel.shards_weights();
        let resting = match pruning.filter(|_| storage.compressed_weights) {
            _ if shards_weights => rest_weights,
            Some(_) if compressed => stored,
            _ => parameters,
        };
        let first = match pruning {
            Some(pruning) if pruning.method.needs_no_pass() => resting,
            _ if shards_weights => first_weights,
            _ => parameters,
        };
        let [weights, first] = [resting, first].map(|numbers| numbers.saturating_mul(precision.size()));
        let versioned = |weights: u64| weights.saturating_mul(1 + versions).saturating_add(buffers);
        let messages = &self.inputs.messages;
        let passes = |summed: &dyn Fn(usize) -> Option<ReducedGradient>| {
            most_in_passes(blocks, messages, precision.size(), copies, summed)
        };
        let within = passes(&|_| None);
        let ends = |virtual_stage: &Range<usize>| virtual_stage.end == messages.len();
        let classes = self.model_parallel.classes.filter(|_| blocks.iter().any(ends));
        let logits = classes.map_or(0, |ranks| {
            let (rows, classes) = (self.inputs.logit_rows, self.inputs.tensors.classes);
            shared_logit_bytes(rows, classes, ranks, precision, self.model_parallel.logits)
        });
        let gradients = match data_parallel {
            // Until the step, what is packed travels beside the messages of layers.
            DataParallelMode::Replicated => passes(&|id| sent_bytes[id]).max(packed),
            DataParallelMode::Sharded(ZeroStage::State) => message_bytes(&all, precision.size()),
            DataParallelMode::Sharded(stage) => {
                // Gradients come in the order of the backward.
                vectors.reverse();
                let gathered = if stage < ZeroStage::Weights { &all } else { &full_weights };
                let micro_batches = self.batch.micro_batches;
                let scattered = scattered_bytes(&vectors, &tied, precision.size(), micro_batches, gathered);
                scattered.saturating_add(self.gathered_ahead(blocks, sharers, compressed))
            }
            DataParallelMode::Local { after, .. } => {
                let lengths: Vec<u64> = all.iter().map(|one| one.elements).collect();
                let average = average_bytes(&lengths, storage.averaged_vectors());
                if after > 0 { average.max(packed) } else { average }
            }
        };
        MemoryPlan {
            weights: versioned(weights).max(first.saturating_add(buffers)),
            weights_at_rest: versioned(weights),
            gradients: summed,
            optimizer: local.saturating_mul(each).saturating_add(pulled.saturating_mul(candidates)),
            mask,
            scoring: scoring.max(grown),
            setup: match pruning.filter(|_| storage.compressed_weights) {
                Some(pruning) if pruning.method.needs_no_pass() => {
                    largest.saturating_mul(4 + precision.size())
                }
                _ => 0,
            },
            scores_beside_state: grown > 0,
            activations,
            data: 0,
            workspace: (shards_weights || storage.compressed_weights && pruning.is_some())
                .then(|| self.expanded(blocks, sharers, compressed)),
            communication: gradients.max(within).max(logits),
        }
    }

    /// Whether products leave out the zeros of a parameter of which so much is kept.
    fn is_multiplied_sparsely(&self, id: usize, kept: u64) -> bool {
        let skips = kept as f64 <= PrunedKernels::MOST_KEPT * self.parameters[id].elements() as f64;
        let sparse = self.pruning.is_some_and(Pruning::multiplies_sparsely);
        sparse && skips && self.inputs.tensors.linear.contains(&id)
    }

    /// Those of some parameters that have masks.
    fn candidates(&self, held: &[usize]) -> Vec<GrowthCandidate> {
        let one = |id: &usize| {
            let kept = self.kept.as_ref()?[*id]?;
            Some(GrowthCandidate {
                full: self.model_parallel.full[*id],
                elements: self.parameters[*id].elements(),
                kept,
            })
        };
        held.iter().filter_map(one).collect()
    }
}

/// What a rank holds at most in the course of its list.
#[derive(Default)]
pub(crate) struct PeakMemory {
    /// Bytes kept of micro-batches in flight.
    pub activations: u64,
    /// Old versions of the weights.
    pub versions: u64,
}

/// Walks a list; `of` is what a chunk keeps of a micro-batch.
pub(crate) fn in_flight(list: &[Action], of: impl Fn(usize) -> StageActivations) -> PeakMemory {
    let (mut now, mut most) = (PeakMemory::default(), PeakMemory::default());
    for action in list {
        // What one micro-batch keeps before the action, at most in its course, and behind it.
        let (before, within, after) = match action.compute() {
            Some((pass, work)) => {
                let StageActivations { kept, backward, backward_input, deferred } = of(work.chunk);
                match pass {
                    Pass::Forward => (0, kept, kept),
                    Pass::Backward => (kept, backward, 0),
                    Pass::BackwardInput => (kept, backward_input, deferred),
                    Pass::BackwardWeight => (deferred, deferred, 0),
                }
            }
            None => (0, 0, 0),
        };
        let others = now.activations.saturating_sub(before);
        most.activations = most.activations.max(others.saturating_add(within));
        now.activations = others.saturating_add(after);
        match action {
            Action::Stash { .. } => now.versions += 1,
            Action::Drop { .. } => now.versions -= 1,
            _ => {}
        }
        most.versions = most.versions.max(now.versions);
    }
    most
}

/// Bytes that say where the kept weights of a matrix are, by rows and by columns.
fn sparse_bytes(parameter: &Parameter, kept: u64) -> u64 {
    let ends = parameter.shape.iter().map(|extent| *extent as u64 + 1).sum::<u64>();
    kept.saturating_mul(3).saturating_add(ends).saturating_mul(4)
}

/// Bytes of a mask in the smaller form: a bit a weight and a directory, or four bytes for each kept one.
fn mask_bytes(elements: u64, kept: u64) -> u64 {
    (4 * (elements.div_ceil(32) + elements.div_ceil(512))).min(kept.saturating_mul(4))
}

#[cfg(test)]
mod tests;

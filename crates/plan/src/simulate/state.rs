//! Bytes of a rank under an engine: ours as the plan predicts them, others by what their papers say.

use std::ops::Range;
use std::rc::Rc;

use super::block_weights::WeightCounts;
use super::rank_model::RankModel;
use super::{Candidate, Simulation};
use crate::batch::BatchSizes;
use crate::data_parallel::DataParallelMode;
use crate::engine::{AttentionKernel, EngineStash, EngineState};
use crate::error::Error;
use crate::memory::{MemoryPlan, Prediction, in_flight};
use crate::schedule::Schedule;
use crate::spec::activations::StageActivations;
use crate::spec::{LayerKernel, RecomputeMode, Shape};
use crate::stages::StageBlocks;
use crate::storage::StorageForms;

/// Bytes of the rank that has most.
pub fn memory(
    job: &Simulation,
    candidate: &Candidate,
    model: &RankModel,
    stage_blocks: &StageBlocks,
    schedule: &Schedule,
    micro_batches: usize,
) -> Result<MemoryPlan, Error> {
    let mut ranks = match job.engine.state {
        EngineState::Exact => {
            let storage = StorageForms {
                recompute: candidate.recompute,
                accumulates: micro_batches > 1,
                compressed: candidate.compressed,
                compressed_weights: candidate.compressed_weights,
                ..job.plan.storage
            };
            let batch = BatchSizes {
                replicas: candidate.data,
                micro_batches,
                micro_batch: candidate.micro_batch,
                ..job.plan.batch
            };
            let prediction = Prediction {
                inputs: model.inputs(candidate.micro_batch),
                parameters: &model.local.parameters,
                storage,
                data_parallel: DataParallelMode::of_stage(candidate.zero.into()),
                batch,
                pruning: job.plan.pruning.as_ref(),
                kept: model.block_weights.kept().cloned(),
                is_pruned: false,
                model_parallel: model.model_parallel.clone(),
            };
            let activations =
                |samples| model.activations(job.plan, stage_blocks, samples, candidate.recompute);
            prediction.stages_with(stage_blocks, schedule, activations)?
        }
        state @ EngineState::Bytes { .. } => {
            let state = state.with_moments(job.plan.storage.moments);
            let each =
                model.block_weights.of_stages(stage_blocks, candidate.compressed, job.engine.even_stages);
            let stash = stashes(job, candidate, model, stage_blocks)?;
            let of_rank = |rank: usize| {
                let chunks = schedule.placement.chunks(rank);
                let bytes = chunks.iter().filter_map(|chunk| {
                    let WeightCounts { all, stored } = each[chunk.virtual_stage];
                    state.bytes(all, stored, candidate.zero, candidate.data)
                });
                let optimizer = bytes.sum::<f64>() as u64;
                let peak = in_flight(&schedule.ranks[rank], |chunk| stash[chunks[chunk].virtual_stage]);
                MemoryPlan { optimizer, activations: peak.activations, ..MemoryPlan::default() }
            };
            (0..schedule.stages()).map(of_rank).collect()
        }
    };
    let scratch = WorkspaceEstimate::new(job, candidate, model);
    for (rank, memory) in ranks.iter_mut().enumerate() {
        let chunks =
            schedule.placement.chunks(rank).iter().map(|chunk| stage_blocks[chunk.virtual_stage].clone());
        let expanded = memory.workspace.unwrap_or(0);
        memory.workspace =
            Some(if job.engine.is_ours() { scratch.most(chunks) + expanded } else { job.engine.workspace });
    }
    Ok(ranks.into_iter().max_by_key(MemoryPlan::total).unwrap_or_default())
}

/// What kernels and passes of ours take for a while, as it was measured: what flows between layers, and on a
/// GPU a buffer for the gradient of the model's largest table, twice in f32 and once in bf16, beside what its
/// libraries want.
struct WorkspaceEstimate {
    /// Of each block, bytes that flow.
    blocks: Vec<u64>,
    tables: u64,
}

impl WorkspaceEstimate {
    /// What a GPU's libraries want.
    const LIBRARIES: u64 = 36 << 20;

    fn new(job: &Simulation, candidate: &Candidate, model: &RankModel) -> WorkspaceEstimate {
        let each = candidate.micro_batch as u64 * job.plan.storage.precision.size();
        let blocks = model.transient.iter().map(|elements| elements * each).collect();
        let table = model.local.parameters.iter().filter(|one| one.embedding).map(|one| one.elements()).max();
        let tables = match job.cluster.node.cores {
            true => 0,
            false => 10 * table.unwrap_or(0) + WorkspaceEstimate::LIBRARIES,
        };
        WorkspaceEstimate { blocks, tables }
    }

    /// Of a rank with some blocks.
    fn most(&self, chunks: impl Iterator<Item = Range<usize>>) -> u64 {
        let ranges: Vec<Range<usize>> = chunks.collect();
        let flows = ranges.iter().flat_map(|blocks| &self.blocks[blocks.clone()]).max();
        // The table is where the model begins and, tied, where it ends.
        let has_table = ranges.iter().any(|blocks| blocks.start == 0 || blocks.end == self.blocks.len());
        flows.copied().unwrap_or(0)
            + if has_table { self.tables } else { WorkspaceEstimate::LIBRARIES.min(self.tables) }
    }
}

/// What an engine of others keeps of a micro-batch in each virtual stage.
fn stashes(
    job: &Simulation,
    candidate: &Candidate,
    local: &RankModel,
    stage_blocks: &StageBlocks,
) -> Result<Rc<Vec<StageActivations>>, Error> {
    let (model, samples) = (&job.plan.model, candidate.micro_batch);
    if job.engine.stash == EngineStash::Exact {
        return Ok(local.activations(job.plan, stage_blocks, samples, candidate.recompute)?);
    }
    let borders = model.borders()?;
    let each_block = (0..model.blocks.len()).map(|i| i..i + 1).collect();
    let ours = local.activations(job.plan, &each_block, samples, RecomputeMode::None)?;
    let block = |i: usize| {
        let mut heads = None;
        model.blocks[i].for_each(&mut |layer| {
            if let LayerKernel::Attention { heads: all, .. } = layer.properties().kernel {
                heads = Some(all);
            }
        });
        match (heads, borders[i]) {
            (Some(heads), Shape::Sequence { seq, width }) => {
                let rows = (samples * seq) as f64 * width as f64;
                let tensor = candidate.tensor as f64;
                let scores = match (job.engine.attention, candidate.recompute) {
                    (AttentionKernel::Unfused { .. }, RecomputeMode::None | RecomputeMode::Block) => {
                        5.0 * (heads * seq) as f64 / width as f64
                    }
                    _ => 0.0,
                };
                let full = match candidate.sequence {
                    true => rows * (34.0 + scores) / tensor,
                    false => rows * (10.0 + (24.0 + scores) / tensor),
                };
                let input = 2.0 * rows / if candidate.sequence { tensor } else { 1.0 };
                [input, full]
            }
            _ => [2.0 * ours[i].kept as f64; 2],
        }
    };
    let of_stage = |virtual_stage: &Range<usize>| {
        let blocks: Vec<[f64; 2]> = virtual_stage.clone().map(block).collect();
        let most = blocks.iter().map(|[_, full]| *full).fold(0.0, f64::max);
        let (kept, backward) = match candidate.recompute {
            RecomputeMode::Block => {
                let inputs: f64 = blocks.iter().map(|[input, _]| input).sum();
                (inputs, inputs + most)
            }
            _ => {
                let all: f64 = blocks.iter().map(|[_, full]| full).sum();
                (all, all)
            }
        };
        let (kept, backward) = (kept as u64, backward as u64);
        StageActivations { kept, backward, backward_input: backward, deferred: kept }
    };
    Ok(Rc::new(stage_blocks.iter().map(of_stage).collect()))
}

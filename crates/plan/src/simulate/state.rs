//! Bytes of a rank under an engine: ours as the plan predicts them, others by what their papers say.

use std::ops::Range;

use super::holdings::Weights;
use super::rank_model::RankModel;
use super::{Candidate, Job};
use crate::batch::Batch;
use crate::engine::{AttentionKernel, Stash, State};
use crate::error::Error;
use crate::layout::LocalModel;
use crate::memory::{Memory, Prediction, in_flight};
use crate::schedule::Schedule;
use crate::sharing::Sharing;
use crate::spec::activations::PartActivations;
use crate::spec::{Kernel, Recompute, Shape};
use crate::stages::Parts;
use crate::storage::Storage;

/// Bytes of the rank that has most.
pub fn memory(
    job: &Job,
    candidate: &Candidate,
    model: &RankModel,
    parts: &Parts,
    schedule: &Schedule,
    micro_batches: usize,
) -> Result<Memory, Error> {
    let mut ranks = match job.engine.state {
        State::Exact => {
            let storage = Storage {
                recompute: candidate.recompute,
                accumulates: micro_batches > 1,
                compressed: candidate.compressed,
                compressed_weights: candidate.compressed_weights,
                ..job.plan.storage
            };
            let batch = Batch {
                replicas: candidate.data,
                micro_batches,
                micro_batch: candidate.micro_batch,
                ..job.plan.batch
            };
            let sharing = match candidate.zero {
                0 => Sharing::Replicated,
                stage => Sharing::Sharded { gradients: stage > 1 },
            };
            let prediction = Prediction::new(
                model.listed(candidate.micro_batch),
                &model.local.parameters,
                storage,
                sharing,
                batch,
                job.plan.pruning.as_ref(),
                model.holdings.kept().cloned(),
            );
            let activations = |samples| model.activations(job.plan, parts, samples, candidate.recompute);
            prediction.among(model.peers.clone()).stages_with(parts, schedule, activations)?
        }
        state @ State::Bytes { .. } => {
            let each = model.holdings.parts(parts, candidate.compressed, job.engine.even_stages);
            let stash = stashes(job, candidate, &model.local, parts)?;
            let of_rank = |rank: usize| {
                let chunks = schedule.placement.chunks(rank);
                let bytes = chunks.iter().filter_map(|chunk| {
                    let Weights { all, stored } = each[chunk.part];
                    state.bytes(all, stored, candidate.zero, candidate.data)
                });
                let optimizer = bytes.sum::<f64>() as u64;
                let held = in_flight(&schedule.ranks[rank], |chunk| stash[chunks[chunk].part]);
                Memory { optimizer, activations: held.activations, ..Memory::NONE }
            };
            (0..schedule.stages()).map(of_rank).collect()
        }
    };
    let scratch = Scratch::new(job, candidate, model);
    for (rank, memory) in ranks.iter_mut().enumerate() {
        let chunks = schedule.placement.chunks(rank).iter().map(|chunk| parts[chunk.part].clone());
        let expanded = memory.workspace.unwrap_or(0);
        memory.workspace =
            Some(if job.engine.is_ours() { scratch.most(chunks) + expanded } else { job.engine.workspace });
    }
    Ok(ranks.into_iter().max_by_key(Memory::total).unwrap_or(Memory::NONE))
}

/// What kernels and passes of ours take for a while, as it was measured: what flows between layers, and on a card room for the
/// gradient of the model's largest table, twice in f32 and once in bf16, beside what its libraries want.
struct Scratch {
    /// Of each block, bytes that flow.
    blocks: Vec<u64>,
    tables: u64,
}

impl Scratch {
    /// What a card's libraries want.
    const LIBRARIES: u64 = 36 << 20;

    fn new(job: &Job, candidate: &Candidate, model: &RankModel) -> Scratch {
        let each = candidate.micro_batch as u64 * job.plan.storage.precision.size();
        let blocks = model.transient.iter().map(|elements| elements * each).collect();
        let table = model.local.parameters.iter().filter(|one| one.embedding).map(|one| one.elements()).max();
        let tables = match job.cluster.node.cores {
            true => 0,
            false => 10 * table.unwrap_or(0) + Scratch::LIBRARIES,
        };
        Scratch { blocks, tables }
    }

    /// Of a rank with some blocks.
    fn most(&self, chunks: impl Iterator<Item = Range<usize>>) -> u64 {
        let own: Vec<Range<usize>> = chunks.collect();
        let flows = own.iter().flat_map(|blocks| &self.blocks[blocks.clone()]).max();
        // The table is where the model begins and, tied, where it ends.
        let has_table = own.iter().any(|blocks| blocks.start == 0 || blocks.end == self.blocks.len());
        flows.copied().unwrap_or(0)
            + if has_table { self.tables } else { Scratch::LIBRARIES.min(self.tables) }
    }
}

/// What an engine of others keeps of a micro-batch in each part.
fn stashes(
    job: &Job,
    candidate: &Candidate,
    local: &LocalModel,
    parts: &Parts,
) -> Result<Vec<PartActivations>, Error> {
    let (model, samples) = (&job.plan.model, candidate.micro_batch);
    if job.engine.stash == Stash::Exact {
        let precision = job.plan.storage.precision;
        return Ok(local.model.part_activations(
            parts.iter().cloned(),
            samples,
            precision,
            candidate.recompute,
        )?);
    }
    let borders = model.borders()?;
    let ours = local.model.part_activations(
        (0..model.blocks.len()).map(|i| i..i + 1),
        samples,
        job.plan.storage.precision,
        Recompute::None,
    )?;
    let block = |i: usize| {
        let mut heads = None;
        model.blocks[i].for_each(&mut |layer| {
            if let Kernel::Attention { heads: all, .. } = layer.properties().kernel {
                heads = Some(all);
            }
        });
        match (heads, borders[i]) {
            (Some(heads), Shape::Sequence { seq, width }) => {
                let rows = (samples * seq) as f64 * width as f64;
                let tensor = candidate.tensor as f64;
                let scores = match (job.engine.attention, candidate.recompute) {
                    (AttentionKernel::Unfused { .. }, Recompute::None | Recompute::Block) => {
                        5.0 * (heads * seq) as f64 / width as f64
                    }
                    _ => 0.0,
                };
                let whole = match candidate.sequence {
                    true => rows * (34.0 + scores) / tensor,
                    false => rows * (10.0 + (24.0 + scores) / tensor),
                };
                let input = 2.0 * rows / if candidate.sequence { tensor } else { 1.0 };
                [input, whole]
            }
            _ => [2.0 * ours[i].kept as f64; 2],
        }
    };
    let of_part = |part: &Range<usize>| {
        let blocks: Vec<[f64; 2]> = part.clone().map(block).collect();
        let most = blocks.iter().map(|[_, whole]| *whole).fold(0.0, f64::max);
        let (kept, backward) = match candidate.recompute {
            Recompute::Block => {
                let inputs: f64 = blocks.iter().map(|[input, _]| input).sum();
                (inputs, inputs + most)
            }
            _ => {
                let all: f64 = blocks.iter().map(|[_, whole]| whole).sum();
                (all, all)
            }
        };
        let (kept, backward) = (kept as u64, backward as u64);
        PartActivations { kept, backward, backward_input: backward, put_off: kept }
    };
    Ok(parts.iter().map(of_part).collect())
}

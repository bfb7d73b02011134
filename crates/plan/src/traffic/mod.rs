//! Bytes that the actions of a rank's list move, known before any of them is run, and the buckets in which
//! its gradients travel.
//!
//! A collective is counted as the least that any algorithm must send, as the transports count it: what is
//! predicted here is what they measure, to the byte (`crates/train/tests/train/traffic.rs`). What layers
//! exchange within a pass, with ranks that have shards of the same layers, and where batch norms are
//! synchronised over ranks, is no action's: [`layers`] counts it.

mod buckets;
mod gathers;
pub mod layers;
mod step;

use std::collections::BTreeMap;

use gathers::PassGathers;

pub use buckets::{Bucket, Buckets, Gradient};
pub use layers::{LayerTraffic, MessageTotals};
pub use step::StepTraffic;

use crate::error::Error;
use crate::layout::LocalModel;
use crate::mesh::Axis;
use crate::optimizer::OptimizerRule;
use crate::packets::{BUCKET, packets};
use crate::params::RankParams;
use crate::plan::Plan;
use crate::schedule::{Action, Chunk, Payload, Placement, Updates};
use crate::spec::ShapeError;
use crate::split::GroupRank;
use crate::stages::BlockTensors;

/// What a rank moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankTraffic {
    /// The buckets in which its gradients are reduced.
    pub buckets: Buckets,
    /// What each of them sends,
    bucket_bytes: Vec<u64>,
    /// and how often in a step: once, or where gradients are scattered as they come after every micro-batch.
    times: Vec<u64>,
    /// Of each chunk, a micro-batch as it enters and as it leaves.
    borders: Vec<[u64; 2]>,
    agree: u64,
    settle: u64,
    update: u64,
    gather: u64,
    /// What passes gather of weights.
    passes: PassGathers,
    average: u64,
    /// Whether updates are deferred, and what they move with them.
    deferred: bool,
}

impl RankTraffic {
    /// Bytes that a rank sends in an action; those of a receive are what arrives. The reductions of a chunk's
    /// gradients are counted in its all-reduce, whether they started there or within the backward.
    pub fn bytes(&self, action: &Action) -> u64 {
        let reduced = |chunk: Option<usize>| {
            self.of(chunk).fold(0, |sum: u64, (bytes, times)| sum.saturating_add(bytes.saturating_mul(times)))
        };
        match *action {
            Action::Send(message) => {
                self.borders[message.chunk][usize::from(message.payload == Payload::Activation)]
            }
            Action::Receive(message) => {
                self.borders[message.chunk][usize::from(message.payload == Payload::Gradient)]
            }
            Action::AllReduce { chunk } => reduced(Some(chunk)),
            Action::WaitReduce => reduced(None),
            Action::Agree => self.agree,
            Action::Settle => self.settle,
            Action::SendControl(message) | Action::RecvControl(message) => 8 * message.topic.numbers() as u64,
            Action::Step if self.deferred => 0,
            Action::Step | Action::Commit => self.update,
            Action::Gather => self.gather,
            Action::Average => self.average,
            _ => self.passes.of(action).bytes,
        }
    }

    /// How many reductions the gradients of a chunk, or of tied parameters, take in a step; those that send
    /// nothing not counted.
    fn reductions_of(&self, chunk: Option<usize>) -> u64 {
        self.of(chunk).filter(|(bytes, _)| *bytes > 0).map(|(_, times)| times).sum()
    }

    /// Of the buckets of a chunk, or of tied parameters, what each sends at a time and how often.
    fn of(&self, chunk: Option<usize>) -> impl Iterator<Item = (u64, u64)> {
        let all =
            self.buckets.list().iter().zip(self.bucket_bytes.iter().copied().zip(self.times.iter().copied()));
        all.filter(move |(bucket, _)| bucket.chunk == chunk).map(|(_, sent)| sent)
    }

    /// What the reduction of a bucket sends at a time.
    pub fn of_bucket(&self, number: usize) -> u64 {
        self.bucket_bytes[number]
    }
}

impl Plan {
    /// Numbers of each parameter's gradient that travel from a rank, as far as can be known before pruning:
    /// kept ones alone, where state is compressed from the beginning.
    pub fn gradient_lengths(&self, rank: usize) -> Vec<u64> {
        let local = self.layout.of(self.mesh.coordinates(rank));
        let pruning = self.pruning.as_ref().filter(|_| self.storage.compressed);
        let pruning = pruning.filter(|pruning| pruning.method.at_start());
        let kept = pruning.map(|pruning| local.kept(pruning.kept_by_parameter(&self.model.parameters())));
        let kept = |i: usize| kept.as_ref().and_then(|kept| kept[i]);
        local.parameters.iter().enumerate().map(|(i, one)| kept(i).unwrap_or(one.elements())).collect()
    }

    /// What a rank moves when so many numbers of each parameter's gradient travel.
    pub fn traffic(&self, rank: usize, lengths: &[u64]) -> Result<RankTraffic, Error> {
        let (coords, schedule) = (self.mesh.coordinates(rank), self.schedule(1)?);
        let rank = TrafficRank {
            plan: self,
            rank,
            stage: coords.pipeline,
            local: self.layout.of(coords),
            placement: schedule.placement.clone(),
            params: self.params(rank)?,
            tensors: self.layout.of(coords).model.block_tensors(),
            lengths,
            size: self.storage.precision.size(),
        };
        let shared = rank.gradients();
        let (mut buckets, mut bucket_bytes, mut times) = (Buckets::default(), Vec::new(), Vec::new());
        for SharedGradients { chunk, group, gradients, .. } in &shared {
            let known = buckets.list().len();
            buckets.pack(*chunk, gradients, BUCKET);
            bucket_bytes.extend(buckets.list()[known..].iter().map(|bucket| rank.reduce(*group, bucket)));
            times.resize(bucket_bytes.len(), if chunk.is_some() { self.reductions_per_step() } else { 1 });
        }
        Ok(RankTraffic {
            borders: rank.borders()?,
            agree: rank.agree(),
            settle: all_reduce(rank.world(), 3, 8),
            update: rank.update(&shared),
            gather: if self.data_parallel.is_sharded() { rank.gather(&shared) } else { 0 },
            passes: rank.gathers(&schedule.ranks[coords.pipeline]),
            average: rank.average(),
            deferred: self.pipeline.updates() == Updates::DoubleBuffered && rank.stage > 0,
            buckets,
            bucket_bytes,
            times,
        })
    }

    /// How often in a step the gradients of a chunk are reduced over ranks. Those of tied parameters are
    /// once, when the last use has made its gradient.
    fn reductions_per_step(&self) -> u64 {
        if self.data_parallel.scatters_gradients() { self.batch.micro_batches as u64 } else { 1 }
    }
}

/// A rank of a plan, and what it holds of the model.
struct TrafficRank<'a> {
    plan: &'a Plan,
    /// Its number in the world.
    rank: usize,
    stage: usize,
    local: &'a LocalModel,
    placement: Placement,
    params: RankParams,
    tensors: BlockTensors,
    /// Numbers of each parameter's gradient.
    lengths: &'a [u64],
    /// Bytes of one number.
    size: u64,
}

/// Gradients that the same ranks share.
struct SharedGradients {
    /// The chunk that makes them; none for tied parameters.
    chunk: Option<usize>,
    /// Which group of the rank's, and which of its ranks this one is.
    number: usize,
    group: GroupRank,
    gradients: Vec<Gradient>,
}

impl TrafficRank<'_> {
    fn chunks(&self) -> &[Chunk] {
        self.placement.chunks(self.stage)
    }

    /// Its rank among those that have the same weights and other samples.
    fn replicas(&self) -> GroupRank {
        self.along(&[Axis::Data])
    }

    /// Its rank in its model-parallel group.
    fn model_parallel_group(&self) -> GroupRank {
        self.along(&[Axis::Spatial, Axis::Tensor])
    }

    fn along(&self, axes: &[Axis]) -> GroupRank {
        self.plan.mesh.rank_along(self.rank, axes)
    }

    fn world(&self) -> GroupRank {
        GroupRank { ranks: self.plan.mesh.size(), rank: self.rank }
    }

    fn member(&self, group: usize) -> GroupRank {
        self.params.members[group].expect("it holds what the group shares")
    }

    /// Its gradients by those who share them: of each chunk in the order of the backward, then those of tied
    /// parameters.
    fn gradients(&self) -> Vec<SharedGradients> {
        let mut shared = Vec::new();
        let of_group = |chunk, number: usize, gradients| SharedGradients {
            chunk,
            number,
            group: self.member(number),
            gradients,
        };
        let mut tied: BTreeMap<usize, BTreeMap<usize, Gradient>> = BTreeMap::new();
        for (index, chunk) in self.chunks().iter().enumerate() {
            let mut untied: BTreeMap<usize, Vec<Gradient>> = BTreeMap::new();
            for block in self.plan.stage_blocks[chunk.virtual_stage].clone().rev() {
                for parameter in self.tensors.parameters(block..block + 1).into_iter().rev() {
                    let (param, bytes) =
                        (&self.params.params[parameter], self.lengths[parameter].saturating_mul(self.size));
                    let gradient = Gradient { parameter, block, bytes };
                    match param.is_tied {
                        true => {
                            let together = tied.entry(param.group).or_default();
                            let known = together.entry(parameter).or_insert(gradient);
                            known.block = known.block.min(block);
                        }
                        false => untied.entry(param.group).or_default().push(gradient),
                    }
                }
            }
            shared.extend(untied.into_iter().map(|(group, list)| of_group(Some(index), group, list)));
        }
        let tied = tied.into_iter().map(|(group, list)| (group, list.into_values().collect()));
        shared.extend(tied.map(|(group, list)| of_group(None, group, list)));
        shared
    }

    /// The all-reduce of a bucket, or its reduce-scatter where ranks shard state.
    fn reduce(&self, group: GroupRank, bucket: &Bucket) -> u64 {
        match self.plan.data_parallel.is_sharded() {
            true => scatter(group, bucket.parameters.iter().map(|one| self.lengths[*one]), self.size),
            false => all_reduce(group, bucket.bytes / self.size, self.size),
        }
    }

    /// Of each chunk, a micro-batch as it enters and as it leaves.
    fn borders(&self) -> Result<Vec<[u64; 2]>, ShapeError> {
        let borders = self.local.model.borders()?;
        let samples = self.local.model.samples_at_borders(self.plan.batch.micro_batch as u64);
        let bytes = |block: usize| borders[block].elements().saturating_mul(samples[block] * self.size);
        let stages = self.chunks().iter().map(|chunk| &self.plan.stage_blocks[chunk.virtual_stage]);
        Ok(stages.map(|blocks| [bytes(blocks.start), bytes(blocks.end)]).collect())
    }

    /// A norm, the totals and whether to stop over all ranks; without a flush the norm over its
    /// model-parallel group, and the totals over the replicas that have them.
    fn agree(&self) -> u64 {
        let norm = all_reduce(self.model_parallel_group(), 1, 8);
        match self.plan.pipeline.updates() == Updates::Flush {
            true => all_reduce(self.world(), 5, 8),
            false if self.stage + 1 < self.plan.pipeline.stages => norm,
            false => norm + all_reduce(self.replicas(), 3, 8),
        }
    }

    /// What ranks measure together when weights change: running statistics, norms of parameters, the noise scale.
    fn update(&self, shared: &[SharedGradients]) -> u64 {
        let Plan { batch, optimization, data_parallel, .. } = self.plan;
        let copies = self.placement.copies() > 1 || batch.norm_group.is_some() && batch.replicas > 1;
        let folded = if copies || !batch.synchronises_norms() { self.statistics() } else { 0 };
        let adapts =
            matches!(optimization.optimizer.rule, OptimizerRule::Lars { .. } | OptimizerRule::Lamb { .. });
        let mut norms: BTreeMap<usize, u64> = BTreeMap::new();
        for one in shared.iter().filter(|_| adapts && data_parallel.is_sharded()) {
            *norms.entry(one.number).or_default() += 2 * one.gradients.len() as u64;
        }
        let norms: u64 = norms.into_iter().map(|(group, sum)| all_reduce(self.member(group), sum, 8)).sum();
        let large =
            if data_parallel.is_sharded() { 0 } else { all_reduce(self.model_parallel_group(), 1, 8) };
        let noise = if optimization.noise_scale { all_reduce(self.world(), 2, 8) + large } else { 0 };
        folded + norms + noise
    }

    /// What is gathered after a step: weights of which every rank has all.
    fn gather(&self, shared: &[SharedGradients]) -> u64 {
        let lengths = |one: &SharedGradients| {
            let full = one.gradients.iter().map(|gradient| gradient.parameter);
            let full = full.filter(|id| !self.params.params[*id].shards_weight);
            let lengths = full.map(|id| self.lengths[id]);
            scatter(one.group, lengths, self.size)
        };
        shared.iter().map(lengths).sum()
    }

    /// Each exact weight and its moments, as f32; statistics; and two counts with whether to stop.
    fn average(&self) -> u64 {
        let vectors = self.plan.storage.averaged_vectors();
        let lengths = self.lengths.iter().flat_map(|n| (0..vectors).map(move |_| n.saturating_mul(4)));
        let bytes: Vec<u64> = lengths.collect();
        let group = self.replicas();
        let packet = |packet: &Vec<usize>| {
            all_reduce(group, packet.iter().fold(0, |sum: u64, i| sum.saturating_add(bytes[*i])) / 4, 4)
        };
        let state: u64 = packets(&bytes).iter().map(packet).sum();
        state + self.statistics() + all_reduce(self.world(), 3, 8)
    }

    fn statistics(&self) -> u64 {
        let buffers = self.local.model.buffers();
        let mut numbers: BTreeMap<usize, u64> = BTreeMap::new();
        for buffer in self
            .chunks()
            .iter()
            .flat_map(|chunk| self.tensors.buffers(self.plan.stage_blocks[chunk.virtual_stage].clone()))
        {
            *numbers.entry(self.params.statistics[buffer]).or_default() += buffers[buffer].elements();
        }
        // One message a group, whatever chunks its statistics are of.
        numbers.into_iter().map(|(group, numbers)| all_reduce(self.member(group), numbers, 4)).sum()
    }
}

/// What a rank sends to all-reduce so many numbers, of so many bytes each, over a group.
fn all_reduce(group: GroupRank, numbers: u64, size: u64) -> u64 {
    let ranks = group.ranks as u64;
    let local = numbers / ranks + u64::from((group.rank as u64) < numbers % ranks);
    (numbers - local).saturating_add(local.saturating_mul(ranks - 1)).saturating_mul(size)
}

/// What it sends to reduce-scatter, or to all-gather, vectors of which each rank has a shard.
fn scatter(group: GroupRank, lengths: impl Iterator<Item = u64>, size: u64) -> u64 {
    let shard = lengths.fold(0, |sum: u64, n| sum.saturating_add(n.div_ceil(group.ranks as u64)));
    shard.saturating_mul(group.ranks as u64 - 1).saturating_mul(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ChunkWork, StageMessage};

    fn traffic(rest: &str, rank: usize) -> (Plan, RankTraffic) {
        let text = format!("[model]\nlayers = 2\nwidth = 256\nheads = 2\ncontext = 8\n{rest}");
        let plan = Plan::of_text(&text);
        let traffic = plan.traffic(rank, &plan.gradient_lengths(rank)).unwrap();
        (plan, traffic)
    }

    /// Blocks: embedding, two layers, head. A layer's linear weights have at least 256 KiB each, and some 1 MiB.
    #[test]
    fn buckets_follow_the_backward() {
        let (plan, traffic) = traffic("[parallel]\ndata = 2", 0);
        let parameters = plan.model.parameters();
        let list = traffic.buckets.list();
        let names = |bucket: &Bucket| -> Vec<&str> {
            bucket.parameters.iter().map(|id| parameters[*id].name.as_str()).collect()
        };
        assert_eq!(names(&list[0]), ["h.1.mlp.c_proj.weight"]);
        let blocks: Vec<usize> =
            list.iter().filter(|one| one.parameters.len() == 1).map(|one| one.block).collect();
        assert!(blocks.is_sorted_by(|a, b| a >= b), "{blocks:?}");
        // The tied table is used at both ends, so its gradient is complete when the pass is.
        let last = list.last().unwrap();
        assert_eq!((names(last), last.chunk, last.block), (vec!["wte.weight"], None, 0));
        let mut all: Vec<usize> = list.iter().flat_map(|bucket| bucket.parameters.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..parameters.len()).collect::<Vec<_>>());
        assert!(list.iter().all(|bucket| bucket.parameters.len() == 1 || bucket.bytes <= BUCKET));
    }

    /// Four blocks, and two micro-batches: the last block's weights are still there when its backward comes,
    /// the first one's when the second micro-batch does.
    #[test]
    fn weights_of_a_block_are_gathered_when_it_is_entered() {
        let (plan, three) = traffic(
            "[parallel]\ndata = 2\nzero = 3\n[train]\nbatch = 4\nmicro_batches = 2\nrecompute = \"block\"",
            0,
        );
        let work = |micro_batch| ChunkWork { micro_batch, chunk: 0, version: 0 };
        let table = 4 * 256 * plan.model.classes as u64 / 2;
        let all = 4 * plan.parameters / 2 + table;
        let positions = 4 * 256 * 8 / 2;
        let (first, last) = (table + positions, table + 4 * 2 * 256 / 2);
        assert_eq!(three.bytes(&Action::Forward(work(0))), all);
        assert_eq!(three.bytes(&Action::Backward(work(0))), all - last);
        assert_eq!(three.bytes(&Action::Forward(work(1))), all - first);
        assert_eq!(three.bytes(&Action::Backward(work(1))), all - last);
        assert_eq!(three.bytes(&Action::Gather), 0);
        let sent = plan.step_traffic(0).unwrap();
        assert_eq!(sent.weights.bytes, 4 * all - first - 2 * last);
        // Ranks of two stages have the table in full, and gather it after the step.
        let (plan, staged) =
            traffic("[parallel]\ndata = 2\nzero = 3\npipeline = 2\n[train]\nbatch = 8\nmicro_batches = 4", 0);
        assert_eq!(staged.bytes(&Action::Gather), 3 * 4 * 256 * plan.model.classes.div_ceil(4) as u64);
    }

    /// By hand: of two ranks each sends all of what is reduced once, a single one sends nothing.
    #[test]
    fn bytes_of_actions() {
        let (plan, two) = traffic("[parallel]\ndata = 2", 1);
        let reduced = two.bytes(&Action::AllReduce { chunk: 0 }) + two.bytes(&Action::WaitReduce);
        assert_eq!(reduced, 4 * plan.parameters);
        assert_eq!(two.bytes(&Action::Agree), 40);
        assert_eq!(two.bytes(&Action::Gather), 0);
        let (_, single) = traffic("", 0);
        assert_eq!(single.bytes(&Action::AllReduce { chunk: 0 }) + single.bytes(&Action::Agree), 0);
        let (plan, staged) = traffic("[parallel]\npipeline = 2\n[train]\nbatch = 6\nmicro_batches = 3", 0);
        let send = StageMessage { payload: Payload::Activation, micro_batch: 1, chunk: 0, peer: 1 };
        assert_eq!(staged.bytes(&Action::Send(send)), 2 * 8 * 256 * 4);
        // The stages share the tied table alone.
        assert_eq!(staged.bytes(&Action::AllReduce { chunk: 0 }), 0);
        assert_eq!(staged.bytes(&Action::WaitReduce), 4 * 256 * plan.model.classes as u64);
    }
}

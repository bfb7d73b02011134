//! What the actions of every stage take: passes of its virtual stage, messages, all-reduces as far as they
//! are not hidden, the step.

use std::ops::Range;

use super::block_weights::{BlockWeights, WeightCounts};
use super::breakdown::Breakdown;
use super::collective::RankGroup;
use super::passes::{PassSeconds, Passes};
use super::reductions::GradientReductions;
use super::{Candidate, Simulation};
use crate::cluster::DeviceKernels;
use crate::engine::EngineState;
use crate::error::Error;
use crate::schedule::{Action, Chunk, Costs, Pass, Payload, Schedule, StageMessage, last_passes};
use crate::spec::Precision;
use crate::stages::StageBlocks;

/// What the actions of every stage take.
pub(super) struct StageTimes {
    /// Of each virtual stage: the passes of a micro-batch,
    passes: Vec<Passes>,
    /// what its gradients take to be stored,
    sinks: Vec<f64>,
    /// how long its all-reduces over replicas go on behind its last backward,
    all_reduces: Vec<PassSeconds>,
    /// those of gradients that several stages make,
    tied: Vec<PassSeconds>,
    /// the fraction of its computing that an all-reduce in flight takes,
    occupies: f64,
    /// what its step takes,
    steps: Vec<f64>,
    /// and to gather what other replicas have stepped.
    gathers: Vec<f64>,
    /// What all ranks take to agree on the step.
    agreement: PassSeconds,
    /// A message to the next virtual stage, behind each.
    messages: Vec<f64>,
    /// The fraction of a message for which its sender and its receiver do nothing else,
    blocking: f64,
    /// and that for which the receiver does not.
    receiving: f64,
}

impl StageTimes {
    /// Of a candidate's virtual stages.
    pub fn new(
        job: &Simulation,
        candidate: &Candidate,
        stage_blocks: &StageBlocks,
        micro_batches: usize,
    ) -> Result<StageTimes, Error> {
        let model = job.local(candidate)?;
        let blocks = job.passes(candidate)?;
        let block_weights = &model.block_weights;
        let model_parallel = candidate.tensor * candidate.spatial();
        let group = |ranks, stride| RankGroup::new(job.cluster, ranks, stride).among(candidate.ranks());
        let replicas = group(candidate.data, model_parallel);
        let stages = group(candidate.pipeline, model_parallel * candidate.data);
        let reductions = GradientReductions::new(job, candidate, &model);
        let each =
            StageTimer { job, candidate, replicas, block_weights, reductions: &reductions, micro_batches };
        let mut passes: Vec<Passes> =
            stage_blocks.iter().map(|virtual_stage| each.passes(virtual_stage.clone(), &blocks)).collect();
        let weights = block_weights.of_stages(stage_blocks, candidate.compressed, job.engine.even_stages);
        if job.engine.even_stages {
            let fraction = 1.0 / stage_blocks.len() as f64;
            passes = vec![passes.into_iter().sum::<Passes>() * fraction; stage_blocks.len()];
        }
        let borders = model.local.model.borders()?;
        let bytes = |virtual_stage: &Range<usize>| {
            let elements = candidate.micro_batch as u64 * borders[virtual_stage.end].elements();
            (elements * job.plan.storage.precision.size()) as f64
        };
        let all_reduces =
            stage_blocks.iter().zip(&weights).zip(&passes).map(|((virtual_stage, weights), passes)| {
                if job.engine.gathers_weights() {
                    return PassSeconds::default();
                }
                reductions.behind(virtual_stage.clone(), *weights, passes, &blocks)
            });
        let mut all_reduces: Vec<PassSeconds> = all_reduces.collect();
        if candidate.zero >= 2 {
            // Those of every micro-batch are scattered, within its backward.
            for (passes, all_reduce) in passes.iter_mut().zip(&mut all_reduces) {
                passes.backward_weight = passes.backward_weight + std::mem::take(all_reduce);
            }
        }
        Ok(StageTimes {
            sinks: weights.iter().map(|weights| each.sink(*weights)).collect(),
            all_reduces,
            tied: reductions.tied(stage_blocks),
            occupies: reductions.occupies(),
            agreement: reductions.agreement(),
            steps: weights.iter().map(|weights| each.step(*weights)).collect(),
            gathers: weights.iter().map(|weights| each.gather(*weights)).collect(),
            messages: stage_blocks.iter().map(|virtual_stage| stages.message(bytes(virtual_stage))).collect(),
            blocking: job.engine.blocking,
            receiving: job.engine.blocking.max(stages.copied()),
            passes,
        })
    }

    /// What a virtual stage takes to store the gradients of a micro-batch, and to step.
    pub(crate) fn of_stage(&self, virtual_stage: usize) -> [f64; 2] {
        [self.sinks[virtual_stage], self.steps[virtual_stage]]
    }

    fn pass(&self, pass: Pass, virtual_stage: usize) -> PassSeconds {
        let passes = &self.passes[virtual_stage];
        match pass {
            Pass::Forward => passes.forward,
            Pass::Backward => passes.backward(),
            Pass::BackwardInput => passes.again + passes.backward_input,
            Pass::BackwardWeight => passes.backward_weight,
        }
    }

    /// What the chunks of a rank take to all-reduce what they make together with those of other stages.
    fn tied_of(&self, chunks: &[Chunk]) -> PassSeconds {
        chunks
            .iter()
            .map(|chunk| self.tied[chunk.virtual_stage])
            .fold(PassSeconds::default(), |sum, one| sum + one)
    }

    /// Seconds for which cores have nothing to do behind the collectives of all lists, on the mean over ranks.
    pub(crate) fn stalls(&self, schedule: &Schedule, times: f64) -> f64 {
        let costs = StepCosts { times: self, schedule, messages: true };
        let of_rank = |(rank, list): (usize, &Vec<Action>)| -> f64 {
            let times = |action: &Action| if action.compute().is_some() { times } else { 1.0 };
            list.iter().map(|action| times(action) * costs.stall(rank, action)).sum()
        };
        schedule.ranks.iter().enumerate().map(of_rank).sum::<f64>() / schedule.stages() as f64
    }

    /// What all ranks spend by kind, on the mean; passes are so many times as many as those listed.
    pub fn spent(&self, schedule: &Schedule, times: f64) -> Breakdown {
        let mut sum = Breakdown::default();
        let last_passes = last_passes(schedule);
        for (rank, list) in schedule.ranks.iter().enumerate() {
            let chunks = schedule.placement.chunks(rank);
            for (position, action) in list.iter().enumerate() {
                if let Some((pass, work)) = action.compute() {
                    let virtual_stage = chunks[work.chunk].virtual_stage;
                    let PassSeconds { compute, communication, .. } = self.pass(pass, virtual_stage);
                    sum.compute += times * compute;
                    sum.collective += times * communication;
                    if matches!(pass, Pass::Backward | Pass::BackwardWeight) {
                        sum.compress += times * self.sinks[virtual_stage];
                    }
                    continue;
                }
                match *action {
                    Action::AllReduce { chunk } => {
                        // Passes that follow hide it, as far as they can compute beside it.
                        let fraction =
                            if last_passes[rank].is_before(position) { self.occupies } else { 1.0 };
                        sum.collective += fraction * self.all_reduces[chunks[chunk].virtual_stage].total();
                    }
                    Action::WaitReduce => sum.collective += self.tied_of(chunks).total(),
                    Action::Agree => sum.collective += self.agreement.total(),
                    Action::Step => {
                        sum.optimizer +=
                            chunks.iter().map(|chunk| self.steps[chunk.virtual_stage]).sum::<f64>();
                        sum.collective +=
                            chunks.iter().map(|chunk| self.gathers[chunk.virtual_stage]).sum::<f64>();
                    }
                    _ => {}
                }
            }
        }
        let ranks = schedule.stages() as f64;
        Breakdown {
            compute: sum.compute / ranks,
            collective: sum.collective / ranks,
            compress: sum.compress / ranks,
            optimizer: sum.optimizer / ranks,
            ..sum
        }
    }
}

/// What is asked of each virtual stage.
struct StageTimer<'a> {
    job: &'a Simulation<'a>,
    candidate: &'a Candidate,
    replicas: RankGroup<'a>,
    block_weights: &'a BlockWeights,
    reductions: &'a GradientReductions<'a>,
    micro_batches: usize,
}

impl StageTimer<'_> {
    fn weights(&self, virtual_stage: Range<usize>) -> WeightCounts {
        self.block_weights.weights(virtual_stage, self.candidate.compressed)
    }

    /// The passes of some blocks; where weights are gathered or expanded block by block, with what of that is
    /// not hidden.
    fn passes(&self, virtual_stage: Range<usize>, blocks: &[Passes]) -> Passes {
        let of_block = |block: usize| {
            let mut passes = blocks[block];
            if self.candidate.zero == 3 {
                let weights = self.weights(block..block + 1);
                let (gathered, scatter) = match self.job.engine.gathers_weights() {
                    true => (2.0 * weights.all, self.replicas.gather(self.reductions.bytes(weights))),
                    // Kept values alone travel; gradients are counted with those of all blocks.
                    false => (self.reductions.bytes(weights), 0.0),
                };
                let gather = self.replicas.gather(gathered);
                let hides = self.job.engine.hides[usize::from(self.replicas.leaves_node())];
                let exposed = |messages: f64, seconds: f64| self.replicas.exposed(messages, hides * seconds);
                passes.forward.communication += exposed(gather, passes.forward.total());
                passes.backward_weight.communication += exposed(gather + scatter, passes.backward().total());
            }
            if self.candidate.expands_weights() {
                let WeightCounts { all, stored } = self.block_weights.expanded(block);
                let kernels = self.job.kernels(self.candidate);
                let seconds = kernels.pass((all + stored) * self.job.plan.storage.precision.size() as f64);
                // A GPU expands the next block while one runs; on cores the same threads do both.
                let exposed = |behind: f64| match self.job.cluster.node.cores {
                    true => seconds,
                    false => (seconds - behind).max(0.0),
                };
                passes.forward.compute += exposed(passes.forward.total());
                passes.backward_input.compute += exposed(passes.backward().total());
            }
            passes
        };
        virtual_stage.map(of_block).sum()
    }

    /// The gradients of a micro-batch into their accumulators.
    fn sink(&self, weights: WeightCounts) -> f64 {
        let [each, stored] = self.job.engine.sink;
        if self.micro_batches == 1 && !self.candidate.compressed {
            return 0.0;
        }
        self.pass(each * weights.all + stored * weights.stored)
    }

    fn step(&self, weights: WeightCounts) -> f64 {
        let WeightCounts { all, stored } = weights;
        let shards = if self.candidate.zero > 0 { self.candidate.data as f64 } else { 1.0 };
        // Read and written, beside the gradient and the weight.
        let bytes = match self.job.engine.state {
            EngineState::Exact => stored * (2.0 * self.job.plan.storage.optimizer_bytes as f64 + 6.0),
            EngineState::Bytes { .. } => {
                30.0 * stored + if self.candidate.compressed { 4.0 * all } else { 0.0 }
            }
        };
        self.pass(bytes / shards)
    }

    fn gather(&self, weights: WeightCounts) -> f64 {
        let bytes = match self.job.engine.state {
            EngineState::Exact => self.reductions.bytes(weights),
            // Gradients may be wider than the weights that are gathered.
            EngineState::Bytes { .. } => 2.0 * weights.all,
        };
        if matches!(self.candidate.zero, 1 | 2) { self.replicas.gather(bytes) } else { 0.0 }
    }

    /// State is f32, whatever the run's precision.
    fn pass(&self, bytes: f64) -> f64 {
        let kernels = self.job.kernels(self.candidate);
        DeviceKernels { precision: Precision::F32, captured: false, ..kernels }.pass(bytes)
    }
}

/// The times of a list's actions.
pub(super) struct StepCosts<'a> {
    /// Of the virtual stages.
    pub times: &'a StageTimes,
    pub schedule: &'a Schedule,
    /// Whether messages between stages take time.
    pub messages: bool,
}

impl StepCosts<'_> {
    /// Seconds for which cores have nothing to do behind the meetings of an action.
    pub(crate) fn stall(&self, rank: usize, action: &Action) -> f64 {
        let chunks = self.schedule.placement.chunks(rank);
        if let Some((pass, work)) = action.compute() {
            return self.times.pass(pass, chunks[work.chunk].virtual_stage).stall;
        }
        match *action {
            Action::AllReduce { chunk } => self.times.all_reduces[chunks[chunk].virtual_stage].stall,
            Action::WaitReduce => self.times.tied_of(chunks).stall,
            Action::Agree => self.times.agreement.stall,
            _ => 0.0,
        }
    }

    /// A message as the rank that sends or receives it sees it.
    fn message(&self, rank: usize, action: &Action) -> f64 {
        let border = match *action {
            Action::Send(StageMessage { chunk, payload, .. }) => {
                let virtual_stage = self.schedule.placement.chunks(rank)[chunk].virtual_stage;
                if payload == Payload::Activation { virtual_stage } else { virtual_stage - 1 }
            }
            Action::Receive(StageMessage { chunk, payload, .. }) => {
                let virtual_stage = self.schedule.placement.chunks(rank)[chunk].virtual_stage;
                if payload == Payload::Activation { virtual_stage - 1 } else { virtual_stage }
            }
            _ => return 0.0,
        };
        if self.messages { self.times.messages[border] } else { 0.0 }
    }
}

impl Costs for StepCosts<'_> {
    fn busy(&self, rank: usize, action: &Action) -> f64 {
        let chunks = self.schedule.placement.chunks(rank);
        if let Some((pass, work)) = action.compute() {
            let virtual_stage = chunks[work.chunk].virtual_stage;
            let sink = matches!(pass, Pass::Backward | Pass::BackwardWeight);
            let sink = if sink { self.times.sinks[virtual_stage] } else { 0.0 };
            return self.times.pass(pass, virtual_stage).total() + sink;
        }
        match *action {
            Action::Send(_) => self.times.blocking * self.message(rank, action),
            Action::Receive(_) => self.times.receiving * self.message(rank, action),
            Action::AllReduce { chunk } => self.times.all_reduces[chunks[chunk].virtual_stage].total(),
            Action::WaitReduce => self.times.tied_of(chunks).total(),
            Action::Agree => self.times.agreement.total(),
            // What others have stepped is gathered behind the step, where state is sharded.
            Action::Step => {
                let of_chunk = |virtual_stage: usize| {
                    self.times.steps[virtual_stage] + self.times.gathers[virtual_stage]
                };
                chunks.iter().map(|chunk| of_chunk(chunk.virtual_stage)).sum()
            }
            _ => 0.0,
        }
    }

    fn occupies(&self) -> f64 {
        self.times.occupies
    }

    fn journey(&self, from: usize, send: &Action) -> f64 {
        (1.0 - self.times.receiving) * self.message(from, send)
    }
}

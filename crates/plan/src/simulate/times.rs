//! What the actions of every stage take: passes of its part of the model, messages, sums as far as they are not hidden, the step.

use std::ops::Range;

use super::breakdown::Breakdown;
use super::collective::Group;
use super::holdings::{Holdings, Weights};
use super::passes::{Passes, Seconds};
use super::sums::Sums;
use super::{Candidate, Job};
use crate::cluster::Kernels;
use crate::engine::State;
use crate::error::Error;
use crate::schedule::{Action, Chunk, Costs, Message, Pass, Payload, Schedule, last_passes};
use crate::spec::Precision;
use crate::stages::Parts;

/// What the actions of every stage take.
pub(super) struct Times {
    /// Of each part of the model: the passes of a micro-batch,
    passes: Vec<Passes>,
    /// what its gradients take to be stored,
    sinks: Vec<f64>,
    /// how long its sums over replicas go on behind its last backward,
    sums: Vec<Seconds>,
    /// those of gradients that several stages make,
    tied: Vec<Seconds>,
    /// the share of its computing that a sum under way takes,
    occupies: f64,
    /// what its step takes,
    steps: Vec<f64>,
    /// and to gather what other replicas have stepped.
    gathers: Vec<f64>,
    /// What all ranks take to agree on the step.
    agreement: Seconds,
    /// A message to the next part, behind each.
    messages: Vec<f64>,
    /// The share of a message for which its sender and its receiver do nothing else,
    blocking: f64,
    /// and that for which the receiver does not.
    receiving: f64,
}

impl Times {
    /// Of a candidate's parts.
    pub fn new(
        job: &Job,
        candidate: &Candidate,
        parts: &Parts,
        micro_batches: usize,
    ) -> Result<Times, Error> {
        let model = job.local(candidate)?;
        let blocks = job.passes(candidate)?;
        let holdings = &model.holdings;
        let near = candidate.tensor * candidate.spatial();
        let group = |ranks, stride| Group::new(job.cluster, ranks, stride).among(candidate.ranks());
        let replicas = group(candidate.data, near);
        let stages = group(candidate.pipeline, near * candidate.data);
        let sharing = Sums::new(job, candidate, &model);
        let each = Each { job, candidate, replicas, holdings, sharing: &sharing, micro_batches };
        let mut passes: Vec<Passes> = parts.iter().map(|part| each.passes(part.clone(), &blocks)).collect();
        let weights = holdings.parts(parts, candidate.compressed, job.engine.even_stages);
        if job.engine.even_stages {
            let share = 1.0 / parts.len() as f64;
            passes = vec![passes.into_iter().sum::<Passes>() * share; parts.len()];
        }
        let borders = model.local.model.borders()?;
        let bytes = |part: &Range<usize>| {
            let elements = candidate.micro_batch as u64 * borders[part.end].elements();
            (elements * job.plan.storage.precision.size()) as f64
        };
        let sums = parts.iter().zip(&weights).zip(&passes).map(|((part, weights), passes)| {
            if job.engine.gathers_weights {
                return Seconds::default();
            }
            sharing.behind(part.clone(), *weights, passes, &blocks)
        });
        let mut sums: Vec<Seconds> = sums.collect();
        if candidate.zero == 2 {
            // Those of every micro-batch are scattered, within its backward.
            for (passes, sum) in passes.iter_mut().zip(&mut sums) {
                passes.backward_weight = passes.backward_weight + std::mem::take(sum);
            }
        }
        Ok(Times {
            sinks: weights.iter().map(|weights| each.sink(*weights)).collect(),
            sums,
            tied: sharing.tied(parts),
            occupies: sharing.occupies(),
            agreement: sharing.agreement(),
            steps: weights.iter().map(|weights| each.step(*weights)).collect(),
            gathers: weights.iter().map(|weights| each.gather(*weights)).collect(),
            messages: parts.iter().map(|part| stages.message(bytes(part))).collect(),
            blocking: job.engine.blocking,
            receiving: job.engine.blocking.max(stages.copied()),
            passes,
        })
    }

    /// What a part takes to store the gradients of a micro-batch, and to step.
    pub fn of_part(&self, part: usize) -> [f64; 2] {
        [self.sinks[part], self.steps[part]]
    }

    fn pass(&self, pass: Pass, part: usize) -> Seconds {
        let passes = &self.passes[part];
        match pass {
            Pass::Forward => passes.forward,
            Pass::Backward => passes.backward(),
            Pass::BackwardInput => passes.again + passes.backward_input,
            Pass::BackwardWeight => passes.backward_weight,
        }
    }

    /// What the chunks of a rank take to sum what they make together with those of other stages.
    fn tied_of(&self, chunks: &[Chunk]) -> Seconds {
        chunks.iter().map(|chunk| self.tied[chunk.part]).fold(Seconds::default(), |sum, one| sum + one)
    }

    /// Seconds for which cores have nothing to do behind the meetings of all lists, on the mean over ranks.
    pub fn stalls(&self, schedule: &Schedule, times: f64) -> f64 {
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
                    let part = chunks[work.chunk].part;
                    let Seconds { compute, exchange, .. } = self.pass(pass, part);
                    sum.compute += times * compute;
                    sum.collective += times * exchange;
                    if matches!(pass, Pass::Backward | Pass::BackwardWeight) {
                        sum.compress += times * self.sinks[part];
                    }
                    continue;
                }
                match *action {
                    Action::AllReduce { chunk } => {
                        // Passes that follow hide it, as far as they can compute beside it.
                        let share = if last_passes[rank].is_before(position) { self.occupies } else { 1.0 };
                        sum.collective += share * self.sums[chunks[chunk].part].total();
                    }
                    Action::WaitReduce => sum.collective += self.tied_of(chunks).total(),
                    Action::Agree => sum.collective += self.agreement.total(),
                    Action::Step => {
                        sum.optimizer += chunks.iter().map(|chunk| self.steps[chunk.part]).sum::<f64>();
                        sum.collective += chunks.iter().map(|chunk| self.gathers[chunk.part]).sum::<f64>();
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

/// What is asked of each part.
struct Each<'a> {
    job: &'a Job<'a>,
    candidate: &'a Candidate,
    replicas: Group<'a>,
    holdings: &'a Holdings,
    sharing: &'a Sums<'a>,
    micro_batches: usize,
}

impl Each<'_> {
    fn weights(&self, part: Range<usize>) -> Weights {
        self.holdings.weights(part, self.candidate.compressed)
    }

    /// The passes of some blocks; where weights are gathered or expanded block by block, with what of that is not hidden.
    fn passes(&self, part: Range<usize>, blocks: &[Passes]) -> Passes {
        let of_block = |block: usize| {
            let mut passes = blocks[block];
            if self.job.engine.gathers_weights {
                let weights = self.weights(block..block + 1);
                let gather = self.replicas.gather(2.0 * weights.all);
                let scatter = self.replicas.gather(self.sharing.bytes(weights));
                let late = |messages: f64, seconds: f64| {
                    self.replicas.late(messages, self.job.engine.hides * seconds)
                };
                passes.forward.exchange += late(gather, passes.forward.total());
                passes.backward_weight.exchange += late(gather + scatter, passes.backward().total());
            }
            if self.candidate.compressed_weights {
                let Weights { all, stored } = self.holdings.expanded(block);
                let kernels = self.job.kernels(self.candidate);
                let seconds = kernels.pass((all + stored) * self.job.plan.storage.precision.size() as f64);
                // A GPU expands the next block while one runs; on cores the same threads do both.
                let seen = |behind: f64| match self.job.cluster.node.cores {
                    true => seconds,
                    false => (seconds - behind).max(0.0),
                };
                passes.forward.compute += seen(passes.forward.total());
                passes.backward_input.compute += seen(passes.backward().total());
            }
            passes
        };
        part.map(of_block).sum()
    }

    /// The gradients of a micro-batch into their sums.
    fn sink(&self, weights: Weights) -> f64 {
        let [each, stored] = self.job.engine.sink;
        if self.micro_batches == 1 && !self.candidate.compressed {
            return 0.0;
        }
        self.pass(each * weights.all + stored * weights.stored)
    }

    fn step(&self, weights: Weights) -> f64 {
        let Weights { all, stored } = weights;
        let share = if self.candidate.zero > 0 { self.candidate.data as f64 } else { 1.0 };
        // Read and written, beside the gradient and the weight.
        let bytes = match self.job.engine.state {
            State::Exact => stored * (2.0 * self.job.plan.storage.optimizer_bytes as f64 + 6.0),
            State::Bytes { .. } => 30.0 * stored + if self.candidate.compressed { 4.0 * all } else { 0.0 },
        };
        self.pass(bytes / share)
    }

    fn gather(&self, weights: Weights) -> f64 {
        if matches!(self.candidate.zero, 1 | 2) {
            self.replicas.gather(self.sharing.bytes(weights))
        } else {
            0.0
        }
    }

    /// State is f32, whatever the run's precision.
    fn pass(&self, bytes: f64) -> f64 {
        Kernels { precision: Precision::F32, ..self.job.kernels(self.candidate) }.pass(bytes)
    }
}

/// The times of a list's actions.
pub(super) struct StepCosts<'a> {
    /// Of the parts.
    pub times: &'a Times,
    /// The lists.
    pub schedule: &'a Schedule,
    /// Whether messages between stages take time.
    pub messages: bool,
}

impl StepCosts<'_> {
    /// Seconds for which cores have nothing to do behind the meetings of an action.
    pub fn stall(&self, rank: usize, action: &Action) -> f64 {
        let chunks = self.schedule.placement.chunks(rank);
        if let Some((pass, work)) = action.compute() {
            return self.times.pass(pass, chunks[work.chunk].part).stall;
        }
        match *action {
            Action::AllReduce { chunk } => self.times.sums[chunks[chunk].part].stall,
            Action::WaitReduce => self.times.tied_of(chunks).stall,
            Action::Agree => self.times.agreement.stall,
            _ => 0.0,
        }
    }

    /// A message as the rank that sends or receives it sees it.
    fn message(&self, rank: usize, action: &Action) -> f64 {
        let border = match *action {
            Action::Send(Message { chunk, payload, .. }) => {
                let part = self.schedule.placement.chunks(rank)[chunk].part;
                if payload == Payload::Activation { part } else { part - 1 }
            }
            Action::Receive(Message { chunk, payload, .. }) => {
                let part = self.schedule.placement.chunks(rank)[chunk].part;
                if payload == Payload::Activation { part - 1 } else { part }
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
            let part = chunks[work.chunk].part;
            let sink = matches!(pass, Pass::Backward | Pass::BackwardWeight);
            let sink = if sink { self.times.sinks[part] } else { 0.0 };
            return self.times.pass(pass, part).total() + sink;
        }
        match *action {
            Action::Send(_) => self.times.blocking * self.message(rank, action),
            Action::Receive(_) => self.times.receiving * self.message(rank, action),
            Action::AllReduce { chunk } => self.times.sums[chunks[chunk].part].total(),
            Action::WaitReduce => self.times.tied_of(chunks).total(),
            Action::Agree => self.times.agreement.total(),
            // What others have stepped is gathered behind the step, where state is shared out.
            Action::Step => {
                let of_chunk = |part: usize| self.times.steps[part] + self.times.gathers[part];
                chunks.iter().map(|chunk| of_chunk(chunk.part)).sum()
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

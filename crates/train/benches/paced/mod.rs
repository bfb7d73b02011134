//! A worker that takes the planned time: the executor, the schedule and the messages are those of a run, and
//! nothing is computed. So many ranks behave on few cores as they would with one each.
//!
//! A pass is a list of steps: time to take, messages of layers, gradients to hand to the sink of training.
//! [`of_plan`] makes the lists of a planned rank; a bench of schedules alone has lists of its own.

#![allow(dead_code, reason = "each bench uses some of it")]

pub mod of_plan;

use std::time::{Duration, Instant};

use espalier_comm::{Communicator, Reduce};
use espalier_nn::layers::{GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::schedule::{Action, ChunkWork, Payload, StageMessage};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Result;
use espalier_train::parallel::data::{DataParallel, DataParallelSink};
use espalier_train::state::ParamStore;
use espalier_train::step::ActionWorker;

/// What time is taken with.
pub enum Effort {
    /// Products of this square, one for each second asked for.
    Product(Tensor),
    /// Sleep, so long for each second asked for. What one lasted too long the next is shorter.
    Sleep { second: Duration, over: Duration },
}

impl Effort {
    /// Sleep for so long instead of a second.
    pub fn sleep(second: Duration) -> Effort {
        Effort::Sleep { second, over: Duration::ZERO }
    }

    /// Takes so many seconds.
    pub fn take(&mut self, seconds: f64) -> Result<()> {
        match self {
            Effort::Product(square) => {
                let square = &*square;
                for _ in 0..seconds.round() as usize {
                    matmul(square, square, None, Category::Workspace)?;
                }
            }
            Effort::Sleep { second, over } => {
                let wanted = second.mul_f64(seconds);
                let start = Instant::now();
                match wanted.checked_sub(*over) {
                    Some(left) => std::thread::sleep(left),
                    None => {
                        *over -= wanted;
                        return Ok(());
                    }
                }
                *over = (start.elapsed() + *over).saturating_sub(wanted);
            }
        }
        Ok(())
    }
}

/// A step of a pass.
#[derive(Debug, Clone)]
pub enum PassStep {
    /// Seconds to take.
    Take(f64),
    /// Of so many numbers.
    AllReduce(Communicator, usize, DType),
    /// Of shards of so many numbers.
    AllGather(Communicator, usize),
    /// Of which each gets so many numbers.
    ReduceScatter(Communicator, usize),
    /// Numbers to neighbours and from them, which travel while seconds are taken.
    Halo(Communicator, Vec<Neighbour>, f64),
    /// Gradients of so many numbers each that are made.
    Gradients(Vec<(ParameterId, usize)>),
}

/// A rank with a tile beside.
#[derive(Debug, Clone, Copy)]
pub struct Neighbour {
    pub rank: usize,
    /// Numbers that go there,
    pub gives: usize,
    /// and that come.
    pub takes: usize,
}

/// The passes of a chunk.
#[derive(Debug, Clone, Default)]
pub struct Passes {
    pub forward: Vec<PassStep>,
    pub backward_input: Vec<PassStep>,
    pub backward_weight: Vec<PassStep>,
    /// Numbers of a micro-batch as it enters and as it leaves.
    pub borders: [usize; 2],
    /// How many backwards make the gradients of a step.
    pub backwards: usize,
}

pub struct Paced<'a> {
    pub effort: Effort,
    pub device: Device,
    pub chunks: Vec<Passes>,
    /// Seconds of the step itself,
    pub step: f64,
    /// all ranks, which agree on it,
    pub world: Option<Communicator>,
    /// and how training shares gradients, of parameters without weights.
    pub shared: Option<(DataParallel<'a>, ParamStore)>,
    /// Backwards of each chunk that are still to come.
    pub missing: Vec<usize>,
}

impl<'a> Paced<'a> {
    /// With passes for each chunk, and no messages but those between stages.
    pub fn new(effort: Effort, device: Device, chunks: Vec<Passes>) -> Paced<'a> {
        let missing = chunks.iter().map(|chunk| chunk.backwards).collect();
        Paced { effort, device, chunks, step: 0.0, world: None, shared: None, missing }
    }

    fn numbers(&self, numbers: usize, dtype: DType) -> Result<Tensor> {
        Ok(Tensor::zeros(&self.device, &[numbers], dtype, Category::Transient)?)
    }

    fn perform(&mut self, steps: &[PassStep]) -> Result<()> {
        steps.iter().try_for_each(|step| self.perform_one(step))
    }

    fn perform_one(&mut self, step: &PassStep) -> Result<()> {
        match step {
            PassStep::Take(seconds) => self.effort.take(*seconds)?,
            PassStep::AllReduce(group, numbers, dtype) => {
                drop(group.all_reduce(self.numbers(*numbers, *dtype)?, Reduce::Sum)?);
            }
            PassStep::AllGather(group, shard) => {
                let [local, full] = [*shard, shard * group.size()].map(|n| self.numbers(n, DType::F32));
                drop(group.all_gather(local?, full?)?);
            }
            PassStep::ReduceScatter(group, shard) => {
                let [full, local] = [shard * group.size(), *shard].map(|n| self.numbers(n, DType::F32));
                drop(group.reduce_scatter(full?, local?, Reduce::Sum)?);
            }
            PassStep::Halo(group, neighbours, beside) => {
                let (mut receives, mut sends) = (Vec::new(), Vec::new());
                for peer in neighbours.iter().filter(|peer| peer.takes > 0) {
                    let buffer = self.numbers(peer.takes, DType::F32)?;
                    receives.push(group.start_receive(buffer, peer.rank, 0)?);
                }
                for peer in neighbours.iter().filter(|peer| peer.gives > 0) {
                    let pixels = self.numbers(peer.gives, DType::F32)?;
                    sends.push(group.start_send(pixels, peer.rank, 0)?);
                }
                self.effort.take(*beside)?;
                for request in receives.into_iter().chain(sends) {
                    request.wait()?;
                }
            }
            PassStep::Gradients(all) => {
                let Some((shared, params)) = &mut self.shared else { return Ok(()) };
                let mut sink = DataParallelSink::new(shared, params);
                for (id, numbers) in all {
                    let made = Tensor::zeros(&self.device, &[*numbers], DType::F32, Category::Workspace)?;
                    sink.accept(&[*id], WeightGradients::new([], move |_| Ok(vec![made])))?;
                }
            }
        }
        Ok(())
    }

    /// The gradients of weights of a micro-batch; the last ones are complete.
    fn weights(&mut self, chunk: usize) -> Result<()> {
        self.missing[chunk] -= 1;
        let is_last = self.missing[chunk] == 0;
        if let Some((shared, _)) = &mut self.shared {
            shared.last_micro_batch(is_last);
        }
        let steps = self.chunks[chunk].backward_weight.clone();
        self.perform(&steps)
    }
}

impl ActionWorker for Paced<'_> {
    fn forward(&mut self, work: ChunkWork, _: Option<Tensor>) -> Result<Option<Tensor>> {
        let steps = self.chunks[work.chunk].forward.clone();
        self.perform(&steps)?;
        self.numbers(self.chunks[work.chunk].borders[1], DType::F32).map(Some)
    }

    fn backward(&mut self, work: ChunkWork, _: Option<Tensor>, with_weights: bool) -> Result<Option<Tensor>> {
        let steps = self.chunks[work.chunk].backward_input.clone();
        self.perform(&steps)?;
        if with_weights {
            self.weights(work.chunk)?;
        }
        self.numbers(self.chunks[work.chunk].borders[0], DType::F32).map(Some)
    }

    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        let side = usize::from(message.payload == Payload::Gradient);
        self.numbers(self.chunks[message.chunk].borders[side], DType::F32)
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::BackwardWeight(work) => self.weights(work.chunk),
            Action::WaitReduce => {
                self.missing = self.chunks.iter().map(|chunk| chunk.backwards).collect();
                match &mut self.shared {
                    Some((shared, params)) => shared.finish(params).map(drop),
                    None => Ok(()),
                }
            }
            Action::Agree => {
                if let Some(world) = &self.world {
                    world.all_reduce(vec![0f64; 6], Reduce::Sum)?;
                }
                Ok(())
            }
            Action::Step => self.effort.take(self.step),
            _ => Ok(()),
        }
    }
}

//! What a rank can be told to do: a closed set, so that one executor and one simulator match on it.
//!
//! Which virtual stage a chunk is, and who else holds it, is the [`Placement`](super::Placement)'s to say.
//!
//! The rules that every list keeps, and every transport must offer: a send does not wait for its receiver; a
//! receive waits for its message; two messages with the same sender, receiver and payload arrive in the order
//! of their sends.

/// One thing that a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Run a chunk forward.
    Forward(ChunkWork),
    /// Run a chunk backward: gradients of its input and of its weights.
    Backward(ChunkWork),
    /// The first half of a backward: the gradient of the input, which the rank before waits for.
    BackwardInput(ChunkWork),
    /// The second half: the gradients of the weights, which only the step waits for.
    BackwardWeight(ChunkWork),
    /// Hand over what the last forward or backward of this micro-batch and chunk made.
    Send(StageMessage),
    /// Wait for what the next forward or backward of this micro-batch and chunk takes.
    Receive(StageMessage),
    /// Start the all-reduces of a chunk's gradients that have not started yet: over its copies in the
    /// schedule, and over data-parallel ranks. A large gradient's starts within the backward that completes
    /// it.
    AllReduce {
        /// Which of the rank's chunks.
        chunk: usize,
    },
    /// Wait for the all-reduces of all gradients of the update.
    WaitReduce,
    /// Add up losses and norms over the ranks that can wait for each other: over all, where a flush ends a
    /// batch, and with them whether one was asked to stop.
    Agree,
    /// Tell another rank what came of an update: where there is no flush, stages do not wait for each other.
    SendControl(ControlMessage),
    /// Wait for what another rank sends.
    RecvControl(ControlMessage),
    /// Update the weights of all chunks: the newest version becomes the next one.
    Step,
    /// Take the update of the last step, or skip it: it was deferred until the first stage has decided.
    Commit,
    /// Gather what the others have stepped, where ranks shard the optimizer's state.
    Gather,
    /// Average weights and state over replicas that have stepped by themselves.
    Average,
    /// At the end of lists without a flush, when nothing is in flight: all ranks take over what the first
    /// stage has counted, and learn whether any of them was asked to stop.
    Settle,
    /// Keep the newest version beyond the next step.
    Stash {
        /// The number of the weights that are kept.
        version: usize,
    },
    /// Forget a kept version.
    Drop {
        /// The number of weights that were kept and that nobody needs any more.
        version: usize,
    },
}

/// What a forward or backward runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkWork {
    /// Counted from 0 through all batches of the schedule.
    pub micro_batch: usize,
    /// Which of the rank's chunks.
    pub chunk: usize,
    /// Steps that had been taken when these weights were made.
    pub version: usize,
}

/// A message as one of its two ranks sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageMessage {
    /// What it carries.
    pub payload: Payload,
    /// Counted from 0 through all batches of the schedule.
    pub micro_batch: usize,
    /// Which of this rank's chunks made it or takes it.
    pub chunk: usize,
    /// The other rank.
    pub peer: usize,
}

/// What a message carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// The output of a forward, for the next virtual stage.
    Activation,
    /// The gradient of an input, for the virtual stage before.
    Gradient,
}

/// A few numbers for another rank, as one of the two sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ControlMessage {
    /// What is sent of an update.
    pub topic: ControlKind,
    /// Of which update, counted from 0 through the list; 0 where nothing is updated.
    pub update: usize,
    /// The other rank.
    pub peer: usize,
}

/// What a notice says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ControlKind {
    /// From a stage to the one before: whether all numbers of an update are finite there and behind.
    Verdict,
    /// From the first stage to another: whether those of all stages are.
    Decision,
    /// From where the model ends to the first stage: the loss of a batch, its right predictions and all of them.
    Totals,
    /// From where the model ends to another stage: the token that follows what was read.
    Token,
}

impl ControlKind {
    pub const ALL: [ControlKind; 4] =
        [ControlKind::Verdict, ControlKind::Decision, ControlKind::Totals, ControlKind::Token];

    /// How many numbers, of 8 bytes each.
    pub const fn numbers(self) -> usize {
        match self {
            ControlKind::Verdict | ControlKind::Decision | ControlKind::Token => 1,
            ControlKind::Totals => 3,
        }
    }
}

/// The four kinds of computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
}

impl Action {
    /// Whether a step implies it, so that lines of text leave it out.
    pub(super) fn is_implied(&self) -> bool {
        let is_control = matches!(self, Action::SendControl(_) | Action::RecvControl(_) | Action::Commit);
        is_control || matches!(self, Action::WaitReduce | Action::Agree | Action::Gather | Action::Settle)
    }

    /// Whether it belongs to the step before it.
    pub fn ends_step(&self) -> bool {
        let is_control = matches!(self, Action::SendControl(_) | Action::RecvControl(_) | Action::Commit);
        is_control || matches!(self, Action::Gather | Action::Drop { .. } | Action::Settle)
    }

    /// The pass and its work, where the action computes.
    pub fn compute(&self) -> Option<(Pass, ChunkWork)> {
        match *self {
            Action::Forward(work) => Some((Pass::Forward, work)),
            Action::Backward(work) => Some((Pass::Backward, work)),
            Action::BackwardInput(work) => Some((Pass::BackwardInput, work)),
            Action::BackwardWeight(work) => Some((Pass::BackwardWeight, work)),
            _ => None,
        }
    }
}

impl Pass {
    /// The action that runs this pass.
    pub fn on(self, work: ChunkWork) -> Action {
        match self {
            Pass::Forward => Action::Forward(work),
            Pass::Backward => Action::Backward(work),
            Pass::BackwardInput => Action::BackwardInput(work),
            Pass::BackwardWeight => Action::BackwardWeight(work),
        }
    }
}

/// A pass of a micro-batch through a chunk, before anyone has decided on messages and versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassTask {
    pub pass: Pass,
    pub micro_batch: usize,
    pub chunk: usize,
}

impl PassTask {
    pub fn new(pass: Pass, micro_batch: usize, chunk: usize) -> PassTask {
        PassTask { pass, micro_batch, chunk }
    }

    /// The same of a later batch, with its weights.
    pub fn at(self, first_micro_batch: usize, version: usize) -> Action {
        let micro_batch = first_micro_batch + self.micro_batch;
        self.pass.on(ChunkWork { micro_batch, chunk: self.chunk, version })
    }
}

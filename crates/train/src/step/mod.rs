//! A step as a list of actions: one loop runs them, whatever the schedule, the transport and the device.
//!
//! The [`Executor`] knows order and messages, an [`ActionWorker`] what an action does: to a network in
//! training (`network`), in passes that change no weights (`no_update_pass`), or only taking the planned
//! time. On a GPU, a small network's passes may run as one call (`graphed_step`).

mod averaging;
mod executor;
mod graphed_step;
mod in_flight;
mod messages;
mod network;
mod no_update_pass;
mod totals;
mod trace;

pub(crate) use averaging::AveragingWorker;
pub use executor::Executor;
pub(crate) use graphed_step::GraphedStep;
pub(crate) use network::{NetworkWorker, PipelineState, StepContext, StepOutcome};
pub use no_update_pass::{NoUpdatePass, PassMicroBatch};
pub use totals::{LossConfig, Totals};
pub use trace::{BucketSpan, Trace, TraceKind, TraceSpan};

use espalier_plan::schedule::{Action, ChunkWork, ControlMessage, StageMessage};
use espalier_tensor::Tensor;

use crate::Result;

/// What the actions of a list do. A worker knows those that its lists have.
pub trait ActionWorker {
    /// Runs a chunk forward: on samples where it is the first, on what the chunk before gave otherwise. What
    /// it returns is for the next chunk; the last chunk keeps its output.
    fn forward(&mut self, work: ChunkWork, _input: Option<Tensor>) -> Result<Option<Tensor>> {
        unreachable!("{work:?} forward in a list without passes")
    }

    /// Runs a chunk backward, from the loss where it is the last. What it returns is for the chunk before. The
    /// gradients of weights are deferred unless `with_weights`.
    fn backward(
        &mut self,
        work: ChunkWork,
        _dy: Option<Tensor>,
        _with_weights: bool,
    ) -> Result<Option<Tensor>> {
        unreachable!("{work:?} backward in a list without backwards")
    }

    /// A receive buffer for a message.
    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        unreachable!("{message:?} in a list without messages")
    }

    /// The numbers of a control message that this rank sends.
    fn scalars_to_send(&mut self, message: ControlMessage) -> Vec<f64> {
        vec![0.0; message.topic.numbers()]
    }

    /// Takes in the numbers of a control message.
    fn receive_scalars(&mut self, _message: ControlMessage, _scalars: &[f64]) {}

    /// Bytes that an action moves, for whoever notes them.
    fn bytes(&self, _action: &Action) -> u64 {
        0
    }

    /// What an action is shown as in a trace; none where it takes no time.
    fn kind(&self, action: &Action) -> Option<TraceKind> {
        TraceKind::of(action)
    }

    /// All-reduces of buckets that ran beside the actions and have ended since it was last asked.
    fn bucket_spans(&mut self) -> Vec<BucketSpan> {
        Vec::new()
    }

    /// Whatever is no pass with an input or an output, and no message.
    fn act(&mut self, action: Action) -> Result<()> {
        unreachable!("{action:?} in a list that changes no weights")
    }
}

//! A step as a list of actions: one loop runs them, whatever the schedule, the transport and the device.
//!
//! The [`Executor`] knows order and messages, a [`Worker`] what an action does: to a network in training (`network`), in passes that
//! change no weights (`sweep`), or only taking the planned time. On a card, a small network's passes may run as one call (`whole_passes`).

mod averaging;
mod executor;
mod in_flight;
mod messages;
mod network;
mod sweep;
mod totals;
mod trace;
mod whole_passes;

pub(crate) use averaging::Averaging;
pub use executor::Executor;
pub(crate) use network::{NetworkWorker, PipelineState, StepContext, StepOutcome};
pub use sweep::Sweep;
pub use totals::{Loss, Totals};
pub use trace::{Flown, Kind, Span, Trace};
pub(crate) use whole_passes::WholePasses;

use espalier_plan::schedule::{Action, Message, Notice, Payload, Work};
use espalier_tensor::Tensor;

use crate::Result;
use crate::stage::Side;

/// What the actions of a list do. A worker knows those that its lists have.
pub trait Worker {
    /// Runs a chunk forward: on samples where it is the first part, on what the part before gave otherwise. What it returns
    /// is for the next part; the last part keeps its own.
    fn forward(&mut self, work: Work, _input: Option<Tensor>) -> Result<Option<Tensor>> {
        unreachable!("{work:?} forward in a list without passes")
    }

    /// Runs a chunk backward, from the loss where it is the last part. What it returns is for the part before. The
    /// gradients of weights are put off unless `whole`.
    fn backward(&mut self, work: Work, _gradient: Option<Tensor>, _whole: bool) -> Result<Option<Tensor>> {
        unreachable!("{work:?} backward in a list without backwards")
    }

    /// Room for a message that will be received.
    fn room(&mut self, message: &Message) -> Result<Tensor> {
        unreachable!("{message:?} in a list without messages")
    }

    /// What it has to tell another rank.
    fn tell(&mut self, notice: Notice) -> Vec<f64> {
        vec![0.0; notice.topic.numbers()]
    }

    /// Takes in what another rank has told.
    fn hear(&mut self, _notice: Notice, _told: &[f64]) {}

    /// Bytes that an action moves, for whoever notes them.
    fn bytes(&self, _action: &Action) -> u64 {
        0
    }

    /// What an action is shown as in a trace; none where it takes no time.
    fn kind(&self, action: &Action) -> Option<Kind> {
        Kind::of(action)
    }

    /// Sums that were under way beside the actions and have ended since it was last asked.
    fn flown(&mut self) -> Vec<Flown> {
        Vec::new()
    }

    /// Whatever is no pass with an input or an output, and no message.
    fn act(&mut self, action: Action) -> Result<()> {
        unreachable!("{action:?} in a list that changes no weights")
    }
}

/// The side of a chunk on which a message enters it.
fn side_of(message: &Message) -> Side {
    match message.payload {
        Payload::Activation => Side::Input,
        Payload::Gradient => Side::Output,
    }
}

//! A step as a list of actions: one loop runs them, whatever the schedule, the transport and the device.
//!
//! The [`Executor`] knows order and messages, a [`Worker`] what an action does: the network's own (`network`), or one that
//! only takes the planned time.

mod executor;
mod messages;
mod network;
mod trace;

pub use executor::Executor;
pub(crate) use network::{Flights, NetworkWorker, Scene, Taken};
pub use trace::{Kind, Span, Trace, chrome, may_replace};

use espalier_plan::schedule::{Message, Work};
use espalier_tensor::Tensor;

use crate::Result;

/// The tag under which the totals of an asynchronous step travel: above those of parts.
pub(crate) const TOTALS: u32 = 1 << 20;

/// What the actions of a list do.
pub trait Worker {
    /// Runs a chunk forward: on samples where it is the first part, on what the part before gave otherwise. What it returns
    /// is for the next part; the last part keeps its own.
    fn forward(&mut self, work: Work, input: Option<Tensor>) -> Result<Option<Tensor>>;

    /// Runs a chunk backward, from the loss where it is the last part. What it returns is for the part before. The
    /// gradients of weights are put off unless `whole`.
    fn backward(&mut self, work: Work, gradient: Option<Tensor>, whole: bool) -> Result<Option<Tensor>>;

    /// Makes the gradients of weights that were put off.
    fn backward_weight(&mut self, work: Work) -> Result<()>;

    /// Room for a message that will be received.
    fn room(&mut self, message: &Message) -> Result<Tensor>;

    /// Sums a chunk's gradients over its copies.
    fn all_reduce(&mut self, chunk: usize) -> Result<()>;

    /// Waits for what the ranks must add up before any of them updates its weights.
    fn settle(&mut self) -> Result<()>;

    /// Updates the weights of all chunks, once that is settled.
    fn step(&mut self) -> Result<()>;

    /// Keeps the newest weights beyond the next step.
    fn stash(&mut self, version: usize) -> Result<()>;

    /// Forgets kept weights.
    fn forget(&mut self, version: usize);
}

//! Text out of a model: one token after the other, each from all that came before it.
//!
//! - `generator`: the model on its ranks, as a list of actions that reads some positions and sends every rank
//!   the token that follows; the keys and values of what was read stay in a cache
//!   ([`espalier_nn::layers::KvCache`]);
//! - `graphed_decode`: the pass of one token on a GPU, as one call;
//! - `sampling`: from logits to a token;
//! - `stream`: from tokens to text, in whole characters, up to a stop sequence.
//!
//! A module of `train` and no crate above it: it runs the executor's lists, the layers and the weights of
//! training on the same ranks, and a run generates samples of its own model while it trains. A crate would have
//! to make all of that public to forbid nothing.

mod generator;
mod graphed_decode;
mod sampling;
mod stream;

pub use generator::{FinishReason, Generation, Generator};
pub use sampling::{Sampler, Sampling};
pub use stream::TextStream;

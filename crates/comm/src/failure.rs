//! How the work of ranks comes to nothing: what a transport's `run` returns.

use std::any::Any;
use std::fmt::{Debug, Display};

use crate::error::Error;

/// The first rank to fail, and what it said.
#[derive(Debug, thiserror::Error)]
pub enum Failure<E: Debug + Display> {
    /// The ranks could not be started, or did not find each other.
    #[error("{0}")]
    Launch(Error),
    /// A rank returned an error.
    #[error("rank {rank} failed: {error}")]
    Failed {
        /// Which.
        rank: usize,
        /// What it returned.
        error: E,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// Which.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// This rank came to its end, but another did not.
    #[error("rank {rank} {how}: {why}")]
    Peer {
        /// Which.
        rank: usize,
        /// `failed` or `panicked`.
        how: &'static str,
        /// What it said.
        why: String,
    },
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(|s| &**s));
    text.unwrap_or("without a message").to_owned()
}

//! How the work of ranks fails: the error that a transport's `run` returns.

use std::any::Any;
use std::fmt::{Debug, Display};
use std::time::Duration;

use crate::call::Call;
use crate::error::{DisplaySeconds, Error, ranks};

/// The first rank to fail, and its message.
#[derive(Debug, thiserror::Error)]
pub enum Failure<E: Debug + Display> {
    /// The ranks could not be started, or did not find each other.
    #[error("{0}")]
    Launch(Error),
    /// A rank returned an error.
    #[error("rank {rank} failed: {error}")]
    Failed {
        /// Its number in the world.
        rank: usize,
        error: E,
    },
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// Its number in the world.
        rank: usize,
        message: String,
    },
    /// This rank's work is done, but another failed.
    #[error("rank {rank} {how}: {why}")]
    Peer {
        /// Its number in the world.
        rank: usize,
        /// `failed` or `panicked`.
        how: &'static str,
        /// The message of its error or panic.
        why: String,
    },
    /// A rank failed, and others did not end.
    // Made a text here: the derived bounds of a type that shows itself would never end.
    #[error(
        "{}; the run ends without {}, not heard of for another {}",
        .first.to_string(), ranks(.left), DisplaySeconds(*.waited)
    )]
    LeftBehind {
        /// The failure of the first.
        first: Box<Failure<E>>,
        /// Those who hang, or compute on.
        left: Vec<usize>,
        /// How long they were waited for after it.
        waited: Duration,
    },
}

/// The first rank of a world that is known to have failed.
#[derive(Debug, Clone)]
pub(crate) struct RankFailure {
    pub(crate) rank: usize,
    /// `failed`, `panicked` or `was lost`.
    pub(crate) how: &'static str,
    pub(crate) why: String,
}

impl RankFailure {
    /// The error of a rank that is in a call.
    pub(crate) fn stops(&self, rank: usize, call: Call) -> Error {
        Error::PeerFailed { rank, call, failed: self.rank, how: self.how, why: self.why.clone() }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(|s| &**s));
    text.unwrap_or("without a message").to_owned()
}

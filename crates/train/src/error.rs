//! What can stop a run, each with the sentence that a person reads.

use std::path::PathBuf;

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can stop a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The run file asks for something impossible.
    #[error(transparent)]
    Plan(#[from] espalier_plan::config::Error),
    /// The data is missing or not what it claims to be.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// The device failed.
    #[error(transparent)]
    Tensor(#[from] espalier_tensor::Error),
    /// A checkpoint cannot be used.
    #[error("checkpoint {}: {why}", path.display())]
    Checkpoint {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file of the run folder cannot be read or written.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// Too many steps in a row had a loss or gradient that is not a number.
    #[error(
        "the run diverged: {bad_steps} steps in a row, up to step {step}, gave a loss or gradient that is NaN or \
         infinite (last loss {loss}); lower learning_rate.peak, lengthen learning_rate.warmup or set train.clip"
    )]
    Diverged {
        /// The last step tried.
        step: u64,
        /// How many in a row.
        bad_steps: u64,
        /// The last loss.
        loss: f64,
    },
}

impl Error {
    /// Wraps a system error with the file it happened on.
    pub(crate) fn file(path: impl Into<PathBuf>, why: impl ToString) -> Error {
        Error::File { path: path.into(), why: why.to_string() }
    }
}

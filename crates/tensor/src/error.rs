//! What can go wrong below the level of models. Wrong shapes inside an operation are our own mistakes and
//! panic with a message; what a user or a machine can cause is an [`Error`].

use crate::memory::Category;

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a user's input or the machine can cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device could not give the memory asked for.
    #[error(
        "out of memory: {asked} bytes for {category} were refused; {used} bytes are in use on the device"
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// What they were for.
        category: Category,
        /// Bytes in use at that moment, all categories.
        used: usize,
    },
    /// The number of threads is zero or the operating system refused them.
    #[error("cannot start {threads} threads: {why}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The system's reason.
        why: String,
    },
}

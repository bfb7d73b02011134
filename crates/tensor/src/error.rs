//! What can go wrong below the level of models. Wrong shapes inside an operation are our own mistakes and
//! panic with a message; what a user or a machine can cause is an [`Error`].

use crate::memory::{ByteSize, Category, Usage};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a user's input or the machine can cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device could not give the memory asked for.
    #[error("out of memory: the device refused {} for {category}, beside {used} in use", ByteSize(*.asked))]
    OutOfMemory {
        asked: usize,
        category: Category,
        /// Bytes in use at that moment.
        used: Box<Usage>,
    },
    /// The number of threads is zero or the operating system refused them.
    #[error("cannot start {threads} threads: {why}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        why: String,
    },
    /// There is no GPU, no driver, or a library of NVIDIA's is missing.
    #[error("CUDA cannot be used: {why}")]
    NoCuda {
        /// What is missing, and what to do about it.
        why: String,
    },
    /// The driver or a library refused a call, or an earlier kernel failed and it shows only now.
    #[error("CUDA: {doing} failed: {why}")]
    Cuda {
        doing: &'static str,
        /// The driver's or the library's reason.
        why: String,
    },
    /// A size that the kernels of a device do not cover.
    #[error("{what}")]
    Unsupported {
        /// Which, and what to do about it.
        what: String,
    },
    /// A kernel's source does not compile for this GPU.
    #[error("the kernels in {file} do not compile with {options}:\n{log}")]
    Compile {
        file: &'static str,
        /// What it was compiled with.
        options: String,
        log: String,
    },
}

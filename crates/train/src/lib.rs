//! The heart: steps, pruning, optimizer state, checkpoints, and the run that joins them.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod checksum;
pub mod context;
mod durable;
mod error;
mod graphed;
pub mod hub;
pub mod infer;
pub mod measure;
pub mod memory_check;
pub mod parallel;
pub mod prune;
mod resolved;
pub mod run;
mod shard_gather;
pub mod shared_scores;
pub mod stage;
pub mod state;
pub mod step;
mod summary;
pub mod trained;
pub mod trainer;

pub use error::{Error, Result, is_failure};
pub use prune::LayerDensity;
pub use summary::{
    CategoryBytes, LayoutSummary, PredictedStep, RunSummary, StatePeak, Throughput, TrainedData, Validation,
};

//! What runs where, and what it should cost: pure arithmetic on a run file. No device, no thread, no file.
//!
//! [`RunFile::parse`](config::RunFile::parse) reads what a person wrote; [`Plan::new`] joins it with what the
//! data says and resolves it: the model as data ([`spec`]), and the bytes it should take ([`memory`]). A
//! [`Mesh`] says which ranks there are, a [`schedule`] in which order the ranks of a pipeline run their
//! micro-batches, [`stages`] which blocks of the model each has, and [`rounds`] how a lottery ticket's
//! trainings divide the steps.

#![forbid(unsafe_code)]

pub mod batch;
mod cache;
pub mod cluster;
pub mod config;
pub mod cost;
pub mod data;
pub mod data_parallel;
pub mod device;
mod edit_distance;
pub mod engine;
mod error;
pub mod field;
pub mod filters;
pub mod intervals;
pub mod layout;
pub mod learning_rate;
pub mod memory;
pub mod mesh;
pub mod optimization;
pub mod optimizer;
pub mod packets;
pub mod params;
pub mod pipeline;
pub mod plan;
pub mod pruning;
pub mod rounds;
pub mod sample;
pub mod schedule;
pub mod scoring;
pub mod search;
pub mod shard;
pub mod simulate;
pub mod spec;
pub mod split;
pub mod stages;
pub mod storage;
pub mod tiles;
pub mod time_to_result;
pub mod traffic;

pub use config::RunFile;
pub use error::Error;
pub use memory::MemoryPlan;
pub use mesh::{Axis, Mesh, PerAxis};
pub use params::{GroupPlan, ParamPlan, RankParams};
pub use plan::{DataFacts, Plan};
pub use scoring::Scoring;
pub use shard::Shard;
pub use split::{GroupRank, split};
pub use traffic::RankTraffic;

//! Many runs as one measurement: how many steps a result takes over batch sizes and sparsities, what curve that follows, and why.

pub mod running;
pub mod workload;

pub use running::{Check, Running};
pub use workload::{Settings, Workload};

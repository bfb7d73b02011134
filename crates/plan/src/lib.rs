//! What runs where, and what it should cost: pure arithmetic on a run file. No device, no thread, no file.

pub mod config;
pub mod spec;

//! The heart: layers, data, optimizer state, checkpoints, and the step that joins them.

pub mod data;

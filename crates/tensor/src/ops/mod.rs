//! The operations, one file each: what it means, its plain reference, its CPU code.

pub mod activation;
pub mod cast;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod layer_norm;
mod pieces;
pub mod reduce;
pub mod rms_norm;
pub mod update;

//! The operations, one file each: what it means, its plain reference, its CPU code.

pub mod activation;
pub mod attention;
pub mod batch_norm;
pub mod cast;
pub mod columns;
pub mod compress;
pub mod conv;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod flat;
mod image;
pub(crate) mod lanes;
pub mod layer_norm;
pub mod layout;
pub mod matmul;
mod norm;
pub mod padding;
pub(crate) mod pieces;
pub mod pool;
pub mod reduce;
pub mod rms_norm;
pub mod rows;
pub mod select;
pub mod sparse;
pub mod update;

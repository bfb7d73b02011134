//! The operations, one file each: what it means, its plain reference, its CPU code.

pub mod activation;
pub mod attention;
pub mod batch_norm;
pub mod conv;
mod image;
pub mod layout;
pub mod matmul;
pub mod pool;

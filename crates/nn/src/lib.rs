//! Networks: layers with their backward passes, the model built of them, and its weights.
//!
//! A pass goes through here and leaves nothing behind but tensors: what samples they are of, what becomes of
//! gradients and when weights change is for whoever runs it to know. So nothing here reads a run's plan,
//! keeps optimizer state or writes a file. Of other ranks layers know the [groups](AxisGroups) that they
//! communicate in.

#![forbid(unsafe_code)]

mod axes;
mod error;
pub mod layers;
pub mod model;
pub mod weights;

pub use axes::AxisGroups;
pub use error::{Error, Result};

use espalier_plan::spec::Precision;
use espalier_tensor::DType;

/// The type that kernels compute in.
pub fn dtype(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
    }
}

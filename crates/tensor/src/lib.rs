//! Devices, buffers with exact accounting, and the operations of neural networks.
//!
//! Nothing here knows of training or of parallel ranks. A [`Tensor`] is a contiguous, reference-counted
//! chunk of a device's memory whose every byte is counted under a [`Category`]; an operation in [`ops`]
//! reads tensors and returns a new one on the same device.

pub mod cpu;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod error;
#[cfg(test)]
mod kernels;
pub mod machine;
pub mod mask;
pub mod memory;
pub mod operand;
pub mod ops;
pub mod random;
pub mod saved;
pub mod tensor;
#[cfg(test)]
mod testing;

pub use device::Device;
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use mask::Mask;
pub use memory::{Category, HostCopy, Ledger, TrackedBytes};
pub use operand::Operand;
pub use saved::StashedTensor;
pub use tensor::{AsyncUpload, Tensor};

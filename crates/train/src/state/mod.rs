//! What a rank trains: its parameters, each with its mask, weight, gradient and optimizer state.

mod at_work;
mod gradients;
mod noise;
mod noise_norms;
mod optimizer;
mod param;
mod resting;
mod store;

pub use at_work::WeightVersion;
pub use gradients::{Accumulator, MicroBatchGradients};
pub(crate) use gradients::{mask_for, wanted};
pub use noise::NoiseScale;
pub(crate) use noise_norms::NoiseNorms;
pub use optimizer::Optimizer;
pub use param::Param;
pub(crate) use param::{ParamRooms, WeightTarget};
pub use store::ParamStore;
pub(crate) use store::WeightStorageMode;

//! What a rank trains: its parameters, each with its mask, weight, gradient and optimizer state.

mod expansion;
mod gradients;
mod noise;
mod noise_norms;
mod optimizer;
mod param;
mod penalty;
mod store;
mod stored_weight;

pub use expansion::WeightVersion;
pub use gradients::{Accumulator, MicroBatchGradients};
pub(crate) use gradients::{gradient_elements, mask_for};
pub use noise::NoiseScale;
pub(crate) use noise_norms::NoiseNorms;
pub use optimizer::Optimizer;
pub use param::Param;
pub(crate) use param::{ParamTargets, WeightTarget};
pub use penalty::Penalty;
pub use store::ParamStore;
pub(crate) use store::{WeightStorage, WeightStorageMode};

//! What training keeps beside the weights: accumulated gradients, master weights, moments.

mod gradients;
mod noise;
mod optimizer;

pub use gradients::Gradients;
pub use noise::NoiseScale;
pub use optimizer::Optimizer;

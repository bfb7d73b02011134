//! What training keeps beside the weights: accumulated gradients, master weights, moments.

mod gradients;
mod masks;
mod master;
mod noise;
mod optimizer;

pub use gradients::Gradients;
pub use masks::Masks;
pub use noise::NoiseScale;
pub use optimizer::Optimizer;

//! Measures of the loss around a network's weights, one file each: how fast the gradient turns, how high the
//! loss rises nearby, how it curves, and how much single samples disagree.
//!
//! All of them ask a [`LossSurface`]: the mean loss over training samples as a function of the kept weights.
//! Nothing that trains is touched, and passes run in f32 whatever the precision of the run, since all this is
//! differences of nearby numbers.

mod eigenvalue;
mod lanczos;
mod noise;
mod sharpness;
mod smoothness;
mod spectrum;
mod surface;

pub use eigenvalue::{Eigenvalue, largest_eigenvalue};
pub use noise::{GradientNoise, gradient_noise, gradient_noise_at};
pub use sharpness::{Neighbourhood, Sharpness, sharpness};
pub use smoothness::{Smoothness, smoothness, step_and_measure};
pub use spectrum::{Probes, Spectrum, spectrum};
pub use surface::{Direction, LossSamples, LossSurface};

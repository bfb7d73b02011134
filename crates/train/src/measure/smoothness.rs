//! Local smoothness (Lee, Ajanthan, Torr & Jaggi 2021, after Zhang, He, Sra & Jadbabaie 2020): how fast the
//! gradient turns along a step,
//!
//! ```text
//! L(w_k) = max over gamma in {0.1, 0.2 ... 1.0} of |grad f(w_k + gamma d) - grad f(w_k)| / |gamma d|        d = w_{k+1} - w_k
//! ```
//!
//! Eleven gradients over all samples for one number. The difference of two gradients in f32 says
//! nothing below about 1e-6 of their length, so a step that is far shorter than the weights has a smoothness
//! that is mostly rounding: where L times the step is not well above that, it is not to be trusted.

use espalier_nn::weights::Weights;
use serde::Serialize;

use super::surface::{LossSamples, LossSurface, add_direction, scale};
use crate::Result;
use crate::trainer::{StepReport, Trainer};

/// How far along the step the gradient is evaluated.
const FRACTIONS: [f64; 10] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// How fast the gradient turned along a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Smoothness {
    /// L: change of the gradient for each unit of distance, the largest of those evaluated.
    pub value: f64,
    /// Where along the step it was found, as a fraction of the step.
    pub share: f64,
    /// The length of the step.
    pub length: f64,
    /// The loss where the step began.
    pub loss: f64,
    /// The length of the gradient there.
    pub gradient: f64,
}

/// Smoothness along the step from some weights to those of the surface; none where the two are the same.
pub fn smoothness(surface: &LossSurface<'_>, from: &Weights) -> Result<Option<Smoothness>> {
    let start = surface.masked(from)?;
    let step = surface.between(&start, &surface.center()?)?;
    let length = surface.norm(&step)?;
    if length == 0.0 {
        return Ok(None);
    }
    let (loss, mut back) = surface.loss_and_gradient(&start)?;
    let gradient = surface.norm(&back)?;
    scale(&mut back, -1.0)?;
    let mut found = Smoothness { value: 0.0, share: 0.0, length, loss, gradient };
    for share in FRACTIONS {
        let (_, mut change) = surface.loss_and_gradient(&surface.moved(&start, &step, share)?)?;
        add_direction(&mut change, 1.0, &back)?;
        let value = surface.finite("the local smoothness", surface.norm(&change)? / (share * length))?;
        if value > found.value {
            found = Smoothness { value, share, ..found };
        }
    }
    Ok(Some(found))
}

/// Takes a step and measures it; no smoothness where the step was skipped. Where weights are pruned before
/// the step, it begins at what is left of them.
pub fn step_and_measure(
    trainer: &mut Trainer,
    over: LossSamples,
) -> Result<(StepReport, Option<Smoothness>)> {
    let before = trainer.params().dense_copy()?;
    let report = trainer.step()?;
    trainer.average()?;
    let surface = LossSurface::of(trainer, over)?;
    Ok((report, smoothness(&surface, &before)?))
}

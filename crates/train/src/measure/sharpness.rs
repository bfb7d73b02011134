//! Sharpness (Keskar, Mudigere, Nocedal, Smelyanskiy & Tang 2017, metric 2.1 in the full space): how far
//! above the loss at the weights it rises within a box around them,
//!
//! ```text
//! 100 (max f(w + y) - f(w)) / (1 + f(w))        |y_i| <= epsilon (|w_i| + 1)
//! ```
//!
//! The maximum is sought by projected ascent: from the best point so far a step of sign(gradient), in units
//! of the box, clamped to its bounds. The first step goes to the corner that the gradient points to, which for
//! a convex loss is never a step down and mostly the maximum already; one that finds nothing higher is
//! halved. What is found is a lower bound of the maximum, as is that of the ten steps of L-BFGS-B in the
//! paper. Pruned weights have no side in the box.

use espalier_nn::weights::Weights;
use espalier_tensor::{Category, DType, Tensor};
use serde::Serialize;

use super::surface::{Direction, LossSurface};
use crate::Result;

/// The box, and how long its highest point is sought.
#[derive(Debug, Clone, Copy)]
pub struct Neighbourhood {
    /// Half a side at a weight of 0; the paper has 1e-3 and 5e-4.
    pub epsilon: f64,
    /// Losses with their gradients, beside the one at the weights.
    pub steps: usize,
}

impl Default for Neighbourhood {
    fn default() -> Neighbourhood {
        Neighbourhood { epsilon: 1e-3, steps: 10 }
    }
}

/// How far the loss rises nearby.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sharpness {
    /// In percent of 1 + the loss at the weights.
    pub value: f64,
    /// The loss at the weights.
    pub loss: f64,
    /// The highest that was found in the box.
    pub highest: f64,
}

/// The sharpness of a surface at its own weights.
pub fn sharpness(surface: &LossSurface<'_>, within: Neighbourhood) -> Result<Sharpness> {
    let middle = surface.center()?;
    let (loss, mut slope) = surface.loss_and_gradient(&middle)?;
    let loss = surface.finite("the loss", loss)?;
    let search_box = SearchBox::around(surface, &middle, within.epsilon)?;
    let (mut best, mut highest, mut reach) = (middle, loss, 2.0);
    for _ in 0..within.steps {
        let point = search_box.step(surface, &best, &slope, reach)?;
        let (found, gradient) = surface.loss_and_gradient(&point)?;
        // A loss that is not finite is beyond what the numbers can hold, and no higher point to go on from.
        if found.is_finite() && found > highest {
            (best, highest, slope) = (point, found, gradient);
        } else {
            reach /= 2.0;
        }
    }
    Ok(Sharpness { value: 100.0 * (highest - loss) / (1.0 + loss), loss, highest })
}

/// The box, as numbers of the host: it is walked along a few times, each between two passes over all samples.
struct SearchBox {
    /// Of each parameter the weights in the middle.
    middle: Vec<Vec<f32>>,
    epsilon: f32,
}

impl SearchBox {
    fn around(surface: &LossSurface<'_>, middle: &Weights, epsilon: f64) -> Result<SearchBox> {
        let middle = surface.ids().iter().map(|id| Ok(middle.get(*id).read_f32()?)).collect::<Result<_>>()?;
        Ok(SearchBox { middle, epsilon: epsilon as f32 })
    }

    /// From a point in the box so many half sides along the signs of the slope, up to its bounds.
    fn step(
        &self,
        surface: &LossSurface<'_>,
        from: &Weights,
        slope: &Direction,
        reach: f64,
    ) -> Result<Weights> {
        let mut point = from.widened()?;
        let tensors = surface.ids().iter().zip(slope).zip(&self.middle);
        for ((id, slope), middle) in tensors {
            let weight = point.get_mut(*id);
            let mut values = weight.read_f32()?;
            for ((value, slope), middle) in values.iter_mut().zip(slope.read_f32()?).zip(middle) {
                if slope == 0.0 {
                    continue;
                }
                let side = self.epsilon * (middle.abs() + 1.0);
                *value = (*value + reach as f32 * side * slope.signum()).clamp(middle - side, middle + side);
            }
            let (device, shape) = (weight.device(), weight.shape());
            *weight = Tensor::from_f32(&device, shape, DType::F32, &values, Category::Scoring)?;
        }
        Ok(point)
    }
}

//! What theory says of the ratio between sparse and dense networks, from what can be measured of both.
//!
//! For stochastic gradient descent on an L-smooth function, K* = c1/B + c2 with c1 = D L v/(mu^2 e^2) and c2
//! = D/(eta mu e): D is the gap between the loss at first and at best, v the variance of a sample's gradient,
//! and the best rate eta goes as 1/L (Lee et al. 2021, section 4). mu and e, a constant of the method and the
//! precision asked for, are the same at every sparsity. So c1 goes as D L v and c2 as D L.

use serde::Serialize;

use crate::fit::StepsCurve;

/// What was measured of the networks of one sparsity along their training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeasuredConstants {
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
    /// The local smoothness L, its mean over training.
    pub mean: f64,
    /// The variance of a sample's gradient, its mean over training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variance: Option<f64>,
    /// The training loss at first, less the least one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<f64>,
    /// The critical batch that the noise of gradients along training says (McCandlish et al. 2018): variance
    /// over squared gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
}

/// How a curve should differ from that of the dense network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoefficientRatios {
    pub c1: f64,
    pub c2: f64,
}

impl CoefficientRatios {
    /// Of a sparse network over the dense one. What was not measured is taken to be the same.
    pub fn predicted(sparse: &MeasuredConstants, dense: &MeasuredConstants) -> CoefficientRatios {
        let over = |of: fn(&MeasuredConstants) -> Option<f64>| match (of(sparse), of(dense)) {
            (Some(sparse), Some(dense)) if dense > 0.0 => sparse / dense,
            _ => 1.0,
        };
        let steps = over(|measured| Some(measured.mean)) * over(|measured| measured.gap);
        CoefficientRatios { c1: steps * over(|measured| measured.variance), c2: steps }
    }

    /// The ratio of K* at a batch size that this makes of the dense network's curve.
    pub fn at(&self, dense: &StepsCurve, batch: f64) -> f64 {
        (self.c1 * dense.c1 / batch + self.c2 * dense.c2) / dense.at(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the published smoothness of a small network alone, 0.57 dense and 1.76 at 90 %, three times the
    /// steps: the published curves are 3.4 (c1) and 2.5 (c2) times as high.
    #[test]
    fn the_smoothness_alone_predicts_about_what_was_published() {
        let measured = |sparsity, mean| MeasuredConstants {
            sparsity,
            mean,
            variance: None,
            gap: None,
            noise_scale: None,
        };
        let ratios = CoefficientRatios::predicted(&measured(0.9, 1.76), &measured(0.0, 0.57));
        assert!((ratios.c1 - 3.09).abs() < 0.01 && ratios.c1 == ratios.c2);
        let dense = StepsCurve { c1: 10_696.0, c2: 181.0, r2: None };
        for batch in [4.0, 64.0, 16_384.0] {
            assert!((ratios.at(&dense, batch) - 3.09).abs() < 0.01);
        }
    }

    #[test]
    fn variance_moves_small_batches_alone() {
        let dense = MeasuredConstants {
            sparsity: 0.0,
            mean: 1.0,
            variance: Some(2.0),
            gap: Some(2.0),
            noise_scale: None,
        };
        let sparse = MeasuredConstants {
            sparsity: 0.9,
            mean: 3.0,
            variance: Some(1.0),
            gap: Some(3.0),
            noise_scale: None,
        };
        let ratios = CoefficientRatios::predicted(&sparse, &dense);
        assert_eq!(ratios, CoefficientRatios { c1: 2.25, c2: 4.5 });
        let curve = StepsCurve { c1: 1000.0, c2: 1000.0, r2: None };
        assert!((ratios.at(&curve, 1.0) - 3.375).abs() < 1e-12);
    }
}

//! On what a step's time goes.

use std::ops::Mul;

use serde::Serialize;

/// Where the seconds of a step go, on the mean over ranks. Together they are the step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Breakdown {
    /// Kernels of forward and backward passes, recomputation included.
    pub compute: f64,
    /// Messages between stages, as far as they are waited for.
    pub point_to_point: f64,
    /// Waiting for other stages.
    pub bubble: f64,
    /// All-reduces, all-gathers and halos, as far as they are waited for.
    pub collective: f64,
    /// Gradients into their accumulators, compressed or dense.
    pub compress: f64,
    /// The step itself.
    pub optimizer: f64,
}

impl Breakdown {
    pub(super) fn total(&self) -> f64 {
        self.kinds().iter().map(|(_, seconds)| seconds).sum()
    }

    /// All kinds, with what a person calls them.
    pub fn kinds(&self) -> [(&'static str, f64); 6] {
        [
            ("compute", self.compute),
            ("point-to-point", self.point_to_point),
            ("bubble", self.bubble),
            ("collectives", self.collective),
            ("gradient accumulation", self.compress),
            ("optimizer", self.optimizer),
        ]
    }
}

impl Mul<f64> for Breakdown {
    type Output = Breakdown;

    fn mul(self, by: f64) -> Breakdown {
        Breakdown {
            compute: self.compute * by,
            point_to_point: self.point_to_point * by,
            bubble: self.bubble * by,
            collective: self.collective * by,
            compress: self.compress * by,
            optimizer: self.optimizer * by,
        }
    }
}

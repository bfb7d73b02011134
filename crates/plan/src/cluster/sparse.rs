//! What kernels of a core save by skipping zeros: those of a pruned weight, and those that a max pool leaves of
//! a gradient. On a GPU nothing is skipped, since dense kernels are faster there.

use serde::{Deserialize, Serialize};

use super::share;

/// How many times as fast passes are where zeros are skipped as with dense kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SkippedZeros {
    /// `[kept, times]`: the three products of a linear layer with `prune.kernels = "sparse"`, by the fraction of
    /// its weights that is kept, in ascending order.
    pub linear: Vec<[f64; 2]>,
    /// The same of a convolution's forward pass, which skips a weight's zeros without being asked.
    pub convolution: Vec<[f64; 2]>,
    /// The two gradients of a convolution behind whose output a max pool stands.
    pub behind_pool: f64,
}

impl SkippedZeros {
    /// Times at a fraction of kept weights: on the line between two points where both are logarithms, as fast as
    /// at the first point below it. With more than the last nothing is skipped.
    pub(crate) fn times(points: &[[f64; 2]], kept: f64) -> f64 {
        let last = points.last().map_or(0.0, |last| last[0]);
        if kept > last {
            return 1.0;
        }
        match points.first() {
            Some(first) if kept < first[0] => first[1],
            _ => share(points, kept),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_weights_are_faster_and_many_are_dense() {
        let points = [[0.1, 4.0], [0.4, 1.0]];
        let at = |kept| SkippedZeros::times(&points, kept);
        assert_eq!([at(0.05), at(0.1), at(0.4), at(0.5), at(1.0)], [4.0, 4.0, 1.0, 1.0, 1.0]);
        assert!((at(0.2) - 2.0).abs() < 1e-12);
    }
}

//! The curve that steps-to-result follow, K* = c1/B + c2 (Lee et al. 2021): below the critical batch c1/c2
//! twice the batch takes half the steps; far above it more samples a step buy nothing.
//!
//! Fitted in relative least squares, sum of ((c1/B + c2)/K - 1)^2 over the cells: K* spans two orders of
//! magnitude, and a step more or less matters by its fraction of K*. That is linear in c1 and c2. Intervals
//! come from a bootstrap over trials: each cell's trials are resampled with replacement, K* is the least of
//! those that are sampled, and the middle 95 % of the fits are the interval. Trials that were cut or stopped
//! count as sampled and not complete: nobody knows when they would have been. Where most were, few samples
//! differ, and intervals are narrower than the truth.

use serde::Serialize;

/// How often trials are resampled.
const RESAMPLES: usize = 400;

/// Steps to the goal at a batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepsAtBatch {
    /// Samples in a step.
    pub batch: f64,
    /// K*.
    pub steps: f64,
}

/// What became of each trial at a batch size: the steps to the goal, where it was reached.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialsAtBatch {
    /// Samples in a step.
    pub batch: usize,
    /// One for each trial.
    pub steps: Vec<Option<u64>>,
}

impl TrialsAtBatch {
    fn point(&self, steps: impl Iterator<Item = Option<u64>>) -> Option<StepsAtBatch> {
        let least = steps.flatten().min()?;
        Some(StepsAtBatch { batch: self.batch as f64, steps: least as f64 })
    }
}

/// A curve through the K* of one sparsity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepsCurve {
    /// Samples that the goal takes where the batch is small.
    pub c1: f64,
    /// Steps that the goal takes whatever the batch.
    pub c2: f64,
    /// The fraction of the relative variance of K* that it explains; none of two points, through which it goes
    /// in any case.
    pub r2: Option<f64>,
}

/// The same with the intervals of the bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fit {
    /// From all trials.
    #[serde(flatten)]
    pub curve: StepsCurve,
    /// c1/c2, where twice the batch first takes more than three quarters of the steps.
    pub critical_batch: Option<f64>,
    /// 95 % of the bootstrap.
    pub c1_interval: [f64; 2],
    /// 95 % of the bootstrap.
    pub c2_interval: [f64; 2],
}

impl StepsCurve {
    /// The curve through at least two points of different batch sizes. Neither constant is below 0: where the
    /// best curve's were, it is the best one with 0.
    pub fn through(points: &[StepsAtBatch]) -> Option<StepsCurve> {
        let first = points.first()?;
        if points.iter().all(|point| point.batch == first.batch) {
            return None;
        }
        // With x = 1/(B K) and y = 1/K, c1 x + c2 y is to be 1.
        let (mut xx, mut xy, mut yy, mut x1, mut y1) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for StepsAtBatch { batch, steps } in points {
            let (x, y) = (1.0 / (batch * steps), 1.0 / steps);
            xx += x * x;
            xy += x * y;
            yy += y * y;
            x1 += x;
            y1 += y;
        }
        let determinant = xx * yy - xy * xy;
        let (c1, c2) = ((x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant);
        let (c1, c2) = match (c1 < 0.0, c2 < 0.0) {
            (true, _) => (0.0, y1 / yy),
            (_, true) => (x1 / xx, 0.0),
            _ => (c1, c2),
        };
        // Against the best constant, by the same measure.
        let constant = y1 / yy;
        let squares = |at: &dyn Fn(f64) -> f64| -> f64 {
            points.iter().map(|point| (at(point.batch) / point.steps - 1.0).powi(2)).sum()
        };
        let (left, all) = (squares(&|batch| c1 / batch + c2), squares(&|_| constant));
        let r2 = if all > 0.0 { 1.0 - left / all } else { 1.0 };
        let r2 = (points.len() > 2).then_some(r2);
        Some(StepsCurve { c1, c2, r2 })
    }

    /// The steps that it gives for a batch size.
    pub fn at(&self, batch: f64) -> f64 {
        self.c1 / batch + self.c2
    }
}

/// Fits the trials of one sparsity; None where fewer than two batch sizes have reached the goal.
pub fn fit(cells: &[TrialsAtBatch]) -> Option<Fit> {
    let points: Vec<StepsAtBatch> =
        cells.iter().filter_map(|cell| cell.point(cell.steps.iter().copied())).collect();
    let curve = StepsCurve::through(&points)?;
    let mut rng = SplitMix64(0x9e37_79b9_7f4a_7c15);
    let refit = |_| {
        let one = |cell: &TrialsAtBatch| {
            let resampled: Vec<_> =
                cell.steps.iter().map(|_| cell.steps[rng.below(cell.steps.len())]).collect();
            cell.point(resampled.into_iter())
        };
        let points: Vec<StepsAtBatch> = cells.iter().filter_map(one).collect();
        StepsCurve::through(&points)
    };
    let curves: Vec<StepsCurve> = (0..RESAMPLES).filter_map(refit).collect();
    let interval =
        |of: fn(&StepsCurve) -> f64| middle(curves.iter().map(of).collect()).unwrap_or([of(&curve); 2]);
    Some(Fit {
        curve,
        critical_batch: (curve.c2 > 0.0).then(|| curve.c1 / curve.c2),
        c1_interval: interval(|curve| curve.c1),
        c2_interval: interval(|curve| curve.c2),
    })
}

/// The ends of the middle 95 %.
fn middle(mut values: Vec<f64>) -> Option<[f64; 2]> {
    values.sort_by(f64::total_cmp);
    let at = |fraction: f64| values.get((fraction * (values.len() - 1) as f64).round() as usize).copied();
    if values.is_empty() { None } else { Some([at(0.025)?, at(0.975)?]) }
}

/// Random numbers that are the same each time (splitmix64).
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(batches: &[f64], steps: &[f64]) -> Vec<StepsAtBatch> {
        batches.iter().zip(steps).map(|(&batch, &steps)| StepsAtBatch { batch, steps }).collect()
    }

    #[test]
    fn a_curve_is_found_again() {
        let batches = [2.0, 16.0, 128.0, 1024.0, 8192.0];
        let steps = batches.map(|batch| 36_000.0 / batch + 158.0);
        let curve = StepsCurve::through(&points(&batches, &steps)).unwrap();
        assert!((curve.c1 - 36_000.0).abs() < 1e-6 && (curve.c2 - 158.0).abs() < 1e-9, "{curve:?}");
        assert!((curve.r2.unwrap() - 1.0).abs() < 1e-12);
        let two = StepsCurve::through(&points(&batches[..2], &steps[..2])).unwrap();
        assert_eq!(two.r2, None, "a curve of two constants goes through two points");
    }

    /// Lee et al. 2021, every other batch size as it can be read off a figure, against the fits that they
    /// give of all of them.
    #[test]
    fn published_fits_are_found_in_published_points() {
        let batches = [4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0];
        for (steps, c1, c2) in [
            ([3056.0, 848.0, 336.0, 208.0, 192.0, 160.0, 176.0], 10_696.0, 181.0),
            ([9744.0, 2960.0, 1040.0, 480.0, 512.0, 464.0, 496.0], 36_539.0, 450.0),
            ([8224.0, 2592.0, 816.0, 320.0, 176.0, 160.0, 160.0], 36_230.0, 158.0),
            ([25_264.0, 6512.0, 1984.0, 976.0, 320.0, 320.0, 336.0], 104_910.0, 298.0),
        ] {
            let curve = StepsCurve::through(&points(&batches, &steps)).unwrap();
            assert!((curve.c1 / c1 - 1.0).abs() < 0.08, "{curve:?} against {c1}, {c2}");
            assert!((curve.c2 / c2 - 1.0).abs() < 0.08, "{curve:?} against {c1}, {c2}");
            assert!(curve.r2.unwrap() > 0.94, "{curve:?}");
        }
    }

    #[test]
    fn no_constant_is_negative() {
        let falling = StepsCurve::through(&points(&[1.0, 10.0], &[100.0, 1.0])).unwrap();
        assert!(falling.c2 == 0.0 && falling.c1 > 0.0, "{falling:?}");
        let rising = StepsCurve::through(&points(&[1.0, 10.0], &[1.0, 2.0])).unwrap();
        assert!(rising.c1 == 0.0 && rising.c2 > 0.0, "{rising:?}");
        assert_eq!(StepsCurve::through(&points(&[4.0, 4.0], &[1.0, 2.0])), None);
        assert_eq!(StepsCurve::through(&[]), None);
    }

    #[test]
    fn intervals_hold_the_fit_and_shrink_with_trials_that_agree() {
        let cells = |spread: u64, others: usize| -> Vec<TrialsAtBatch> {
            let steps = |batch: usize| (10_000 / batch + 100) as u64;
            let trials = |batch| {
                let values =
                    (0..others as u64).map(move |i| Some(steps(batch) + i * spread * steps(batch) / 100));
                values.chain([None, None]).collect()
            };
            [8, 64, 512].map(|batch| TrialsAtBatch { batch, steps: trials(batch) }).into()
        };
        let wide = fit(&cells(30, 4)).unwrap();
        let narrow = fit(&cells(1, 12)).unwrap();
        let width = |interval: [f64; 2]| interval[1] - interval[0];
        for fit in [&wide, &narrow] {
            assert!(
                fit.c1_interval[0] <= fit.curve.c1 && fit.curve.c1 <= fit.c1_interval[1] + 1e-9,
                "{fit:?}"
            );
        }
        assert!(width(narrow.c1_interval) < width(wide.c1_interval) / 3.0, "{narrow:?} {wide:?}");
        let critical = wide.critical_batch.unwrap();
        assert!((critical - wide.curve.c1 / wide.curve.c2).abs() < 1e-9);
        assert_eq!(fit(&cells(1, 0)), None, "no trial has reached the goal");
    }
}

//! The curve that steps-to-result follow, K* = c1/B + c2 (Lee et al. 2021): below the critical batch c1/c2
//! twice the batch takes half the steps; far above it more samples a step buy nothing.
//!
//! Fitted in relative least squares, sum of ((c1/B + c2)/K - 1)^2 over the cells: K* spans two orders of
//! magnitude, and a step more or less matters by its fraction of K*. That is linear in c1 and c2. K* is the
//! least of many trials, and nobody knows what another hundred would have found; what is known, where best
//! trials were run again with other seeds, is what curves go through their steps: through the median of each
//! cell, the least and the most.

use espalier_plan::time_to_result::RepeatCurves;
use serde::Serialize;

/// Steps to the goal at a batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepsAtBatch {
    /// Samples in a step.
    pub batch: f64,
    /// K*.
    pub steps: f64,
}

/// What the trials of a cell came to.
#[derive(Debug, Clone, Copy)]
pub struct CellSteps<'a> {
    /// Samples in a step.
    pub batch: f64,
    /// Steps of the best one.
    pub k_star: f64,
    /// Steps of the steadiest one with other seeds; none where it did not reach the goal.
    pub repeats: &'a [Option<u64>],
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

/// The same with what other seeds make of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fit {
    /// Of the best trials.
    #[serde(flatten)]
    pub curve: StepsCurve,
    /// c1/c2, where twice the batch first takes more than three quarters of the steps.
    pub critical_batch: Option<f64>,
    /// The least and the largest of the curves of other seeds, where there are some.
    pub c1_interval: Option<[f64; 2]>,
    /// The same.
    pub c2_interval: Option<[f64; 2]>,
    /// These curves.
    pub repeats: Option<RepeatCurves>,
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

/// Fits the cells of one sparsity; None where fewer than two batch sizes have reached the goal.
pub fn fit(cells: &[CellSteps]) -> Option<Fit> {
    let best = |cell: &CellSteps| StepsAtBatch { batch: cell.batch, steps: cell.k_star };
    let curve = StepsCurve::through(&cells.iter().map(best).collect::<Vec<_>>())?;
    let repeats = repeat_curves(cells);
    let interval = |constant: usize| {
        let RepeatCurves { median, least, most, .. } = repeats?;
        let of_curves = [median, least, most].map(|curve| curve[constant]);
        Some([of_curves.into_iter().fold(f64::INFINITY, f64::min), of_curves.into_iter().fold(0.0, f64::max)])
    };
    Some(Fit {
        curve,
        critical_batch: (curve.c2 > 0.0).then(|| curve.c1 / curve.c2),
        c1_interval: interval(0),
        c2_interval: interval(1),
        repeats,
    })
}

/// Steps with several seeds, the fewest first; infinite where the goal was not reached.
fn sorted(seeds: &[Option<u64>]) -> Vec<f64> {
    let mut steps: Vec<f64> =
        seeds.iter().map(|steps| steps.map_or(f64::INFINITY, |steps| steps as f64)).collect();
    steps.sort_by(f64::total_cmp);
    steps
}

/// Curves through what other seeds took, of the cells that have two or more of them and of which more than half
/// reached the goal.
fn repeat_curves(cells: &[CellSteps]) -> Option<RepeatCurves> {
    let repeated = cells.iter().filter(|cell| cell.repeats.len() > 1).filter_map(|cell| {
        let steps = sorted(cell.repeats);
        let median = 0.5 * (steps[(steps.len() - 1) / 2] + steps[steps.len() / 2]);
        median.is_finite().then_some((cell.batch, steps, median))
    });
    let repeated: Vec<(f64, Vec<f64>, f64)> = repeated.collect();
    let through = |steps: &dyn Fn(&[f64], f64) -> f64| {
        let point = |(batch, all, median): &(f64, Vec<f64>, f64)| StepsAtBatch {
            batch: *batch,
            steps: steps(all, *median),
        };
        let curve = StepsCurve::through(&repeated.iter().map(point).collect::<Vec<_>>())?;
        Some([curve.c1, curve.c2])
    };
    let reached = |all: &[f64]| all.iter().copied().filter(|steps| steps.is_finite()).fold(0.0, f64::max);
    Some(RepeatCurves {
        seeds: repeated.iter().map(|(_, all, _)| all.len()).min()?,
        median: through(&|_, median| median)?,
        least: through(&|all, _| all[0])?,
        most: through(&|all, _| reached(all))?,
    })
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

    /// Seeds that took 1.1, 1.2 and 1.4 times the steps, in another order in each cell, and one that never
    /// reached the goal: it is slower than all others, so that the median is between 1.2 and 1.4.
    #[test]
    fn other_seeds_have_a_median_and_ends() {
        let batches = [8.0, 64.0, 512.0];
        let k_star = |batch: f64| 100_000.0 / batch + 1000.0;
        let taken = |batch: f64, factors: &[f64]| -> Vec<Option<u64>> {
            let steps = |factor: &f64| factor.is_finite().then(|| (factor * k_star(batch)).round() as u64);
            factors.iter().map(steps).collect()
        };
        let fitted = |factors: [&[f64]; 3]| {
            let repeats = [0, 1, 2].map(|i| taken(batches[i], factors[i]));
            let cell =
                |i: usize| CellSteps { batch: batches[i], k_star: k_star(batches[i]), repeats: &repeats[i] };
            fit(&[0, 1, 2].map(cell)).unwrap()
        };
        let never = f64::INFINITY;
        let found = fitted([&[1.1, 1.2, 1.4, never], &[never, 1.4, 1.1, 1.2], &[1.4, 1.2, never, 1.1]]);
        let curves = found.repeats.unwrap();
        for (curve, factor) in [(curves.median, 1.3), (curves.least, 1.1), (curves.most, 1.4)] {
            assert!((curve[0] / (factor * 100_000.0) - 1.0).abs() < 1e-3, "{factor}: {curve:?}");
            assert!((curve[1] / (factor * 1000.0) - 1.0).abs() < 1e-3, "{factor}: {curve:?}");
        }
        assert_eq!((curves.seeds, found.c1_interval), (4, Some([curves.least[0], curves.most[0]])));
        assert!((found.critical_batch.unwrap() - 100.0).abs() < 1e-6);
        // Of a cell of which half never reached the goal no median is known: the curve goes through the others.
        let half = fitted([&[1.1, never], &[1.1, 1.3], &[1.3, 1.1, 1.2]]);
        let curves = half.repeats.unwrap();
        assert_eq!(curves.seeds, 2);
        assert!((curves.median[0] / 120_000.0 - 1.0).abs() < 1e-3, "{curves:?}");
        // Through one cell goes no curve, and one other seed has no median worth the name.
        assert_eq!(fitted([&[1.1, never], &[never, never], &[1.3, 1.1]]).repeats, None);
        let single = fitted([&[1.1], &[1.2], &[1.3]]);
        assert_eq!((single.repeats, single.c1_interval, single.c2_interval), (None, None, None));
    }
}

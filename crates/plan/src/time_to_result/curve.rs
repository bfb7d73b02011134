//! Steps to a result against the batch, K* = c1/B + c2, and how far they are to be trusted.
//!
//! K* is the least of many trials, and a new run has no such luck. Where the best trials of a study were run
//! again with other seeds, what counts is the median of these, and steps lie between the least and the most of
//! them and K* itself. Without, what is known is how far the cells lie from the curve that was fitted to them:
//! the prediction interval of that fit, in relative residuals as the fit itself is made.

use serde::{Deserialize, Serialize};

/// Batches are of interest up to so many times the critical one: there a step more or less in sixteen is all
/// that a larger batch could save.
const BEYOND_CRITICAL: f64 = 16.0;

/// Nine of ten results lie within an interval that is made of residuals: so many standard deviations, by
/// Student's distribution, for 1, 2, ... degrees of freedom.
const STUDENT: [f64; 10] = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812];

/// K* = c1/B + c2 at one sparsity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConvergenceCurve {
    /// The fraction of the prunable weights that is pruned.
    pub sparsity: f64,
    /// Samples that the result takes where the batch is small.
    pub c1: f64,
    /// Steps that it takes whatever the batch.
    pub c2: f64,
    /// `[batch, K*]` of the cells that it was fitted to; none where somebody gave its constants.
    #[serde(default)]
    pub cells: Vec<[f64; 2]>,
    /// What other seeds made of these cells, where they were run with any.
    #[serde(default)]
    pub repeats: Option<RepeatCurves>,
}

/// `[c1, c2]` of curves through the steps that the steadiest trial of each cell took with other seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RepeatCurves {
    /// How many of them each of these cells has at least.
    pub seeds: usize,
    /// Through their medians, in which a run that did not reach the goal is slower than all that did.
    pub median: [f64; 2],
    /// Through the least.
    pub least: [f64; 2],
    /// Through the most of those that reached the goal.
    pub most: [f64; 2],
}

/// What an interval was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntervalSource {
    /// The least and the most of so many other seeds.
    Seeds(usize),
    /// The residuals of so many cells.
    Residuals(usize),
    /// Nothing: two cells, through which any curve goes, or constants that somebody gave.
    Unknown,
}

impl IntervalSource {
    /// As programs read it.
    pub fn name(self) -> Option<&'static str> {
        match self {
            IntervalSource::Seeds(_) => Some("seeds"),
            IntervalSource::Residuals(_) => Some("residuals"),
            IntervalSource::Unknown => None,
        }
    }
}

impl ConvergenceCurve {
    /// Constants that somebody gave.
    pub fn given(sparsity: f64, c1: f64, c2: f64) -> ConvergenceCurve {
        ConvergenceCurve { sparsity, c1, c2, cells: Vec::new(), repeats: None }
    }

    /// c1 and c2 of what a new run is to expect: the median of other seeds, or K* where there are none.
    pub fn expected(&self) -> [f64; 2] {
        self.repeats.map_or([self.c1, self.c2], |repeats| repeats.median)
    }

    /// Steps that a new run is to expect at a batch size.
    pub fn at(&self, batch: f64) -> f64 {
        let [c1, c2] = self.expected();
        c1 / batch + c2
    }

    /// Steps of the luckiest of the trials.
    pub fn k_star(&self, batch: f64) -> f64 {
        self.c1 / batch + self.c2
    }

    /// c1/c2 of what is expected: from there on twice the batch takes more than three quarters of the steps. None
    /// where it always takes half.
    pub fn critical_batch(&self) -> Option<f64> {
        let [c1, c2] = self.expected();
        (c2 > 0.0).then(|| c1 / c2)
    }

    /// Whether a batch lies beyond those of the cells.
    pub fn is_extrapolated(&self, batch: usize) -> bool {
        let beyond = |[smallest, largest]: [f64; 2]| !(smallest..=largest).contains(&(batch as f64));
        self.studied().is_some_and(beyond)
    }

    /// The smallest and the largest batch of its cells.
    fn studied(&self) -> Option<[f64; 2]> {
        let first = self.cells.first()?[0];
        let ends = |[low, high]: [f64; 2], cell: &[f64; 2]| [low.min(cell[0]), high.max(cell[0])];
        Some(self.cells.iter().fold([first; 2], ends))
    }

    /// Powers of two that are worth a look: from the smallest batch that was studied to far beyond the critical
    /// one; where there is none, to the largest that was studied. None where neither is known.
    pub fn batches(&self) -> Option<Vec<usize>> {
        let studied = self.studied();
        let least = studied.map_or(1, |[smallest, _]| 1 << smallest.max(1.0).log2() as u32);
        let most = match (self.critical_batch(), studied) {
            (Some(critical), studied) => {
                (BEYOND_CRITICAL * critical).max(studied.map_or(1.0, |[_, largest]| largest))
            }
            (None, Some([_, largest])) => largest,
            (None, None) => return None,
        };
        let doubled = std::iter::successors(Some(least), |batch: &usize| batch.checked_mul(2));
        Some(doubled.take_while(|batch| *batch as f64 <= most).collect())
    }

    /// What its intervals are made of.
    pub fn interval_source(&self) -> IntervalSource {
        match (self.repeats, self.cells.len()) {
            (Some(repeats), _) => IntervalSource::Seeds(repeats.seeds),
            (None, cells @ 3..) => IntervalSource::Residuals(cells),
            _ => IntervalSource::Unknown,
        }
    }

    /// The least and the most steps at a batch size that are to be expected.
    pub fn interval(&self, batch: f64) -> Option<[f64; 2]> {
        let steps = self.k_star(batch);
        if let Some(RepeatCurves { median, least, most, .. }) = self.repeats {
            let [median, least, most] = [median, least, most].map(|[c1, c2]| c1 / batch + c2);
            return Some([steps.min(least).min(median), steps.max(most).max(median)]);
        }
        let factor = 1.0 + self.relative_error(batch)?;
        Some([steps / factor, steps * factor])
    }

    /// Half the width of the prediction interval of the fit, relative to the steps: that of the curve itself,
    /// which grows away from the cells, and of a single result around it.
    fn relative_error(&self, batch: f64) -> Option<f64> {
        let (mut xx, mut xy, mut yy, mut squares) = (0.0, 0.0, 0.0, 0.0);
        for [batch, steps] in &self.cells {
            let (x, y) = (1.0 / (batch * steps), 1.0 / steps);
            xx += x * x;
            xy += x * y;
            yy += y * y;
            squares += (self.c1 * x + self.c2 * y - 1.0).powi(2);
        }
        let freedom = self.cells.len().checked_sub(2).filter(|freedom| *freedom > 0)?;
        let steps = self.at(batch);
        let (x, y) = (1.0 / (batch * steps), 1.0 / steps);
        let of_curve = (x * x * yy - 2.0 * x * y * xy + y * y * xx) / (xx * yy - xy * xy);
        let deviation = (squares / freedom as f64 * (1.0 + of_curve)).sqrt();
        let deviations = STUDENT.get(freedom - 1).copied().unwrap_or(1.645 + 1.6 / freedom as f64);
        Some(deviations * deviation).filter(|error| error.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn studied(factors: &[f64], repeats: Option<RepeatCurves>) -> ConvergenceCurve {
        let at = |(i, factor): (usize, &f64)| {
            let batch = 16.0 * 4f64.powi(i as i32);
            [batch, factor * (36_000.0 / batch + 90.0)]
        };
        let cells = factors.iter().enumerate().map(at).collect();
        ConvergenceCurve { cells, repeats, ..ConvergenceCurve::given(0.9, 36_000.0, 90.0) }
    }

    #[test]
    fn batches_reach_from_what_was_studied_to_far_beyond_the_critical_one() {
        let curve = studied(&[1.0; 3], None);
        assert_eq!(curve.critical_batch(), Some(400.0));
        let batches = curve.batches().unwrap();
        assert_eq!((batches[0], *batches.last().unwrap(), batches.len()), (16, 4096, 9));
        assert!(!curve.is_extrapolated(256) && curve.is_extrapolated(512) && curve.is_extrapolated(8));
        let given = ConvergenceCurve::given(0.0, 800.0, 100.0);
        assert_eq!(given.batches().unwrap(), [1, 2, 4, 8, 16, 32, 64, 128]);
        assert!(!given.is_extrapolated(1));
        // Without a critical batch nothing says that a larger one than those studied would do as well.
        assert_eq!(ConvergenceCurve { c2: 0.0, ..curve }.batches().unwrap(), [16, 32, 64, 128, 256]);
        assert_eq!(ConvergenceCurve { c2: 0.0, ..given }.batches(), None);
    }

    #[test]
    fn seeds_bound_the_steps_at_every_batch() {
        let repeats = RepeatCurves {
            seeds: 5,
            median: [45_000.0, 90.0],
            least: [40_000.0, 80.0],
            most: [50_000.0, 100.0],
        };
        let curve = studied(&[1.0; 3], Some(repeats));
        assert_eq!(curve.interval_source(), IntervalSource::Seeds(5));
        assert_eq!(curve.expected(), [45_000.0, 90.0]);
        assert_eq!(
            (curve.at(36.0), curve.k_star(36.0), curve.critical_batch()),
            (1340.0, 1090.0, Some(500.0))
        );
        // The least is K* where the batch is small, and that of other seeds where it is large.
        assert_eq!(curve.interval(36.0), Some([1090.0, 50_000.0 / 36.0 + 100.0]));
        assert_eq!(curve.interval(4000.0), Some([90.0, 112.5]));
    }

    /// By hand: cells that lie 10 % above and below, whatever the batch, and one degree of freedom.
    #[test]
    fn residuals_make_an_interval_that_widens_away_from_the_cells() {
        let exact = studied(&[1.0; 4], None);
        let [low, high] = exact.interval(100.0).unwrap();
        assert!((low - 450.0).abs() < 1e-9 && (high - 450.0).abs() < 1e-9, "nothing is left to explain");
        let curve = studied(&[1.1, 0.9, 1.1, 0.9], None);
        assert_eq!(curve.interval_source(), IntervalSource::Residuals(4));
        let width = |batch: f64| {
            let [low, high] = curve.interval(batch).unwrap();
            assert!((low * high / curve.at(batch).powi(2) - 1.0).abs() < 1e-12);
            high / low
        };
        // At least Student's 2.92 deviations of a single result, of which there are two degrees of freedom.
        let squares = 2.0 * (1.0 / 1.1f64 - 1.0).powi(2) + 2.0 * (1.0 / 0.9f64 - 1.0).powi(2);
        assert!(width(64.0) > (1.0 + 2.92 * (squares / 2.0).sqrt()).powi(2), "{}", width(64.0));
        assert!(width(1.0) > width(64.0) && width(65_536.0) > width(256.0));
        let two = ConvergenceCurve { cells: curve.cells[..2].to_vec(), ..curve };
        assert_eq!((two.interval(64.0), two.interval_source()), (None, IntervalSource::Unknown));
    }
}

//! How large a step is, from the first to the last.
//!
//! Steps count from 0. During the warm-up the rate rises in a line and is first at its peak at its end: step
//! s has peak (s + 1)/warmup. From a rate of its own (`warmup_from`; Goyal et al. 2017 begin at the rate of a
//! small batch) it is from + (peak - from) s/warmup, which is that rate at first and the peak after the
//! warm-up. Then the schedule lowers it; with t the fraction of the decay that is behind,
//!
//! - constant: 1
//! - linear: 1 - (1 - end_factor) t
//! - cosine: end_factor + (1 - end_factor)(1 + cos(pi t))/2
//! - step: step_factor to the power of the whole periods of `step_every` behind
//!
//! A pruned network takes larger steps than a dense one: every rate, the warm-up's included, is divided by the
//! density of the prunable weights to the power of `by_density`, so it grows as pruning goes on.

use serde::{Deserialize, Serialize};

/// A rate for every step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LearningRate {
    pub peak: f64,
    /// Steps of the linear rise to the peak.
    pub warmup: usize,
    /// The rate of the first step, where the rise begins there; otherwise it rises from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_from: Option<f64>,
    /// The batch for which the peak is meant: it is multiplied by `train.batch` over this (Goyal et al. 2017).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_from_batch: Option<usize>,
    /// The power of the density that the rate is divided by; 0: as of a dense network.
    #[serde(default)]
    pub by_density: f64,
    /// How the rate falls.
    #[serde(flatten)]
    pub schedule: RateDecay,
}

/// How the rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schedule", rename_all = "lowercase")]
pub enum RateDecay {
    /// It stays at its peak.
    Constant,
    /// It falls in a straight line.
    Linear {
        /// The last rate over the peak.
        end_factor: f64,
        /// Steps of the fall after the warm-up; 0: the rest of the run.
        decay_steps: usize,
    },
    /// Along half a cosine.
    Cosine {
        /// The last rate over the peak.
        end_factor: f64,
        /// Steps of the fall after the warm-up; 0: the rest of the run.
        decay_steps: usize,
    },
    /// By a factor at a time.
    Step {
        /// Steps between drops; 0: a third of the run after the warm-up.
        step_every: usize,
        /// What a drop multiplies the rate by.
        step_factor: f64,
    },
}

impl LearningRate {
    /// The rate of step `step` (from 0) in a run of `total_steps`.
    pub fn at(&self, step: usize, total_steps: usize) -> f64 {
        if step < self.warmup {
            let warmup = self.warmup as f64;
            return match self.warmup_from {
                None => self.peak * (step + 1) as f64 / warmup,
                Some(from) => from + (self.peak - from) * step as f64 / warmup,
            };
        }
        let behind = step - self.warmup;
        let rest = total_steps.saturating_sub(self.warmup).max(1);
        let progress = |decay_steps: usize| {
            let steps = if decay_steps == 0 { rest } else { decay_steps };
            (behind as f64 / steps as f64).min(1.0)
        };
        let factor = match self.schedule {
            RateDecay::Constant => 1.0,
            RateDecay::Linear { end_factor, decay_steps } => 1.0 - (1.0 - end_factor) * progress(decay_steps),
            RateDecay::Cosine { end_factor, decay_steps } => {
                let wave = 0.5 * (1.0 + (std::f64::consts::PI * progress(decay_steps)).cos());
                end_factor + (1.0 - end_factor) * wave
            }
            RateDecay::Step { step_every, step_factor } => {
                let every = if step_every == 0 { rest.div_ceil(3) } else { step_every };
                step_factor.powi(i32::try_from(behind / every).unwrap_or(i32::MAX))
            }
        };
        self.peak * factor
    }

    /// What the rate of a step is multiplied by while so large a fraction of the prunable weights is kept; at
    /// least a thousandth counts, so that a network of which nothing is left has a rate.
    pub fn density_factor(&self, density: f64) -> f64 {
        density.max(1e-3).powf(-self.by_density)
    }

    /// The same with the peak for this batch, if it was meant for another.
    pub(crate) fn for_batch(&self, batch: usize) -> LearningRate {
        let scale = self.scale_from_batch.map_or(1.0, |base| batch as f64 / base as f64);
        LearningRate { peak: self.peak * scale, scale_from_batch: None, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(warmup: usize, schedule: RateDecay) -> LearningRate {
        LearningRate {
            peak: 2.0,
            warmup,
            warmup_from: None,
            scale_from_batch: None,
            by_density: 0.0,
            schedule,
        }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} is not {b}");
    }

    #[test]
    fn the_warm_up_rises_to_the_peak_and_the_schedule_starts_there() {
        for schedule in [
            RateDecay::Constant,
            RateDecay::Linear { end_factor: 0.1, decay_steps: 0 },
            RateDecay::Cosine { end_factor: 0.1, decay_steps: 0 },
            RateDecay::Step { step_every: 0, step_factor: 0.1 },
        ] {
            let rate = rate(4, schedule);
            close(rate.at(0, 100), 0.5);
            close(rate.at(3, 100), 2.0);
            close(rate.at(4, 100), 2.0);
            for step in 4..99 {
                assert!(rate.at(step + 1, 100) <= rate.at(step, 100), "{schedule:?} rises at {step}");
            }
        }
    }

    #[test]
    fn schedules_by_hand() {
        let linear = rate(0, RateDecay::Linear { end_factor: 0.5, decay_steps: 10 });
        close(linear.at(5, 100), 1.5);
        close(linear.at(10, 100), 1.0);
        close(linear.at(99, 100), 1.0);
        let cosine = rate(10, RateDecay::Cosine { end_factor: 0.0, decay_steps: 0 });
        close(cosine.at(10 + 45, 100), 1.0);
        close(cosine.at(10 + 30, 100), 1.5);
        close(cosine.at(100, 100), 0.0);
        let step = rate(0, RateDecay::Step { step_every: 30, step_factor: 0.1 });
        close(step.at(29, 100), 2.0);
        close(step.at(30, 100), 0.2);
        close(step.at(60, 100), 0.02);
        let thirds = rate(10, RateDecay::Step { step_every: 0, step_factor: 0.5 });
        close(thirds.at(39, 100), 2.0);
        close(thirds.at(40, 100), 1.0);
        close(thirds.at(99, 100), 0.5);
    }

    #[test]
    fn the_peak_scales_with_the_batch() {
        let rate = LearningRate { scale_from_batch: Some(256), ..rate(0, RateDecay::Constant) };
        close(rate.for_batch(8192).at(0, 1), 64.0);
        close(rate.for_batch(8192).for_batch(8192).at(0, 1), 64.0);
    }

    /// Goyal et al. 2017: 0.1 for 256 images, ramped from there to 0.1 k for 256 k.
    #[test]
    fn the_warm_up_can_begin_at_the_rate_of_a_small_batch() {
        let goyal = LearningRate {
            peak: 0.1,
            warmup_from: Some(0.1),
            scale_from_batch: Some(256),
            ..rate(5, RateDecay::Constant)
        };
        let rate = goyal.for_batch(8192);
        for (step, expected) in [0.1, 0.72, 1.34, 1.96, 2.58, 3.2, 3.2].into_iter().enumerate() {
            close(rate.at(step, 100), expected);
        }
    }

    /// SMET divides by density; twice the rate at a tenth is a power of 0.3.
    #[test]
    fn the_rate_follows_density() {
        let with = |by_density| LearningRate { by_density, ..rate(0, RateDecay::Constant) };
        close(with(0.0).density_factor(0.1), 1.0);
        close(with(1.0).density_factor(0.1), 10.0);
        close(with(0.5).density_factor(0.25), 2.0);
        close(with(2f64.log10()).density_factor(0.1), 2.0);
        assert_eq!(with(0.3).density_factor(1.0), 1.0);
        assert!(with(1.0).density_factor(0.0).is_finite());
    }

    #[test]
    fn no_run_is_too_short() {
        for total in 0..3 {
            assert!(rate(0, RateDecay::Cosine { end_factor: 0.0, decay_steps: 0 }).at(0, total).is_finite());
            assert!(rate(5, RateDecay::Step { step_every: 0, step_factor: 0.1 }).at(7, total).is_finite());
        }
    }
}

//! Local smoothness along the training of one run, and the other two constants of [`crate::theory`]: the
//! variance of a sample's gradient, and the loss that goes.

use std::sync::Arc;

use espalier_data::{DataSplit, Dataset};
use espalier_nn::weights::Weights;
use espalier_plan::Plan;
use espalier_tensor::Device;
use espalier_train::Result;
use espalier_train::measure::{GradientNoise, LossSamples, LossSurface, gradient_noise_at, smoothness};
use espalier_train::trainer::Trainer;
use serde::{Deserialize, Serialize};

use crate::measure_schedule::MeasureSchedule;
use crate::theory::MeasuredConstants;

/// The most samples that run at a time where there is no batch norm: to the loss it makes no difference, and
/// passes of two samples would take hours.
const MAX_MICRO_BATCH: usize = 250;

/// The fewest micro-batches that say how much gradients vary.
const MIN_MICRO_BATCHES: usize = 8;

/// What a training was like, step by step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SmoothnessTrace {
    /// The mean loss before the first step, where that is none of the points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_loss: Option<f64>,
    /// In the order of steps; there is at least one.
    pub points: Vec<SmoothnessPoint>,
}

/// One step of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SmoothnessPoint {
    /// The step's number, from 1.
    pub step: u64,
    /// L along it.
    pub smoothness: f64,
    /// The mean loss where it began, over the same samples.
    pub loss: f64,
    /// The variance of a sample's gradient there, added up over the kept weights.
    pub variance: f64,
    /// The squared length of the gradient there, without what noise adds to it.
    pub signal: f64,
}

impl SmoothnessTrace {
    /// The mean of some, as far as the shortest goes.
    pub(super) fn mean_of(traces: &[&SmoothnessTrace]) -> SmoothnessTrace {
        let mean = |of: &dyn Fn(&SmoothnessTrace) -> f64| {
            traces.iter().map(|trace| of(trace)).sum::<f64>() / traces.len() as f64
        };
        let point = |i: usize| {
            let mean = |of: fn(&SmoothnessPoint) -> f64| mean(&|trace| of(&trace.points[i]));
            SmoothnessPoint {
                step: traces[0].points[i].step,
                smoothness: mean(|point| point.smoothness),
                loss: mean(|point| point.loss),
                variance: mean(|point| point.variance),
                signal: mean(|point| point.signal),
            }
        };
        let shortest = traces.iter().map(|trace| trace.points.len()).min().unwrap_or(0);
        SmoothnessTrace {
            initial_loss: traces[0].initial_loss.map(|_| mean(&SmoothnessTrace::first_loss)),
            points: (0..shortest).map(point).collect(),
        }
    }

    /// The loss before the first step, or where the first point is.
    fn first_loss(&self) -> f64 {
        self.initial_loss.unwrap_or(self.points[0].loss)
    }

    /// What theory needs of a network of this sparsity.
    pub fn measured(&self, sparsity: f64) -> MeasuredConstants {
        let mean = |of: fn(&SmoothnessPoint) -> f64| {
            self.points.iter().map(of).sum::<f64>() / self.points.len() as f64
        };
        let least = self.points.iter().map(|point| point.loss).fold(f64::INFINITY, f64::min);
        let gap = Some(self.first_loss() - least).filter(|gap| *gap > 0.0);
        MeasuredConstants {
            sparsity,
            mean: mean(|point| point.smoothness),
            variance: Some(mean(|point| point.variance)),
            gap,
            noise_scale: Some(mean(|point| point.variance) / mean(|point| point.signal))
                .filter(|scale| scale.is_finite() && *scale > 0.0),
        }
    }
}

/// Trains for so many steps and measures on the way, up to where the run diverges if it does; nothing where
/// that is at once.
pub fn trace_smoothness(
    plan: Plan,
    dataset: Arc<Dataset>,
    device: &Device,
    schedule: MeasureSchedule,
    steps: u64,
) -> Result<Option<SmoothnessTrace>> {
    // With batch norm other micro-batches would be another loss.
    let has_norms = !plan.model.buffers().is_empty();
    let samples = schedule.samples.unwrap_or(dataset.len(DataSplit::Train));
    let micro_batch = (!has_norms).then(|| (samples / MIN_MICRO_BATCHES).clamp(1, MAX_MICRO_BATCH));
    let over = LossSamples { samples: schedule.samples, micro_batch };
    device.enter(|| {
        let mut trainer = Trainer::new(plan, dataset, device)?;
        trainer.enable_graphed_step();
        let (mut initial_loss, mut points) = (None, Vec::new());
        for step in 1..=steps.min(trainer.steps()) {
            let measures = schedule.measures(step);
            let before = if measures || step == 1 { Some(trainer.params().dense_copy()?) } else { None };
            if !trainer.step()?.taken {
                break;
            }
            let Some(before) = before else { continue };
            let surface = LossSurface::of(&trainer, over)?;
            if !measures {
                // The masks that the first step began with are there by now.
                initial_loss = Some(surface.loss_and_gradient(&surface.masked(&before)?)?.0);
                continue;
            }
            match measure(&surface, step, &before) {
                Ok(Some(point)) => points.push(point),
                Ok(None) | Err(espalier_train::Error::Unmeasurable { .. }) => break,
                Err(other) => return Err(other),
            }
        }
        Ok((!points.is_empty()).then_some(SmoothnessTrace { initial_loss, points }))
    })
}

/// A step that has just been taken, from the weights before it.
fn measure(surface: &LossSurface<'_>, step: u64, before: &Weights) -> Result<Option<SmoothnessPoint>> {
    let Some(found) = smoothness(surface, before)? else { return Ok(None) };
    let GradientNoise { signal, variance } = gradient_noise_at(surface, &surface.masked(before)?)?;
    Ok(Some(SmoothnessPoint { step, smoothness: found.value, loss: found.loss, variance, signal }))
}

#[cfg(test)]
mod tests {
    use espalier_plan::RunFile;

    use super::*;

    const RUN: &str = r#"
        [model]
        name = "mlp"
        hidden = [16]
        [data]
        kind = "shapes"
        count = 300
        size = 16
        [train]
        batch = 16
        steps = 12
        [optimizer]
        name = "momentum"
        [learning_rate]
        peak = 0.01
        schedule = "constant"
    "#;

    fn trace_every(
        every: u64,
        samples: Option<usize>,
        overrides: &[&str],
    ) -> Result<Option<SmoothnessTrace>> {
        trace(MeasureSchedule { from: 1, every, samples }, overrides)
    }

    fn trace(schedule: MeasureSchedule, overrides: &[&str]) -> Result<Option<SmoothnessTrace>> {
        let overrides: Vec<_> = overrides.iter().map(|&text| text.into()).collect();
        let run = RunFile::parse(RUN, &overrides).unwrap();
        let dataset = Dataset::open(&run).unwrap();
        assert_eq!(dataset.len(DataSplit::Train), 270);
        let plan = Plan::new(run, dataset.facts()).unwrap();
        trace_smoothness(plan, dataset.into(), &Device::cpu(2).unwrap(), schedule, 9)
    }

    #[test]
    fn the_first_steps_may_be_passed_over() {
        let schedule = MeasureSchedule { from: 1000, every: 500, samples: None };
        let steps: Vec<u64> = (1..=2001).filter(|step| schedule.measures(*step)).collect();
        assert_eq!(steps, [1000, 1500, 2000]);
    }

    #[test]
    fn a_training_is_measured_every_so_many_steps_and_from_its_first() {
        let found = trace_every(4, None, &[]).unwrap().unwrap();
        assert_eq!(found.points.iter().map(|point| point.step).collect::<Vec<_>>(), [1, 5, 9]);
        assert!(found.points.iter().all(|point| point.smoothness > 0.0 && point.variance > 0.0), "{found:?}");
        // Ten classes, and weights that know nothing yet.
        assert!((found.points[0].loss - 10f64.ln()).abs() < 1.0, "{found:?}");
        let measured = found.measured(0.0);
        assert_eq!(measured.mean, found.points.iter().map(|point| point.smoothness).sum::<f64>() / 3.0);
        let least = found.points.iter().map(|point| point.loss).fold(f64::INFINITY, f64::min);
        assert_eq!(measured.gap, Some(found.points[0].loss - least));
        let fewer = trace_every(4, Some(135), &[]).unwrap().unwrap().measured(0.0);
        assert!((fewer.mean / measured.mean - 1.0).abs() < 0.5, "{fewer:?} and {measured:?}");
    }

    /// The loss falls from where training began, wherever the first measure is. Variance is that of the gradient
    /// of kept weights alone, at what pruning left of the first weights.
    #[test]
    fn a_later_first_measure_has_the_loss_before_the_first_step() {
        let [dense, sparse] = [&[][..], &["prune.method=snip", "prune.sparsity=0.9"]].map(|pruned| {
            let from_first = trace_every(4, None, pruned).unwrap().unwrap();
            let later = MeasureSchedule { from: 5, every: 4, samples: None };
            let later = trace(later, pruned).unwrap().unwrap();
            assert_eq!(later.points, from_first.points[1..]);
            assert_eq!(
                (from_first.initial_loss, later.initial_loss),
                (None, Some(from_first.points[0].loss))
            );
            assert_eq!(later.measured(0.0).gap, from_first.measured(0.0).gap);
            from_first
        });
        assert!(sparse.points[0].variance < dense.points[0].variance, "{sparse:?} and {dense:?}");
        assert_ne!(sparse.points[0].loss, dense.points[0].loss);
    }

    #[test]
    fn the_mean_of_seeds_is_that_of_every_point() {
        let one = trace_every(4, None, &[]).unwrap().unwrap();
        let other = trace_every(4, None, &["seed=1"]).unwrap().unwrap();
        let shorter = SmoothnessTrace { points: other.points[..2].to_vec(), ..other.clone() };
        assert_eq!(SmoothnessTrace::mean_of(&[&one]), one);
        let mean = SmoothnessTrace::mean_of(&[&one, &shorter]);
        assert_eq!(mean.points.iter().map(|point| point.step).collect::<Vec<_>>(), [1, 5]);
        assert_ne!(one.points[1].smoothness, other.points[1].smoothness);
        assert_eq!(mean.points[1].smoothness, (one.points[1].smoothness + other.points[1].smoothness) / 2.0);
    }

    #[test]
    fn a_training_that_diverges_at_once_has_nothing_to_measure() {
        // The first step is finite, and where it leads nothing is.
        assert_eq!(trace_every(4, None, &["learning_rate.peak=1e30"]).unwrap(), None);
    }
}

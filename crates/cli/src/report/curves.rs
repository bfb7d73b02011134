//! What runs did over their steps: one run by itself, or several over each other, each in a colour of its own.

use espalier_report::{Curve, Figure, Guide, Plot, PlotAxis};
use espalier_train::Validation;
use espalier_train::run::metric_record::StepRecord;

use crate::records::RunRecord;

/// From so many points on a curve of single batches is shown with its course: it is too restless to be read
/// by itself.
const NOISY: usize = 60;
/// A point of its course is the mean of one in so many points on each side.
const WINDOW_FRACTION: usize = 50;
/// A loss that falls by more than this is shown on a logarithmic axis.
const LOG_AXIS_RATIO: f64 = 8.0;
/// Prunings of one run that are marked; of more, only the curve of the sparsity shows them.
const MARKED: usize = 4;

/// All curves of the runs.
pub fn figure(runs: &[RunRecord]) -> Figure {
    let title = match runs {
        [run] => run.name.clone(),
        runs => format!("{} runs", runs.len()),
    };
    let plots = [
        loss(runs),
        validation("Validation loss", PlotAxis::linear("mean loss"), runs, |v| v.loss)
            .filter(|_| runs.len() > 1),
        validation("Validation accuracy", PlotAxis::linear("fraction correct"), runs, |v| v.accuracy),
        over_steps("Learning rate", PlotAxis::linear("of the step").including(0.0), runs, |step| {
            Some(step.lr)
        }),
        over_steps("Gradient norm", PlotAxis::log("before clipping"), runs, |step| step.grad_norm),
        over_steps("Throughput", PlotAxis::linear(units(runs)).including(0.0), runs, |step| {
            step.tokens_per_s.or(step.images_per_s)
        }),
        over_steps("Gradient noise scale", PlotAxis::log("samples"), runs, |step| step.noise_scale),
        sparsity(runs),
    ];
    plots.into_iter().flatten().fold(Figure::new(title), Figure::with)
}

/// Of one run training beside validation; of several the training of each.
fn loss(runs: &[RunRecord]) -> Option<Plot> {
    let of = |step: &StepRecord| step.loss;
    let values = runs.iter().flat_map(|run| run.steps.iter().filter_map(of));
    let (low, high) = values.fold((f64::INFINITY, 0f64), |(low, high), v| (low.min(v), high.max(v)));
    let label = "mean over a batch";
    let axis =
        if low > 0.0 && high / low > LOG_AXIS_RATIO { PlotAxis::log(label) } else { PlotAxis::linear(label) };
    let mut plot = over_steps("Loss", axis, runs, of)?.wide();
    if let [run] = runs {
        let points: Vec<(f64, f64)> = evaluated(run, |validation| validation.loss);
        if !points.is_empty() {
            // The last of them is the course, where there is one.
            if let Some(training) = plot.curves.last_mut() {
                training.name = "training".into();
            }
            plot = plot.with(Curve::new("validation", 1, points).with_markers());
        }
        if run.prunings.len() <= MARKED {
            for (step, _) in &run.prunings {
                plot = plot.with(Guide::vertical("pruned", *step as f64));
            }
        }
    }
    Some(plot)
}

fn sparsity(runs: &[RunRecord]) -> Option<Plot> {
    // What is pruned before the first step is one number.
    let changes = |run: &RunRecord| run.steps.windows(2).any(|two| two[0].sparsity != two[1].sparsity);
    let axis = PlotAxis::linear("fraction of prunable weights").including(0.0).including(1.0);
    over_steps("Sparsity", axis, runs, |step| Some(step.sparsity)).filter(|_| runs.iter().any(changes))
}

/// None where no run has such a number.
fn over_steps(
    title: &str,
    y: PlotAxis,
    runs: &[RunRecord],
    of: impl Fn(&StepRecord) -> Option<f64>,
) -> Option<Plot> {
    let mut plot = Plot::new(title, PlotAxis::linear("step"), y);
    for (style, run) in runs.iter().enumerate() {
        // A step without the number is a gap.
        let points = run.steps.iter().map(|step| (step.step as f64, of(step).unwrap_or(f64::NAN)));
        let points: Vec<(f64, f64)> = points.collect();
        let name = if runs.len() > 1 { run.name.as_str() } else { "" };
        if is_noisy(&points) {
            plot = plot.with(Curve::new("", style, points.clone()).faint()).with(Curve::new(
                name,
                style,
                smoothed(&points),
            ));
        } else {
            plot = plot.with(Curve::new(name, style, points));
        }
    }
    (!plot.is_empty()).then_some(plot)
}

fn validation(
    title: &str,
    y: PlotAxis,
    runs: &[RunRecord],
    of: impl Fn(&Validation) -> Option<f64> + Copy,
) -> Option<Plot> {
    let mut plot = Plot::new(title, PlotAxis::linear("step"), y);
    for (style, run) in runs.iter().enumerate() {
        let name = if runs.len() > 1 { run.name.as_str() } else { "" };
        plot = plot.with(Curve::new(name, style, evaluated(run, of)).with_markers());
    }
    (!plot.is_empty()).then_some(plot)
}

fn evaluated(run: &RunRecord, of: impl Fn(&Validation) -> Option<f64>) -> Vec<(f64, f64)> {
    let point = |(step, validation): &(u64, Validation)| Some((*step as f64, of(validation)?));
    run.evaluations.iter().filter_map(point).collect()
}

/// Whether a curve turns at every other point or more: single batches do, a learning rate does not.
fn is_noisy(points: &[(f64, f64)]) -> bool {
    let values: Vec<f64> = points.iter().map(|point| point.1).filter(|value| value.is_finite()).collect();
    let reversals =
        values.windows(3).filter(|three| (three[1] - three[0]) * (three[2] - three[1]) < 0.0).count();
    values.len() >= NOISY && reversals > values.len() / 3
}

/// The mean of the points around each, as many on one side as on the other, so that it does not lag behind;
/// gaps stay gaps.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let finite: Vec<(f64, f64)> = points.iter().copied().filter(|point| point.1.is_finite()).collect();
    let mut prefix_sums = vec![0.0];
    finite.iter().for_each(|point| prefix_sums.push(prefix_sums[prefix_sums.len() - 1] + point.1));
    let reach = (finite.len() / WINDOW_FRACTION).max(1);
    let mut index = 0;
    let smooth = |(x, y): &(f64, f64)| {
        if !y.is_finite() {
            return (*x, *y);
        }
        let around = reach.min(index).min(finite.len() - 1 - index);
        index += 1;
        let sum = prefix_sums[index + around] - prefix_sums[index - 1 - around];
        (*x, sum / (2 * around + 1) as f64)
    };
    points.iter().map(smooth).collect()
}

fn units(runs: &[RunRecord]) -> String {
    let mut units: Vec<&str> = runs.iter().filter_map(|run| Some(run.rate()?.1)).collect();
    units.dedup();
    units.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_is_where_restless_values_go() {
        let noisy: Vec<(f64, f64)> = (0..300)
            .map(|i| (f64::from(i), 10.0 - 0.01 * f64::from(i) + if i % 2 == 0 { 1.0 } else { -1.0 }))
            .collect();
        assert!(is_noisy(&noisy) && !is_noisy(&noisy[..20]));
        let smooth = smoothed(&noisy);
        assert!(smooth[10..290].windows(2).all(|two| (two[1].1 - two[0].1).abs() < 0.4));
        assert!(
            smooth[10..290].iter().all(|(x, y)| (y - (10.0 - 0.01 * x)).abs() < 0.2),
            "it does not lag behind"
        );
        let straight: Vec<(f64, f64)> = (0..300).map(|i| (f64::from(i), f64::from(i))).collect();
        assert!(!is_noisy(&straight));
    }

    #[test]
    fn a_loss_that_is_no_number_is_passed_over() {
        let mut points: Vec<(f64, f64)> = (0..100).map(|i| (f64::from(i), 2.0)).collect();
        points[40].1 = f64::NAN;
        let smooth = smoothed(&points);
        assert!(smooth[40].1.is_nan());
        assert_eq!(smooth[41], (41.0, 2.0));
    }
}

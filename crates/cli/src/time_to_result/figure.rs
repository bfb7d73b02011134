//! Time to a result as a picture: against GPU-hours, against the number of GPUs, and against the batch.

use espalier_plan::time_to_result::{ResultChoice, ResultTimes};
use espalier_report::{Curve, Figure, Guide, Plot, PlotAxis};

use super::text::{devices, pruned};

/// Below so many hours the axis counts seconds.
const FEW_HOURS: f64 = 0.5;

/// A curve for each sparsity.
pub fn figure(result: &ResultTimes) -> Figure {
    let longest = result.by_gpus(None).iter().map(|point| point.hours).fold(0.0, f64::max);
    let (unit, each) = if longest < FEW_HOURS { ("seconds", 3600.0) } else { ("hours", 1.0) };
    let plot = |title: &str, x: PlotAxis, of: &dyn Fn(f64) -> Vec<(f64, ResultChoice)>| {
        let mut plot = Plot::new(title, x, PlotAxis::log(unit));
        for (style, curve) in result.curves.iter().enumerate() {
            let points = of(curve.sparsity);
            let drawn = points.iter().map(|(x, point)| (*x, each * point.hours)).collect();
            let mut curve = Curve::new(pruned(curve.sparsity), style, drawn).with_markers();
            let ends = points.iter().map(|(_, point)| point.hours_interval);
            if let Some(ends) = ends.collect::<Option<Vec<[f64; 2]>>>() {
                curve =
                    curve.with_intervals(ends.iter().map(|[low, high]| (each * low, each * high)).collect());
            }
            plot = plot.with(curve);
        }
        plot
    };
    let best = result.scaling_limit(None).map(|limit| limit.point);
    let mut pareto = plot("Time against GPU-hours", PlotAxis::log("GPU-hours"), &|sparsity| {
        let points = result.pareto(Some(sparsity)).into_iter();
        points.map(|point| (point.gpu_hours, point.clone())).collect()
    });
    if let Some(best) = best {
        let style = result.curves.iter().position(|curve| curve.sparsity == best.sparsity).unwrap_or(0);
        pareto = pareto.with(Curve::best(devices(best.gpus), style, (best.gpu_hours, each * best.hours)));
    }
    let gpus: Vec<usize> = result.by_gpus(None).iter().map(|point| point.gpus).collect();
    let ticks = gpus.iter().map(|number| (*number as f64, number.to_string())).collect();
    let scaling = plot("Time against GPUs", PlotAxis::log("GPUs").with_ticks(ticks), &|sparsity| {
        let points = result.by_gpus(Some(sparsity)).into_iter();
        points.map(|point| (point.gpus as f64, point.clone())).collect()
    });
    let mut figure = Figure::new(format!("Time to result: {} on {}", result.model, result.cluster))
        .with_subtitle("the fastest layout that fits; of each sparsity the choices that none beats in both, ring: the best")
        .with(pareto)
        .with(scaling);
    if let Some(best) = best {
        let title = format!("Time against the batch, {}", devices(best.gpus));
        let mut plot = plot(&title, PlotAxis::log("batch"), &|sparsity| {
            let on_these = |point: &&ResultChoice| point.gpus == best.gpus && point.sparsity == sparsity;
            let mut points: Vec<_> = result.points.iter().filter(on_these).cloned().collect();
            points.sort_by_key(|point| point.batch);
            points.into_iter().map(|point| (point.batch as f64, point)).collect()
        });
        let curve = result.curves.iter().find(|curve| curve.sparsity == best.sparsity);
        if let Some(critical) = curve.and_then(|curve| curve.critical_batch()) {
            plot = plot.with(Guide::vertical("critical", critical));
        }
        figure = figure.with(plot);
    }
    figure
}

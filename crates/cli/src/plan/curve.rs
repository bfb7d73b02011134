//! The picture of a sweep: how a step gets shorter, and what of the devices is used, with more of them.

use anyhow::Result;
use espalier_plan::simulate::Estimate;
use espalier_report::{Curve, Figure, Guide, Plot, PlotAxis};

use super::PlanRequest;
use super::compare::DeviceSweep;
use crate::output::print_err;
use crate::output_file::OutputFile;

/// Draws it into a file: one curve, or one for each form of state that is compared.
pub fn draw(
    request: &PlanRequest,
    best: &[(usize, Estimate)],
    mut compared: Vec<DeviceSweep>,
    output: &OutputFile,
) -> Result<()> {
    let devices: Vec<usize> = best.iter().map(|(number, _)| *number).collect();
    if compared.is_empty() {
        compared.push(DeviceSweep { name: "planned".into(), points: best.to_vec() });
    }
    let plot = |title: &str, y: PlotAxis, of: &dyn Fn(&Estimate) -> f64| {
        let ticks = devices.iter().map(|number| (*number as f64, number.to_string())).collect();
        let mut plot = Plot::new(title, PlotAxis::log("devices").with_ticks(ticks), y);
        for (style, sweep) in compared.iter().enumerate() {
            let points = sweep.points.iter().map(|(number, best)| (*number as f64, of(best))).collect();
            plot = plot.with(Curve::new(&sweep.name, style, points).with_markers());
        }
        plot
    };
    let time = plot("Step time", PlotAxis::log("seconds"), &|estimate| estimate.step_seconds);
    let used =
        plot("Model FLOPs utilization (MFU)", PlotAxis::log("%"), &|estimate| estimate.model_percent_of_peak);
    let figure = Figure::new(format!("{} on {}", request.plan.model.name, request.cluster.name))
        .with_subtitle(format!(
            "batch {}, the fastest layout that fits at each size, engine {}",
            request.plan.batch.samples, request.engine.name
        ))
        .with(time)
        .with(used.with(Guide::horizontal("peak", 100.0)));
    output.finish(&figure.svg())?;
    print_err!("figure: {}", output.file().display());
    Ok(())
}

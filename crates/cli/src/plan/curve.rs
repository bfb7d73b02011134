//! The picture of a sweep: how a step gets shorter, and what of the devices is used, with more of them.

use anyhow::Result;
use espalier_plan::simulate::Estimate;
use espalier_report::{Curve, Figure, Guide, Plot, PlotAxis};

use super::PlanRequest;
use super::compare::DeviceSweep;
use crate::output::print_err;
use crate::output_file::OutputFile;

/// Draws it into a file: a curve for each form of state, or engine, that is compared. That of engines is drawn
/// with recomputed FLOPs, as their papers have it.
pub fn draw(
    request: &PlanRequest,
    devices: &[usize],
    compared: Vec<DeviceSweep>,
    output: &OutputFile,
) -> Result<()> {
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
    let engines: Vec<&str> = request.engines.iter().map(|engine| engine.name).collect();
    let used = match engines.len() {
        1 => plot("Model FLOPs utilization (MFU)", PlotAxis::log("%"), &|estimate| {
            estimate.model_percent_of_peak
        }),
        _ => {
            plot("Hardware FLOPs utilization (HFU)", PlotAxis::log("%"), &|estimate| estimate.percent_of_peak)
        }
    };
    let figure = Figure::new(format!("{} on {}", request.plan.model.name, request.cluster.name))
        .with_subtitle(format!(
            "batch {}, the fastest layout that fits at each size, engine {}",
            request.plan.batch.samples,
            engines.join(", ")
        ))
        .with(time)
        .with(used.with(Guide::horizontal("peak", 100.0)));
    output.finish(&figure.svg())?;
    print_err!("figure: {}", output.file().display());
    Ok(())
}

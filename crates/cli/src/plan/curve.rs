//! The picture of a sweep: how a step gets shorter, and what of the devices is used, with more of them.

use anyhow::Result;
use espalier_plan::simulate::Estimate;
use espalier_report::{Axis, Curve, Figure, Guide, Plot};

use super::Request;
use super::compare::{self, Sweep};
use crate::draft::Draft;
use crate::say::say;

/// Draws it into a file: one curve, or one for each form of state that is compared.
pub fn draw(request: &Request, best: &[(usize, Estimate)], draft: &Draft) -> Result<()> {
    let devices: Vec<usize> = best.iter().map(|(number, _)| *number).collect();
    let compared = match request.arguments.compare.is_empty() {
        true => vec![Sweep { name: "planned".into(), points: best.to_vec() }],
        false => compare::sweeps(request, &devices)?,
    };
    let plot = |title: &str, y: Axis, of: &dyn Fn(&Estimate) -> f64| {
        let marks = devices.iter().map(|number| (*number as f64, number.to_string())).collect();
        let mut plot = Plot::new(title, Axis::log("devices").marked(marks), y);
        for (style, sweep) in compared.iter().enumerate() {
            let points = sweep.points.iter().map(|(number, best)| (*number as f64, of(best))).collect();
            plot = plot.with(Curve::new(&sweep.name, style, points).marked());
        }
        plot
    };
    let time = plot("Step time", Axis::log("seconds"), &|estimate| estimate.step_seconds);
    let used =
        plot("Model FLOPs utilization (MFU)", Axis::log("%"), &|estimate| estimate.model_percent_of_peak);
    let figure = Figure::new(format!("{} on {}", request.plan.model.name, request.cluster.name))
        .under(format!(
            "batch {}, the fastest layout that fits at each size, engine {}",
            request.plan.batch.samples, request.engine.name
        ))
        .with(time)
        .with(used.with(Guide::level("peak", 100.0)));
    draft.finish(&figure.svg())?;
    say!("figure: {}", draft.file().display());
    Ok(())
}

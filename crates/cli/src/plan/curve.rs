//! The picture of a sweep: how a step gets shorter, and what of the devices is used, with more of them.

use std::path::Path;

use anyhow::Result;
use espalier_plan::simulate::Estimate;
use espalier_train::Error;

use super::Request;
use super::compare::{self, Sweep};
use crate::chart::{Curve, Figure, Panel};

/// Draws it into a file: one curve, or one for each form of state that is compared.
pub fn draw(request: &Request, best: &[(usize, Estimate)], file: &Path) -> Result<()> {
    let devices: Vec<usize> = best.iter().map(|(number, _)| *number).collect();
    let compared = match request.arguments.compare.is_empty() {
        true => vec![Sweep { name: "planned".into(), points: best.to_vec() }],
        false => compare::sweeps(request, &devices)?,
    };
    let curves = |of: &dyn Fn(&Estimate) -> f64| -> Vec<Curve> {
        let drawn = compared.iter().enumerate().filter(|(_, sweep)| !sweep.points.is_empty());
        let curve = |(style, sweep): (usize, &Sweep)| Curve {
            name: sweep.name.clone(),
            style,
            points: sweep.points.iter().map(|(number, best)| (*number as f64, of(best))).collect(),
        };
        drawn.map(curve).collect()
    };
    let panel = |title: &str, y_label: &str, curves, level| Panel {
        title: title.into(),
        x_label: "devices".into(),
        x_ticks: devices.iter().map(|number| (*number as f64, number.to_string())).collect(),
        y_label: y_label.into(),
        curves,
        level,
    };
    let model = |estimate: &Estimate| estimate.model_percent_of_peak;
    let figure = Figure {
        title: format!("{} on {}", request.plan.model.name, request.cluster.name),
        subtitle: format!(
            "batch {}, the fastest layout that fits at each size, by {}",
            request.plan.batch.samples, request.engine.name
        ),
        panels: vec![
            panel("Time of a step", "seconds", curves(&|estimate| estimate.step_seconds), None),
            panel("Share of peak, model flops", "per cent", curves(&model), Some((100.0, "peak".into()))),
        ],
    };
    let why =
        |why| Error::File { path: file.to_owned(), why: format!("the picture cannot be written: {why}") };
    std::fs::write(file, figure.svg()).map_err(why)?;
    Ok(())
}

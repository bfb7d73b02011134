//! The picture of a sweep: how a step gets shorter, and what of the devices is used, with more of them.

use std::path::Path;

use anyhow::Result;
use espalier_plan::simulate::Estimate;
use espalier_train::Error;

use super::Request;
use crate::chart::{Curve, Figure, Panel};

/// Draws it into a file.
pub fn draw(request: &Request, best: &[(usize, Estimate)], file: &Path) -> Result<()> {
    let ticks: Vec<(f64, String)> =
        best.iter().map(|(number, _)| (*number as f64, number.to_string())).collect();
    let curve = |name: &str, style, of: &dyn Fn(&(usize, Estimate)) -> f64| Curve {
        name: name.into(),
        style,
        points: best.iter().map(|one| (one.0 as f64, of(one))).collect(),
    };
    let (first, base) = (best[0].0 as f64, best[0].1.step_seconds);
    let panel = |title: &str, y_label: &str, curves| Panel {
        title: title.into(),
        x_label: "devices".into(),
        x_ticks: ticks.clone(),
        y_label: y_label.into(),
        curves,
        level: None,
    };
    let figure = Figure {
        title: format!("{} on {}", request.plan.model.name, request.cluster.name),
        subtitle: format!(
            "batch {}, the fastest layout that fits at each size, by {}",
            request.plan.batch.samples, request.engine.name
        ),
        panels: vec![
            panel(
                "Time of a step",
                "seconds",
                vec![
                    curve("planned", 0, &|one| one.1.step_seconds),
                    curve("ideal", 1, &|one| base * first / one.0 as f64),
                ],
            ),
            panel(
                "Share of peak",
                "per cent",
                vec![
                    curve("with recomputation", 0, &|one| one.1.percent_of_peak),
                    curve("model flops", 2, &|one| one.1.model_percent_of_peak),
                ],
            ),
        ],
    };
    let why =
        |why| Error::File { path: file.to_owned(), why: format!("the picture cannot be written: {why}") };
    std::fs::write(file, figure.svg()).map_err(why)?;
    Ok(())
}

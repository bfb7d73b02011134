//! The page of smoothness along training.

use espalier_report::{Column, Curve, Figure, Page, Plot, PlotAxis, Table, number};

use super::file::SmoothnessStudy;
use super::{SmoothnessPoint, SparsityCurve};
use crate::theory::CoefficientRatios;

/// Smoothness and loss against the step, a curve a sparsity, with the means and what theory makes of them.
pub fn page(study: &SmoothnessStudy, curves: &[SparsityCurve]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    let over = study.schedule.samples.map_or("all".into(), |samples| samples.to_string());
    page.text(format!(
        "Local smoothness of every {}th step from step {} on, gradients over {over} training samples and kept weights only.",
        study.schedule.every, study.schedule.from
    ));
    if curves.len() < study.sparsities.len() {
        page.note(format!("{} of {} sparsities are done.", curves.len(), study.sparsities.len()));
    }
    page.figure(figure(curves));
    page.table(table(curves));
    page
}

/// Smoothness and loss along training, which the page of steps-to-result shows too.
pub fn figure(curves: &[SparsityCurve]) -> Figure {
    let plot = |title: &str, up: PlotAxis, of: fn(&SmoothnessPoint) -> f64| {
        let mut plot = Plot::new(title, PlotAxis::linear("step"), up);
        for (style, curve) in curves.iter().enumerate() {
            let points = curve.trace.points.iter().map(|point| (point.step as f64, of(point)));
            plot = plot.with(Curve::new(number::percent(curve.sparsity), style, points.collect()));
        }
        plot
    };
    Figure::new("Smoothness along training")
        .with(plot("Local smoothness", PlotAxis::log("L"), |point| point.smoothness))
        .with(plot("Training loss", PlotAxis::linear("loss"), |point| point.loss))
}

/// The means of each sparsity.
pub fn table(curves: &[SparsityCurve]) -> Table {
    let columns = [
        "sparsity",
        "mean L",
        "gradient variance",
        "loss decrease",
        "c1 relative to dense, predicted",
        "critical batch by gradient noise scale",
    ];
    let mut table = Table::new(columns.map(Column::number).into());
    let dense = curves.iter().find(|curve| curve.sparsity == 0.0).map(|curve| curve.trace.measured(0.0));
    for curve in curves {
        let measured = curve.trace.measured(curve.sparsity);
        let shown = |value: Option<f64>| value.map_or("-".into(), number::short);
        table.row([
            number::percent(curve.sparsity),
            number::short(measured.mean),
            shown(measured.variance),
            shown(measured.gap),
            shown(dense.as_ref().map(|dense| CoefficientRatios::predicted(&measured, dense).c1)),
            shown(measured.noise_scale),
        ]);
    }
    table
}

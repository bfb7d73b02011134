//! The page of smoothness along training.

use espalier_report::{Axis, Column, Curve, Figure, Page, Plot, Table, number};

use super::file::Smoothness;
use super::{Course, Point};
use crate::theory::Ratios;

/// Smoothness and loss against the step, a curve a sparsity, with the means and what theory makes of them.
pub fn page(study: &Smoothness, courses: &[Course]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    let over = study.look.samples.map_or("all".into(), |samples| samples.to_string());
    page.text(format!(
        "Local smoothness of every {}th step from step {} on, gradients over {over} training samples and kept weights only.",
        study.look.every, study.look.from
    ));
    if courses.len() < study.sparsities.len() {
        page.note(format!("{} of {} sparsities are done.", courses.len(), study.sparsities.len()));
    }
    page.figure(figure(courses));
    page.table(table(courses));
    page
}

/// Smoothness and loss along training, which the page of steps-to-result shows too.
pub fn figure(courses: &[Course]) -> Figure {
    let plot = |title: &str, up: Axis, of: fn(&Point) -> f64| {
        let mut plot = Plot::new(title, Axis::linear("step"), up);
        for (style, course) in courses.iter().enumerate() {
            let points = course.along.points.iter().map(|point| (point.step as f64, of(point)));
            plot = plot.with(Curve::new(number::percent(course.sparsity), style, points.collect()));
        }
        plot
    };
    Figure::new("Smoothness along training")
        .with(plot("Local smoothness", Axis::log("L"), |point| point.smoothness))
        .with(plot("Training loss", Axis::linear("loss"), |point| point.loss))
}

/// The means of each sparsity.
pub fn table(courses: &[Course]) -> Table {
    let columns = [
        "sparsity",
        "mean L",
        "gradient variance",
        "loss decrease",
        "c1 relative to dense, predicted",
        "critical batch by gradient noise scale",
    ];
    let mut table = Table::new(columns.map(Column::number).into());
    let whole = courses.iter().find(|course| course.sparsity == 0.0).map(|course| course.along.measured(0.0));
    for course in courses {
        let measured = course.along.measured(course.sparsity);
        let shown = |value: Option<f64>| value.map_or("-".into(), number::short);
        table.row([
            number::percent(course.sparsity),
            number::short(measured.mean),
            shown(measured.variance),
            shown(measured.gap),
            shown(whole.as_ref().map(|whole| Ratios::predicted(&measured, whole).c1)),
            shown(measured.noise_scale),
        ]);
    }
    table
}

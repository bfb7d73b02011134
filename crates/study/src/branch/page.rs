//! The page of branches.

use espalier_report::{Column, Curve, Figure, Page, Plot, PlotAxis, Table, number};

use super::file::BranchStudy;
use super::train::{Branch, BranchPoint};

/// Losses of branches against their batch, the critical batch along the training, and all numbers.
pub fn page(study: &BranchStudy, branch_points: &[BranchPoint]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    page.text(format!(
        "From points of one training run, branches at multiples of its batch size that see the same number of samples: the \
         critical batch is the largest whose validation loss is at most {} above that of the original batch size. Losses are \
         means over {}.",
        study.tolerance,
        if study.seeds == 1 { "one seed".into() } else { format!("{} seeds, with their standard error", study.seeds) }
    ));
    if branch_points.len() < study.points() {
        page.note(format!("{} of {} points are done.", branch_points.len(), study.points()));
    }
    page.figure(figure(branch_points));
    page.table(table(branch_points));
    page
}

/// The pictures alone.
pub fn figure(branch_points: &[BranchPoint]) -> Figure {
    let mut losses = Plot::new("Branches", PlotAxis::log("batch"), PlotAxis::linear("validation loss"));
    for (style, branch_point) in branch_points.iter().enumerate() {
        let ended = || branch_point.branches.iter().filter_map(|branch| Some((branch, branch.loss?)));
        let points = ended().map(|(branch, loss)| (branch.batch as f64, loss)).collect();
        let around = |(branch, loss): (&Branch, f64)| {
            let off = branch.uncertainty()?;
            Some((loss - off, loss + off))
        };
        let intervals = ended().map(around).collect::<Option<Vec<_>>>().unwrap_or_default();
        let curve = Curve::new(format!("after {} steps", branch_point.step), style, points).with_markers();
        losses = losses.with(curve.with_intervals(intervals));
    }
    let series = |of: &dyn Fn(&BranchPoint) -> Option<f64>| {
        branch_points
            .iter()
            .filter_map(|branch_point| Some((branch_point.step as f64, of(branch_point)?)))
            .collect::<Vec<_>>()
    };
    let critical = Plot::new("Critical batch", PlotAxis::log("step"), PlotAxis::log("samples"))
        .with(
            Curve::new(
                "by branches",
                0,
                series(&|branch_point| branch_point.critical_batch.map(|batch| batch as f64)),
            )
            .with_markers(),
        )
        .with(
            Curve::new("by gradient noise scale", 1, series(&|branch_point| branch_point.noise_scale))
                .with_markers(),
        );
    Figure::new("Critical batch size").with(losses).with(critical)
}

fn table(branch_points: &[BranchPoint]) -> Table {
    let columns =
        ["after step", "batch", "steps", "rate", "validation loss", "+-", "critical batch", "noise scale"];
    let mut table = Table::new(columns.map(Column::number).into());
    for branch_point in branch_points {
        for branch in &branch_point.branches {
            let first = branch.batch == branch_point.branches[0].batch;
            let once = |text: String| if first { text } else { String::new() };
            table.row([
                once(branch_point.step.to_string()),
                branch.batch.to_string(),
                branch.steps.to_string(),
                number::short(branch.lr),
                branch.loss.map_or("diverged".into(), number::short),
                branch.uncertainty().map_or("-".into(), number::short),
                once(branch_point.critical_in_words()),
                once(branch_point.noise_scale.map_or("-".into(), |scale| format!("{scale:.0}"))),
            ]);
        }
    }
    table
}

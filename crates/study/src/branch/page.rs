//! The page of branches.

use espalier_report::{Axis, Column, Curve, Figure, Page, Plot, Table, number};

use super::file::Branching;
use super::train::Fork;

/// Losses of branches against their batch, the critical batch along the training, and all numbers.
pub fn page(study: &Branching, forks: &[Fork]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    page.text(format!(
        "From points of one training, branches of {} samples each at multiples of its batch: the largest batch whose held-out loss is at most {} above that \
         of the training's own is the critical one there.",
        study.samples, study.tolerance
    ));
    let mut losses = Plot::new("Branches", Axis::log("batch"), Axis::linear("validation loss"));
    for (style, fork) in forks.iter().enumerate() {
        let points = fork.branches.iter().filter_map(|branch| Some((branch.batch as f64, branch.loss?)));
        losses =
            losses.with(Curve::new(format!("after {} steps", fork.step), style, points.collect()).marked());
    }
    let along = |of: &dyn Fn(&Fork) -> Option<f64>| {
        forks.iter().filter_map(|fork| Some((fork.step as f64, of(fork)?))).collect::<Vec<_>>()
    };
    let critical = Plot::new("Critical batch", Axis::log("step"), Axis::log("samples"))
        .with(
            Curve::new("by branches", 0, along(&|fork| fork.critical_batch.map(|batch| batch as f64)))
                .marked(),
        )
        .with(Curve::new("by the noise scale", 1, along(&|fork| fork.noise_scale)).marked());
    page.figure(Figure::new("How large a batch pays").with(losses).with(critical));
    page.table(table(forks));
    page
}

fn table(forks: &[Fork]) -> Table {
    let columns =
        ["after step", "batch", "steps", "rate", "validation loss", "critical batch", "noise scale"];
    let mut table = Table::new(columns.map(Column::number).into());
    for fork in forks {
        for branch in &fork.branches {
            let first = branch.batch == fork.branches[0].batch;
            let once = |text: String| if first { text } else { String::new() };
            table.row([
                once(fork.step.to_string()),
                branch.batch.to_string(),
                branch.steps.to_string(),
                number::short(branch.lr),
                branch.loss.map_or("diverged".into(), number::short),
                once(fork.critical_in_words()),
                once(fork.noise_scale.map_or("-".into(), |scale| format!("{scale:.0}"))),
            ]);
        }
    }
    table
}

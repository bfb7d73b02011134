//! The page of branches.

use espalier_report::{Axis, Column, Curve, Figure, Page, Plot, Table, number};

use super::file::Branching;
use super::train::{Branch, Fork};

/// Losses of branches against their batch, the critical batch along the training, and all numbers.
pub fn page(study: &Branching, forks: &[Fork]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    page.text(format!(
        "From points of one training run, branches at multiples of its batch size that see the same number of samples: the \
         critical batch is the largest whose validation loss is at most {} above that of the original batch size. Losses are \
         means over {}.",
        study.tolerance,
        if study.seeds == 1 { "one seed".into() } else { format!("{} seeds, with their standard error", study.seeds) }
    ));
    if forks.len() < study.points() {
        page.note(format!("{} of {} points are done.", forks.len(), study.points()));
    }
    page.figure(figure(forks));
    page.table(table(forks));
    page
}

/// The pictures alone.
pub fn figure(forks: &[Fork]) -> Figure {
    let mut losses = Plot::new("Branches", Axis::log("batch"), Axis::linear("validation loss"));
    for (style, fork) in forks.iter().enumerate() {
        let ended = || fork.branches.iter().filter_map(|branch| Some((branch, branch.loss?)));
        let points = ended().map(|(branch, loss)| (branch.batch as f64, loss)).collect();
        let around = |(branch, loss): (&Branch, f64)| {
            let off = branch.uncertainty()?;
            Some((loss - off, loss + off))
        };
        let intervals = ended().map(around).collect::<Option<Vec<_>>>().unwrap_or_default();
        let curve = Curve::new(format!("after {} steps", fork.step), style, points).marked();
        losses = losses.with(curve.between(intervals));
    }
    let along = |of: &dyn Fn(&Fork) -> Option<f64>| {
        forks.iter().filter_map(|fork| Some((fork.step as f64, of(fork)?))).collect::<Vec<_>>()
    };
    let critical = Plot::new("Critical batch", Axis::log("step"), Axis::log("samples"))
        .with(
            Curve::new("by branches", 0, along(&|fork| fork.critical_batch.map(|batch| batch as f64)))
                .marked(),
        )
        .with(Curve::new("by gradient noise scale", 1, along(&|fork| fork.noise_scale)).marked());
    Figure::new("Critical batch size").with(losses).with(critical)
}

fn table(forks: &[Fork]) -> Table {
    let columns =
        ["after step", "batch", "steps", "rate", "validation loss", "+-", "critical batch", "noise scale"];
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
                branch.uncertainty().map_or("-".into(), number::short),
                once(fork.critical_in_words()),
                once(fork.noise_scale.map_or("-".into(), |scale| format!("{scale:.0}"))),
            ]);
        }
    }
    table
}

//! A study in words and columns.

use espalier_study::summary::CellSummary;
use espalier_study::{Goal, Method, Runner, Shard, Study, Summary, Workers};

use super::progress::short;
use crate::columns::Columns;
use crate::say::{self, answer, say};

/// What is about to run, in three lines.
pub fn describe(study: &Study, workers: &Workers, shard: Shard) -> String {
    let search = &study.search;
    let goal = match study.goal {
        Goal::Error(error) => format!("a validation error of {error}"),
        Goal::Loss(loss) => format!("a validation loss of {loss}"),
    };
    let sparsities = study.sparsities().len();
    let method = match (search.method, search.cut) {
        (Method::Sobol, false) => "each run to its end",
        (Method::Sobol, true) => "each stopped when it cannot be the best",
        (Method::Halving, _) => "by successive halving",
    };
    let cells = format!(
        "  {} cells ({} batch sizes, {sparsities} sparsities), {} trials each over {}, {method}",
        study.cells.len(),
        study.cells.len() / sparsities,
        search.trials,
        search.ranges.iter().map(|range| range.field.as_str()).collect::<Vec<_>>().join(" and "),
    );
    let share = if shard == Shard::WHOLE {
        String::new()
    } else {
        format!("; shard {} of {}", shard.index, shard.of)
    };
    format!(
        "study {}: steps to {goal}, {} training samples\n{cells}\n  at most {} steps per trial, evaluated every {}; {}{share}",
        study.name,
        workers.training_samples(),
        search.steps,
        search.eval_every,
        workers.describe()
    )
}

/// Says what was found.
pub fn summarise(summary: &Summary) {
    let head = ["batch", "sparsity", "K*", "complete", "incom.", "infea.", "cut", "stop.", "steps", "best"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for cell in &summary.cells {
        let CellSummary { batch, sparsity, complete, incomplete, infeasible, cut, stopped, steps, .. } = cell;
        let k_star = cell.k_star.map_or("-".into(), |steps| steps.to_string());
        let mut row = vec![batch.to_string(), sparsity.to_string(), k_star];
        row.extend([complete, incomplete, infeasible, cut, stopped].map(ToString::to_string));
        row.extend([steps.to_string(), best(cell)]);
        rows.push(row);
    }
    say::on_standard_output(format_args!("{}", Columns::new(&rows).with_text().within(say::width())));
    for fit in &summary.fits {
        let curve = fit.fit.curve;
        let critical = fit.fit.critical_batch.map_or("none".into(), |batch| format!("{batch:.0}"));
        let [low, high] = fit.fit.c1_interval;
        let [least, most] = fit.fit.c2_interval;
        answer!(
            "sparsity {}: K* = {:.0}/B + {:.0} (c1 {low:.0} to {high:.0}, c2 {least:.0} to {most:.0}), critical batch {critical}{}",
            fit.sparsity,
            curve.c1,
            curve.c2,
            curve.r2.map_or(String::new(), |r2| format!(", r2 {r2:.3}"))
        );
    }
    for ratio in &summary.ratios {
        let predicted = ratio
            .predicted
            .map_or(String::new(), |predicted| format!(", {predicted:.2} predicted by theory"));
        answer!(
            "sparsity {}, batch {}: {:.2} times the steps of the dense network{predicted}",
            ratio.sparsity,
            ratio.batch,
            ratio.measured
        );
    }
    for cell in summary.cells.iter().filter(|cell| cell.k_star.is_none() && cell.running == 0) {
        say!(
            "note: batch {}, sparsity {}: none of {} trials reached the goal",
            cell.batch,
            cell.sparsity,
            cell.finished()
        );
    }
    answer!("{} of {} trials, {} steps", summary.finished, summary.trials, summary.steps);
    if let Some(report) = &summary.report {
        answer!("page: {}", report.display());
    }
}

/// The best metaparameters of a cell, and which of them lie at the edge of their range.
fn best(cell: &CellSummary) -> String {
    let fields = cell.best.iter().filter(|(field, _)| *field != "lr");
    let one = |(field, value): (&String, &f64)| {
        let word = field.rsplit('.').next().unwrap_or(field);
        let edge = if cell.at_edge.contains(field) { " (at the edge)" } else { "" };
        format!("{word} {}{edge}", short(*value))
    };
    fields.map(one).collect::<Vec<_>>().join(", ")
}

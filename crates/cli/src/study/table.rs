//! A study in words and columns.

use std::collections::BTreeMap;

use espalier_study::summary::CellSummary;
use espalier_study::{Goal, SearchMethod, Study, StudySummary, TrialRunner, TrialShard, WorkerPool};

use super::progress::short;
use crate::output::{self, print_err, print_out};
use crate::text_table::TextTable;

/// What is about to run, in three lines.
pub fn describe(study: &Study, workers: &WorkerPool, shard: TrialShard) -> String {
    let search = &study.search;
    let goal = match study.goal {
        Goal::Error(error) => format!("a validation error of {error}"),
        Goal::Loss(loss) => format!("a validation loss of {loss}"),
    };
    let sparsities = study.sparsities().len();
    let method = match (search.method, search.cut) {
        (SearchMethod::Sobol, false) => "each run to its end",
        (SearchMethod::Sobol, true) => "each stopped when it cannot be the best",
        (SearchMethod::Halving, _) => "by successive halving",
    };
    let cells = format!(
        "  {} cells ({} batch sizes, {sparsities} sparsities), {} trials each over {}, {method}",
        study.cells.len(),
        study.cells.len() / sparsities,
        search.trials,
        search.ranges.iter().map(|range| range.field.as_str()).collect::<Vec<_>>().join(" and "),
    );
    let shard_note = if shard == TrialShard::ALL {
        String::new()
    } else {
        format!("; shard {} of {}", shard.index, shard.of)
    };
    format!(
        "study {}: steps to {goal}, {} training samples\n{cells}\n  at most {} steps per trial, evaluated every {}; {}{shard_note}",
        study.name,
        workers.training_samples(),
        search.steps,
        search.eval_every,
        workers.describe()
    )
}

/// Says what was found.
pub fn summarise(summary: &StudySummary) {
    let has_seeds = summary.cells.iter().any(|cell| !cell.seeds.is_empty());
    let seeds = has_seeds.then_some("other seeds");
    let head = ["batch", "sparsity", "K*"].into_iter().chain(seeds);
    let head = head.chain(["complete", "incom.", "infea.", "cut", "stop.", "steps", "best"]);
    let mut rows = vec![head.map(String::from).collect::<Vec<_>>()];
    for cell in &summary.cells {
        let CellSummary { batch, sparsity, complete, incomplete, infeasible, cut, stopped, steps, .. } = cell;
        let k_star = cell.k_star.map_or("-".into(), |steps| steps.to_string());
        let mut row = vec![batch.to_string(), sparsity.to_string(), k_star];
        row.extend(has_seeds.then(|| cell.seeds_in_words()));
        row.extend([complete, incomplete, infeasible, cut, stopped].map(ToString::to_string));
        row.extend([steps.to_string(), fields(&cell.best, &cell.at_edge)]);
        rows.push(row);
    }
    output::on_standard_output(TextTable::new(&rows).with_text_column().render(output::width()));
    for cell in summary.cells.iter().filter(|cell| cell.has_steadier()) {
        print_out!(
            "sparsity {}, batch {}: with other seeds fewer steps than the best trial's take {}",
            cell.sparsity,
            cell.batch,
            fields(&cell.steadiest, &[])
        );
    }
    for fit in &summary.fits {
        let curve = fit.fit.curve;
        let critical = fit.fit.critical_batch.map_or("none".into(), |batch| format!("{batch:.0}"));
        let seeds = fit.fit.c1_interval.zip(fit.fit.c2_interval);
        let seeds = seeds.map_or(String::new(), |([low, high], [least, most])| {
            format!(" (with other seeds c1 {low:.0} to {high:.0}, c2 {least:.0} to {most:.0})")
        });
        print_out!(
            "sparsity {}: K* = {:.0}/B + {:.0}{seeds}, critical batch {critical}{}",
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
        print_out!(
            "sparsity {}, batch {}: {:.2} times the steps of the dense network{predicted}",
            ratio.sparsity,
            ratio.batch,
            ratio.measured
        );
    }
    for cell in summary.cells.iter().filter(|cell| cell.k_star.is_none() && cell.running == 0) {
        print_err!(
            "note: batch {}, sparsity {}: none of {} trials reached the goal",
            cell.batch,
            cell.sparsity,
            cell.finished()
        );
    }
    print_out!("{} of {} trials, {} steps", summary.finished, summary.trials, summary.steps);
    if let Some(report) = &summary.report {
        print_out!("page: {}", report.display());
    }
}

/// Hyperparameters, and which of them lie at the edge of their range.
fn fields(fields: &BTreeMap<String, f64>, at_edge: &[String]) -> String {
    let fields = fields.iter().filter(|(field, _)| *field != "lr");
    let one = |(field, value): (&String, &f64)| {
        let word = field.rsplit('.').next().unwrap_or(field);
        let edge = if at_edge.contains(field) { " (at the edge)" } else { "" };
        format!("{word} {}{edge}", short(*value))
    };
    fields.map(one).collect::<Vec<_>>().join(", ")
}

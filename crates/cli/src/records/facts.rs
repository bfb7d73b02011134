//! The few numbers that say most of a run, for people.

use espalier_report::number;
use espalier_train::Predicted;

use super::RunRecord;
use crate::progress::bytes;

/// Of one run, as far as they are known.
pub fn of(run: &RunRecord) -> Vec<(&'static str, String)> {
    let validation = run.validation().cloned().unwrap_or_default();
    let summary = run.summary.as_ref();
    let step_ms = summary.and_then(|summary| summary.step_ms).map(|ms| number::seconds(ms / 1e3));
    let predicted = summary.and_then(|summary| summary.predicted.as_ref());
    let predicted = predicted.map(|Predicted { step_ms, .. }| number::seconds(step_ms / 1e3));
    let pruned = run.sparsity();
    let all = [
        ("steps", Some(run.progress())),
        ("loss", run.loss().map(number::short)),
        ("validation loss", validation.loss.map(number::short)),
        ("perplexity", validation.perplexity.map(number::short)),
        ("accuracy", validation.accuracy.map(number::percent)),
        ("sparsity", (pruned > 0.0).then(|| number::percent(pruned))),
        ("throughput", run.rate().map(|(rate, of)| format!("{} {of}", number::short(rate)))),
        ("time of a step", step_ms),
        ("predicted", predicted),
        ("peak memory", summary.and_then(|summary| summary.peak_bytes).map(bytes)),
        ("took", summary.and_then(|summary| summary.seconds).map(number::seconds)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Of several: the names of all that one of them has, and for each run what it has of these.
pub fn together(runs: &[RunRecord]) -> (Vec<&'static str>, Vec<Vec<Option<String>>>) {
    let of_runs: Vec<Vec<(&str, String)>> = runs.iter().map(of).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in of_runs.iter().flatten() {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let value = |facts: &Vec<(&str, String)>, name: &str| {
        facts.iter().find(|fact| fact.0 == name).map(|fact| fact.1.clone())
    };
    let values = of_runs.iter().map(|facts| names.iter().map(|name| value(facts, name)).collect()).collect();
    (names, values)
}

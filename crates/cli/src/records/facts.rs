//! The few numbers that say most of a run, for people.

use espalier_report::number;
use espalier_train::PredictedStep;

use super::RunRecord;
use crate::progress::bytes;

/// How many there are.
const COUNT: usize = 12;

/// Of one run, as far as they are known.
pub fn of(run: &RunRecord) -> Vec<(&'static str, String)> {
    all(run).into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Of several: the names of all that one of them has, and for each run what it has of these.
pub fn together(runs: &[RunRecord]) -> (Vec<&'static str>, Vec<Vec<Option<String>>>) {
    let of_runs: Vec<_> = runs.iter().map(all).collect();
    let known: Vec<usize> =
        (0..COUNT).filter(|i| of_runs.iter().any(|facts| facts[*i].1.is_some())).collect();
    let names = of_runs.first().map(|facts| known.iter().map(|i| facts[*i].0).collect()).unwrap_or_default();
    let values = of_runs.iter().map(|facts| known.iter().map(|i| facts[*i].1.clone()).collect()).collect();
    (names, values)
}

/// All that there are, in the order in which they are read.
fn all(run: &RunRecord) -> [(&'static str, Option<String>); COUNT] {
    let validation = run.validation().cloned().unwrap_or_default();
    let summary = run.summary.as_ref();
    let step_ms = summary.and_then(|summary| summary.step_ms).map(|ms| number::seconds(ms / 1e3));
    let predicted = summary.and_then(|summary| summary.predicted.as_ref());
    let predicted = predicted.map(|PredictedStep { step_ms, .. }| number::seconds(step_ms / 1e3));
    let pruned = run.sparsity();
    [
        ("steps", Some(run.progress())),
        ("loss", run.loss().map(number::short)),
        ("validation loss", validation.loss.map(number::short)),
        ("perplexity", validation.perplexity.map(number::short)),
        ("accuracy", validation.accuracy.map(number::percent)),
        ("sparsity", (pruned > 0.0).then(|| number::percent(pruned))),
        ("throughput", run.rate().map(|(rate, of)| format!("{} {of}", number::short(rate)))),
        ("step time", step_ms),
        ("predicted step time", predicted),
        ("peak memory", summary.and_then(|summary| summary.peak_bytes).map(bytes)),
        ("time left", run.seconds_left().map(number::seconds)),
        ("total time", summary.and_then(|summary| summary.seconds).map(number::seconds)),
    ]
}

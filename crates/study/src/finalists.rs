//! The first trials of a cell run again with other seeds. The trial of K* is the luckiest of many, often one
//! that another seed would not bring to the goal, or only after three times the steps; whoever trains such a
//! network wants the hyperparameters that take the fewest steps for a success, failures included.

use crate::file::{Cell, Study};
use crate::results::Results;
use crate::trial::{TrialRecord, TrialStatus, repeat_number};

/// A trial, and its steps with other seeds; none where one did not reach the goal.
pub struct Finalist<'a> {
    pub record: &'a TrialRecord,
    pub seeds: Vec<Option<u64>>,
}

/// The trials of a cell to run again: the best one, and behind it those that reached the goal after more steps,
/// then those that were left nearest to it. Nothing where none reached it.
pub fn of_cell<'a>(study: &Study, results: &'a Results, cell: Cell) -> Vec<&'a TrialRecord> {
    let mut records = results.of_cell(cell);
    records.retain(|record| record.status.is_final() && record.status != TrialStatus::Infeasible);
    // Which of two that reached the goal came further below it is chance.
    let place = |record: &TrialRecord| match record.result() {
        Some(steps) => (steps, 0.0),
        None => (u64::MAX, record.best.unwrap_or(f64::INFINITY)),
    };
    records.sort_by(|a, b| {
        let ((steps, measure), (other_steps, other_measure)) = (place(a), place(b));
        steps.cmp(&other_steps).then(measure.total_cmp(&other_measure)).then(a.trial.cmp(&b.trial))
    });
    if records.first().is_none_or(|first| first.result().is_none()) {
        return Vec::new();
    }
    records.truncate(study.search.finalists as usize);
    records
}

/// Of those that were run with the most seeds by now, the one that takes the fewest steps for each seed that
/// reached the goal, with the steps of those that did not.
pub fn steadiest<'a>(study: &Study, results: &'a Results, cell: Cell) -> Option<Finalist<'a>> {
    let with_cost = |record: &'a TrialRecord| {
        let repeats = (1..=study.search.seeds).map(|n| results.trial(cell, repeat_number(record.trial, n)));
        let ended: Vec<_> = repeats.flatten().filter(|repeat| repeat.status.is_final()).collect();
        let seeds: Vec<_> = ended.iter().map(|repeat| repeat.result()).collect();
        let steps: u64 = ended.iter().map(|repeat| repeat.steps).sum();
        // Infinite where none reached it.
        let cost = steps as f64 / seeds.iter().flatten().count() as f64;
        (Finalist { record, seeds }, cost)
    };
    let finalists: Vec<_> = of_cell(study, results, cell).into_iter().map(with_cost).collect();
    let most = finalists.iter().map(|(finalist, _)| finalist.seeds.len()).max().filter(|most| *most > 0)?;
    let complete = finalists.into_iter().filter(|(finalist, _)| finalist.seeds.len() == most);
    complete.min_by(|(_, cost), (_, other)| cost.total_cmp(other)).map(|(finalist, _)| finalist)
}

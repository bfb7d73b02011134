//! Ranges that were too narrow. Where the best trial of a cell lies in the outer tenth of a range, the K*
//! that was found is only that of the range: `--widen` moves the end outwards by a quarter and searches there,
//! again and again until the best trial lies inside.
//!
//! Which range a trial's values come from follows from its number and from what was written down, so that a
//! study that goes on gives the same trials.

use crate::file::{Cell, Study};
use crate::range::{RangeEnd, SearchRange};
use crate::results::{Results, WidenedRange};
use crate::trial::{TrialRecord, repeated_trial};
use crate::workload::TrialSettings;

/// Numbers of trials beyond a range begin here, so that the study can be given more trials within its ranges
/// later.
const BEYOND: u32 = 1 << 20;

/// A range of a cell grows at most so many times.
const MAX_WIDENINGS: usize = 4;

impl WidenedRange {
    /// The numbers of the trials there.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + use<> {
        self.first..self.first + self.trials
    }

    fn end(&self) -> RangeEnd {
        if self.upwards { RangeEnd::High } else { RangeEnd::Low }
    }
}

/// The ranges of a cell as they are now.
pub fn ranges(study: &Study, results: &Results, cell: Cell) -> Vec<SearchRange> {
    grown(study, results.widened(cell).into_iter())
}

fn grown<'a>(study: &Study, widened: impl Iterator<Item = &'a WidenedRange>) -> Vec<SearchRange> {
    let mut ranges = study.search.ranges.clone();
    for widened in widened {
        let range = ranges.iter_mut().find(|range| range.field == widened.field);
        if let Some(range) = range {
            *range = range.widened(widened.end()).0;
        }
    }
    ranges
}

/// The range of a field once it has grown by this.
pub fn range(study: &Study, results: &Results, widened: &WidenedRange) -> SearchRange {
    let before = ranges(study, results, widened.cell());
    let range = before.into_iter().find(|range| range.field == widened.field);
    range.expect("a field that is searched").widened(widened.end()).0
}

/// What a trial of a cell is started with.
pub fn settings(study: &Study, results: &Results, cell: Cell, trial: u32) -> TrialSettings {
    if let Some(repeated) = repeated_trial(trial) {
        return TrialSettings { seed: trial.into(), ..settings(study, results, cell, repeated) };
    }
    let widened = results.widened(cell);
    let Some(index) = widened.iter().position(|widened| widened.numbers().any(|number| number == trial))
    else {
        return study.settings(cell, trial, &study.search.ranges);
    };
    let mut ranges = grown(study, widened[..index].iter().copied());
    for range in ranges.iter_mut().filter(|range| range.field == widened[index].field) {
        *range = range.widened(widened[index].end()).1;
    }
    TrialSettings { seed: trial.into(), ..study.settings(cell, trial - widened[index].first + 1, &ranges) }
}

/// The best trial of a cell: the fewest steps to the goal, and of these the smallest number.
pub fn best<'a>(records: impl IntoIterator<Item = &'a TrialRecord>) -> Option<&'a TrialRecord> {
    let complete = records.into_iter().filter_map(|record| record.result().map(|steps| (steps, record)));
    complete.min_by_key(|(steps, record)| (*steps, record.trial)).map(|(_, record)| record)
}

/// The ranges at whose ends the best trial of a cell lies.
pub fn at_edge(study: &Study, results: &Results, cell: Cell) -> Vec<(SearchRange, RangeEnd)> {
    let Some(best) = best(results.of_cell(cell)) else { return Vec::new() };
    let edge = |range: SearchRange| {
        let (_, value) = best.fields.iter().find(|(field, _)| *field == range.field)?;
        range.edge(*value).map(|end| (range, end))
    };
    ranges(study, results, cell).into_iter().filter_map(edge).collect()
}

/// How the ranges of a cell are to grow next.
pub fn next(study: &Study, results: &Results, cell: Cell) -> Vec<WidenedRange> {
    let known = results.widened(cell);
    let allowed = |(range, end): &(SearchRange, RangeEnd)| {
        let times = known.iter().filter(|widened| widened.field == range.field).count();
        let (wide, _) = range.widened(*end);
        let corner = wide.at(if *end == RangeEnd::High { 1.0 } else { 0.0 });
        let mut at = study.settings(cell, 1, &study.search.ranges);
        for (_, value) in at.fields.iter_mut().filter(|(field, _)| *field == range.field) {
            *value = corner;
        }
        times < MAX_WIDENINGS && study.run_file(&at).is_ok()
    };
    let edges = at_edge(study, results, cell).into_iter().filter(allowed).enumerate();
    edges
        .map(|(index, (range, end))| WidenedRange {
            batch: cell.batch,
            sparsity: cell.sparsity,
            field: range.field,
            upwards: end == RangeEnd::High,
            first: BEYOND * (known.len() + index + 1) as u32,
            trials: study.search.trials.div_ceil(2).min(BEYOND),
        })
        .collect()
}

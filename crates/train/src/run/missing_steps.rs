//! Steps that have no line in `metrics.jsonl` and should have one: a curve with a hole in it looks like one
//! without.

use std::fmt;
use std::ops::RangeInclusive;

/// Steps in a row without a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingSteps(RangeInclusive<u64>);

impl fmt::Display for MissingSteps {
    /// `step 7`, `steps 4 to 5`
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.start(), self.0.end());
        if first == last { write!(out, "step {first}") } else { write!(out, "steps {first} to {last}") }
    }
}

/// Where lines are missing of a run that began behind `began` steps, has `done` so many by now, and writes a
/// line at least for each `every` of them (`train.log_every`).
///
/// How often lines are written may change in the course of a run. So it is no hole where lines are as far
/// apart as those beside them: only what is further apart than its neighbours, and than `every`, is one.
pub fn missing_steps(steps: &[u64], began: u64, done: u64, every: u64) -> Vec<MissingSteps> {
    let every = every.max(1);
    let last = steps.last().copied().unwrap_or(began);
    // The last line that is due by now, unless it is there.
    let due = Some(done / every * every).filter(|due| *due > last);
    let steps: Vec<u64> = [began].into_iter().chain(steps.iter().copied()).collect();
    let apart: Vec<u64> = steps.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    let is_hole = |i: usize| {
        let beside = [i.checked_sub(1), Some(i + 1)].into_iter().flatten().filter_map(|i| apart.get(i));
        apart[i] > every && beside.copied().all(|other| apart[i] > other)
    };
    let holes =
        (0..apart.len()).filter(|i| is_hole(*i)).map(|i| MissingSteps(steps[i] + 1..=steps[i + 1] - 1));
    holes.chain(due.map(|due| MissingSteps(last + 1..=due))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(steps: &[u64], done: u64, every: u64) -> Vec<String> {
        missing_steps(steps, 0, done, every).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn holes_are_found_and_another_interval_is_none() {
        assert_eq!(found(&[], 0, 10), [""; 0]);
        assert_eq!(found(&[10, 20, 25], 25, 10), [""; 0], "the last step has a line of its own");
        assert_eq!(found(&[10, 20, 25, 30, 40], 47, 10), [""; 0]);
        assert_eq!(found(&[10, 40, 50], 50, 10), ["steps 11 to 39"]);
        assert_eq!(found(&[30, 40, 50], 50, 10), ["steps 1 to 29"]);
        assert_eq!(found(&[10, 20], 50, 10), ["steps 21 to 50"]);
        assert_eq!(found(&[1, 2, 4], 5, 1), ["step 3", "step 5"]);
        assert_eq!(missing_steps(&[310, 320], 300, 320, 10), []);
        assert_eq!(missing_steps(&[], 300, 300, 10), []);
        // Every 10th, then each.
        assert_eq!(found(&[10, 20, 30, 31, 32], 32, 1), [""; 0]);
        // Each, then every 10th.
        assert_eq!(found(&[1, 2, 3, 10, 20], 20, 10), [""; 0]);
        // Skipped ones have lines beside the interval.
        assert_eq!(found(&[10, 11, 19, 20], 20, 10), [""; 0]);
    }
}

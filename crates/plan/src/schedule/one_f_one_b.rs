//! 1F1B with a flush (PipeDream-Flush, DAPPLE): after a few forwards to fill the pipeline, one forward and
//! one backward in turn, so that stage s keeps p - s micro-batches in flight instead of all of them.
//!
//! Bubble as GPipe's: (p - 1) / (m + p - 1) of the time.

use super::action::PassTask;
use super::{Pass, Placement, Schedule, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Schedule {
    let &ScheduleOptions { stages, micro_batches, .. } = options;
    let order = (0..stages).map(|stage| in_turn(stages - 1 - stage, micro_batches)).collect();
    Schedule::flushed(
        ScheduleName::OneFOneB,
        options,
        Placement::round_robin(stages, 1, micro_batches),
        order,
    )
}

/// `ahead` forwards (or as many as there are), then a forward and a backward in turn, then the backwards that
/// are left.
pub(super) fn in_turn(ahead: usize, micro_batches: usize) -> Vec<PassTask> {
    as_early_as(micro_batches, |k| k.saturating_sub(ahead))
}

/// Every forward as early as it may be: the k-th once `backwards(k)` backwards are done, which may not be
/// more than k.
pub(super) fn as_early_as(micro_batches: usize, backwards: impl Fn(usize) -> usize) -> Vec<PassTask> {
    let backward = |k| PassTask::new(Pass::Backward, k, 0);
    let mut order = Vec::with_capacity(2 * micro_batches);
    let mut done = 0;
    for k in 0..micro_batches {
        let needed = backwards(k);
        order.extend((done..needed).map(backward));
        order.push(PassTask::new(Pass::Forward, k, 0));
        done = done.max(needed);
    }
    order.extend((done..micro_batches).map(backward));
    order
}

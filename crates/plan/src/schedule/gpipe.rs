//! GPipe (Huang et al., 2019): all forwards of a batch, then all its backwards, then a flush.
//!
//! Bubble (p - 1) / (m + p - 1) of the time, all m micro-batches in flight. The paper runs the backwards in
//! reverse; here they run in the order of the forwards, which costs the same, and adds gradients up in the
//! order in which one device and every other schedule add them.

use super::action::PassTask;
use super::{Pass, Placement, Schedule, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Schedule {
    let &ScheduleOptions { stages, micro_batches, .. } = options;
    let all = |pass| (0..micro_batches).map(move |k| PassTask::new(pass, k, 0));
    let order = vec![all(Pass::Forward).chain(all(Pass::Backward)).collect(); stages];
    Schedule::flushed(ScheduleName::Gpipe, options, Placement::round_robin(stages, 1, micro_batches), order)
}

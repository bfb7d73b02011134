//! ZB-H1 (Qi et al., 2024, "Zero Bubble Pipeline Parallelism"): the order of 1F1B with the backward split in
//! two. The input half B goes up the pipeline at once; the weight half W waits, and fills what was the drain.
//!
//! Stage s runs the W of a micro-batch s backwards later than its B. The bubble shrinks from
//! (p - 1) (F + B + W) to (p - 1) (F + B - W); s micro-batches that wait for their W are held beside the p - s in
//! flight, so no stage holds more than the first one of 1F1B does.

use super::action::PassTask;
use super::one_f_one_b::in_turn;
use super::{Pass, Placement, Schedule, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Schedule {
    let &ScheduleOptions { stages, micro_batches, .. } = options;
    let order = (0..stages).map(|stage| order(stages, stage, micro_batches)).collect();
    Schedule::flushed(ScheduleName::ZbH1, options, Placement::round_robin(stages, 1, micro_batches), order)
}

fn order(stages: usize, stage: usize, micro_batches: usize) -> Vec<PassTask> {
    let weight = |k| PassTask::new(Pass::BackwardWeight, k, 0);
    let mut order = Vec::new();
    for task in in_turn(stages - 1 - stage, micro_batches) {
        match task.pass {
            Pass::Backward => {
                let k = task.micro_batch;
                order.push(PassTask::new(Pass::BackwardInput, k, 0));
                order.extend(k.checked_sub(stage).map(weight));
            }
            _ => order.push(task),
        }
    }
    order.extend((micro_batches.saturating_sub(stage)..micro_batches).map(weight));
    order
}

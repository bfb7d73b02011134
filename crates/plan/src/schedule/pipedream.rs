//! PipeDream (Narayanan et al., 2019): 1F1B that never flushes, with a step after every micro-batch. A
//! backward uses the weights that its forward used, so stage s keeps p - s versions.
//!
//! Once the pipeline is full there is no bubble. With stages counted from 0 and micro-batches from 0, stage s runs
//! micro-batch k on version max(0, k + 1 - (p - s)), and the step after it makes version k + 1.

use super::one_f_one_b::in_turn;
use super::{Action, Pass, Schedule, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Schedule {
    let &ScheduleOptions { stages, .. } = options;
    let micro_batches = options.micro_batches * options.batches;
    let lists = (0..stages).map(|stage| list(stages - stage, micro_batches)).collect();
    Schedule::streamed(ScheduleName::PipeDream, options, lists)
}

/// The list of a stage that keeps `in_flight` micro-batches.
fn list(in_flight: usize, micro_batches: usize) -> Vec<Action> {
    let version = |k: usize| (k + 1).saturating_sub(in_flight);
    // The last micro-batch that uses a version; with one in flight, none outlives its step.
    let last_use = |version: usize| (version + in_flight - 1).min(micro_batches - 1);
    let mut list = Vec::new();
    for task in in_turn(in_flight - 1, micro_batches) {
        let k = task.micro_batch;
        list.push(task.at(0, version(k)));
        if task.pass == Pass::Backward {
            // Version k is the newest now. Those below it were stashed where a micro-batch was left to use them.
            if version(k) < k && last_use(version(k)) == k {
                list.push(Action::Drop { version: version(k) });
            }
            list.push(Action::AllReduce { chunk: 0 });
            let used = version(last_use(k)) == k;
            if used && last_use(k) > k {
                list.push(Action::Stash { version: k });
            }
            list.push(Action::Step);
        }
    }
    list
}

//! PipeDream-2BW (Narayanan et al., 2021): 1F1B that never flushes, with a step after every m micro-batches
//! and two versions of the weights: W(t+1) = W(t) - lr grad f(W(t-1)).
//!
//! Batch t runs on version max(t - 1, 0), made by the step after batch t - 2. With m >= p that step is over
//! before batch t begins, and there is no bubble once the pipeline is full. With fewer, batch t waits for it,
//! so that the two versions still suffice; no more than 2m micro-batches are in flight then.

use super::one_f_one_b::as_early_as;
use super::{Action, Pass, Schedule, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Schedule {
    let &ScheduleOptions { stages, micro_batches, batches, .. } = options;
    let lists = (0..stages).map(|stage| list(stages - 1 - stage, micro_batches, batches)).collect();
    Schedule::streamed(ScheduleName::TwoBw, options, lists)
}

fn list(ahead: usize, micro_batches: usize, batches: usize) -> Vec<Action> {
    let backwards = |k: usize| {
        let batches_over = (k / micro_batches).saturating_sub(1);
        k.saturating_sub(ahead).max(batches_over * micro_batches)
    };
    let mut list = Vec::new();
    for task in as_early_as(micro_batches * batches, backwards) {
        let batch = task.micro_batch / micro_batches;
        list.push(task.at(0, batch.saturating_sub(1)));
        if task.pass == Pass::Backward && (task.micro_batch + 1).is_multiple_of(micro_batches) {
            // The step makes version batch + 1 from the newest, which the next batch uses; nobody needs the
            // one before.
            if batch > 0 {
                list.push(Action::Drop { version: batch - 1 });
            }
            list.extend([Action::AllReduce { chunk: 0 }, Action::Stash { version: batch }, Action::Step]);
        }
    }
    list
}

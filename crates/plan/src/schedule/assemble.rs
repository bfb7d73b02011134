//! From every rank's passes to a schedule: all-reduces, steps, messages and what steps imply are added once
//! for all of them.

use super::action::PassTask;
use super::{Action, Placement, Schedule, ScheduleName, ScheduleOptions, agreement, messages};

impl Schedule {
    /// The same for ranks that shard the optimizer's state: each gathers after a step what the others have
    /// stepped.
    pub(crate) fn gathering(mut self) -> Schedule {
        for list in &mut self.ranks {
            let with = |action: Action| [Some(action), (action == Action::Step).then_some(Action::Gather)];
            *list = list.drain(..).flat_map(with).flatten().collect();
        }
        self
    }

    /// Repeats one batch's order, with a flush and a step at the end of each.
    pub(super) fn flushed(
        name: ScheduleName,
        options: &ScheduleOptions,
        placement: Placement,
        order: Vec<Vec<PassTask>>,
    ) -> Schedule {
        let at_the_end = |(rank, tasks): (usize, &Vec<PassTask>)| {
            let behind = tasks.len();
            in_order_of_virtual_stages(&placement, rank).map(|chunk| ReducePoint { behind, chunk }).collect()
        };
        let reduced = order.iter().enumerate().map(at_the_end).collect();
        Schedule::flushed_eagerly(name, options, placement, order, reduced)
    }

    /// The same where ranks start the all-reduces of their chunks among the passes of a batch, in the order
    /// in which they are given.
    pub(super) fn flushed_eagerly(
        name: ScheduleName,
        options: &ScheduleOptions,
        placement: Placement,
        order: Vec<Vec<PassTask>>,
        reduced: Vec<Vec<ReducePoint>>,
    ) -> Schedule {
        let &ScheduleOptions { micro_batches, batches, .. } = options;
        let list = |(tasks, reduced): (Vec<PassTask>, Vec<ReducePoint>)| {
            let mut list = Vec::with_capacity(batches * (tasks.len() + reduced.len() + 1));
            for t in 0..batches {
                let mut all_reduces = reduced.iter().peekable();
                for behind in 0..=tasks.len() {
                    while let Some(&ReducePoint { chunk, .. }) =
                        all_reduces.next_if(|one| one.behind <= behind)
                    {
                        list.push(Action::AllReduce { chunk });
                    }
                    list.extend(tasks.get(behind).map(|task| task.at(t * micro_batches, t)));
                }
                list.push(Action::Step);
            }
            list
        };
        let lists = order.into_iter().zip(reduced).map(list).collect();
        Schedule::filled_in(name, options, placement, lists)
    }

    /// One pipeline without a flush, from every rank's passes, each with its version, and steps among them.
    pub(super) fn streamed(
        name: ScheduleName,
        options: &ScheduleOptions,
        lists: Vec<Vec<Action>>,
    ) -> Schedule {
        let placement = Placement::round_robin(options.stages, 1, options.micro_batches);
        Schedule::filled_in(name, options, placement, lists)
    }

    fn filled_in(
        name: ScheduleName,
        options: &ScheduleOptions,
        placement: Placement,
        lists: Vec<Vec<Action>>,
    ) -> Schedule {
        let &ScheduleOptions { micro_batches, batches, .. } = options;
        let (updates, lists) = (name.updates(), messages::fill_in(&placement, lists));
        Schedule {
            name: name.as_str().into(),
            micro_batches,
            batches,
            updates,
            message_driven: false,
            ranks: agreement::fill_in(&placement, updates, micro_batches, lists),
            placement,
        }
    }
}

/// Where a rank starts the all-reduce of a chunk's gradients.
pub(super) struct ReducePoint {
    /// Behind so many passes of a batch.
    pub behind: usize,
    /// Whose they are.
    pub chunk: usize,
}

/// What ends a batch on a rank.
pub(super) fn reduce_and_step(placement: &Placement, rank: usize) -> Vec<Action> {
    let all_reduces = in_order_of_virtual_stages(placement, rank).map(|chunk| Action::AllReduce { chunk });
    all_reduces.chain([Action::Step]).collect()
}

/// A rank's chunks by the number of their virtual stage: one order everywhere, so that ranks which share
/// several of them never wait for one another in a circle, even where an all-reduce blocks.
fn in_order_of_virtual_stages(placement: &Placement, rank: usize) -> impl Iterator<Item = usize> {
    let chunks = placement.chunks(rank);
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_by_key(|&chunk| chunks[chunk].virtual_stage);
    order.into_iter()
}

//! The messages that follow from an order of computing: a receive right before the pass that takes it, a send
//! right after the pass that made it, none between two virtual stages on the same rank.

use super::{Action, Pass, Payload, Placement, StageMessage};

/// Puts the messages into lists that have none.
pub(super) fn fill_in(placement: &Placement, lists: Vec<Vec<Action>>) -> Vec<Vec<Action>> {
    let list = |(rank, list): (usize, Vec<Action>)| {
        let mut actions = Vec::with_capacity(2 * list.len());
        for action in list {
            let (before, after) = messages(placement, rank, &action);
            actions.extend(before.map(Action::Receive));
            actions.push(action);
            actions.extend(after.map(Action::Send));
        }
        actions
    };
    lists.into_iter().enumerate().map(list).collect()
}

/// What an action takes from another rank, and what it makes for another.
pub(super) fn messages(
    placement: &Placement,
    rank: usize,
    action: &Action,
) -> (Option<StageMessage>, Option<StageMessage>) {
    let Some((pass, work)) = action.compute() else { return (None, None) };
    let chunk = placement.chunks(rank)[work.chunk];
    let (before, after) = (placement.before(chunk), placement.after(chunk));
    let message = |payload, neighbour| {
        let peer = placement.rank_of(neighbour);
        let message = StageMessage { payload, micro_batch: work.micro_batch, chunk: work.chunk, peer };
        (peer != rank).then_some(message)
    };
    let (payload, from, to) = match pass {
        Pass::Forward => (Payload::Activation, before, after),
        Pass::Backward | Pass::BackwardInput => (Payload::Gradient, after, before),
        Pass::BackwardWeight => return (None, None),
    };
    (from.and_then(|from| message(payload, from)), to.and_then(|to| message(payload, to)))
}

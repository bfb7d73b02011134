//! Lists for what is no step: evaluation, generating text, scores by gradients, products with the Hessian,
//! averages of replicas. They run over the placement of the schedule that trains, and the same executor runs
//! them.

use super::{Action, ChunkWork, ControlKind, ControlMessage, Pass, Placement, Schedule, Updates, messages};

impl Schedule {
    /// Takes micro-batches forward through one copy of the model, each rank as soon as it has its input. A
    /// rank with several chunks takes all micro-batches through one before it turns to the next, so that it
    /// does not wait for each to come round.
    pub fn forward_only(placement: &Placement, micro_batches: usize) -> Schedule {
        let placement = placement.with_routes(vec![0; micro_batches]);
        let list = |rank: usize| {
            let chunks = chunks_of(&placement, rank, 0).into_iter();
            chunks.flat_map(|chunk| (0..micro_batches).map(move |m| on(Pass::Forward, m, chunk))).collect()
        };
        let lists = (0..placement.ranks()).map(list).collect();
        sweep("forward", placement, micro_batches, lists)
    }

    /// Takes a micro-batch forward and back through every copy of the model, one copy after the other: each
    /// holder of a virtual stage has its gradients then. To the list it is a micro-batch of its own in every
    /// copy.
    pub fn forward_and_backward(placement: &Placement) -> Schedule {
        let copies = placement.copies();
        let placement = placement.with_routes((0..copies).collect());
        let list = |rank: usize| {
            let mut list = Vec::new();
            for copy in 0..copies {
                let chunks = chunks_of(&placement, rank, copy);
                list.extend(chunks.iter().map(|chunk| on(Pass::Forward, copy, *chunk)));
                list.extend(chunks.iter().rev().map(|chunk| on(Pass::Backward, copy, *chunk)));
            }
            list
        };
        let lists = (0..placement.ranks()).map(list).collect();
        sweep("forward-and-backward", placement, copies, lists)
    }

    /// Takes some positions of a sequence forward, and sends all ranks the token that follows, which is known
    /// where the model ends.
    pub fn next_token(placement: &Placement) -> Schedule {
        let mut schedule = Schedule::forward_only(placement, 1);
        let end = *schedule.placement.pipeline(0).last().expect("a model has a stage");
        let message = |peer| ControlMessage { topic: ControlKind::Token, update: 0, peer };
        let peers: Vec<usize> = (0..schedule.stages()).filter(|rank| *rank != end).collect();
        for rank in &peers {
            schedule.ranks[*rank].push(Action::RecvControl(message(end)));
        }
        schedule.ranks[end].extend(peers.into_iter().map(|peer| Action::SendControl(message(peer))));
        Schedule { name: "next-token".into(), ..schedule }
    }

    /// Averages over replicas that have stepped by themselves.
    pub fn average(placement: &Placement) -> Schedule {
        sweep("average", placement.clone(), 0, vec![vec![Action::Average]; placement.ranks()])
    }
}

/// The chunks that a rank has of a copy, in the order of the forward.
fn chunks_of(placement: &Placement, rank: usize, copy: usize) -> Vec<usize> {
    let chunks = placement.chunks(rank).iter().enumerate();
    let mut in_order: Vec<(usize, usize)> = chunks
        .filter(|(_, chunk)| chunk.pipeline == copy)
        .map(|(index, chunk)| (chunk.virtual_stage, index))
        .collect();
    in_order.sort_unstable();
    in_order.into_iter().map(|(_, index)| index).collect()
}

fn on(pass: Pass, micro_batch: usize, chunk: usize) -> Action {
    pass.on(ChunkWork { micro_batch, chunk, version: 0 })
}

fn sweep(name: &str, placement: Placement, micro_batches: usize, lists: Vec<Vec<Action>>) -> Schedule {
    Schedule {
        name: name.into(),
        micro_batches,
        batches: 1,
        updates: Updates::Free,
        message_driven: false,
        ranks: messages::fill_in(&placement, lists),
        placement,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PassUnits, ScheduleName, ScheduleOptions, Timeline, UnitCosts};
    use super::*;

    fn placements() -> Vec<Placement> {
        let of = |name: ScheduleName, stages, micro_batches| {
            name.schedule(&ScheduleOptions::new(stages, micro_batches)).unwrap().placement
        };
        vec![
            of(ScheduleName::OneFOneB, 1, 1),
            of(ScheduleName::OneFOneB, 3, 4),
            of(ScheduleName::Interleaved, 2, 4),
            of(ScheduleName::Chimera, 4, 4),
        ]
    }

    /// Walked in virtual time, which ends only where every message that is waited for is sent.
    #[test]
    fn every_micro_batch_goes_through_every_virtual_stage_once_and_nobody_waits_for_ever() {
        for placement in placements() {
            for (schedule, passes, copies) in [
                (Schedule::forward_only(&placement, 5), 1, 1),
                (Schedule::forward_and_backward(&placement), 2, placement.copies()),
                (Schedule::next_token(&placement), 1, 1),
            ] {
                let computed = schedule.ranks.iter().flatten().filter_map(Action::compute).count();
                let micro_batches = if schedule.name == "forward" { 5 } else { 1 };
                assert_eq!(
                    computed,
                    micro_batches * passes * copies * placement.virtual_stages(),
                    "{}",
                    schedule.name
                );
                Timeline::walk(&schedule, &UnitCosts::new(&schedule, PassUnits::default())).unwrap();
            }
        }
    }

    /// Once each, from where the model ends, and nothing where there is nobody to send it to.
    #[test]
    fn every_other_rank_hears_the_token() {
        for (placement, end) in placements().into_iter().zip([0, 2, 1, 3]) {
            let schedule = Schedule::next_token(&placement);
            for (rank, list) in schedule.ranks.iter().enumerate() {
                let received = list.iter().filter(|action| matches!(action, Action::RecvControl(_))).count();
                let sent = list.iter().filter(|action| matches!(action, Action::SendControl(_))).count();
                let expected = if rank == end { (0, placement.ranks() - 1) } else { (1, 0) };
                assert_eq!((received, sent), expected, "rank {rank} of {}", placement.ranks());
            }
        }
    }

    #[test]
    fn stages_evaluate_side_by_side() {
        let placement = Placement::round_robin(3, 1, 4);
        let schedule = Schedule::forward_only(&placement, 6);
        let timeline = Timeline::walk(&schedule, &UnitCosts::new(&schedule, PassUnits::default())).unwrap();
        // Six micro-batches over three stages: 6 + 3 - 1 units, not 18.
        assert_eq!(timeline.end, 8.0);
    }
}

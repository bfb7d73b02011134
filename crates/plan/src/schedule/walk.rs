//! Going through all lists at once: every rank goes on until it has to wait. Checking and timing both do this.

use std::collections::HashMap;

use super::{Action, Schedule, ScheduleError};

/// Lets every rank act until all have finished. `act(rank, position, action)` returns whether the action
/// could be done; where it could not, it is tried again later. Returns how often a rank's list was visited,
/// whether it could go on or not.
pub(super) fn walk(
    schedule: &Schedule,
    mut act: impl FnMut(usize, usize, &Action) -> Result<bool, ScheduleError>,
) -> Result<u64, ScheduleError> {
    let mut positions = vec![0; schedule.ranks.len()];
    let mut visits = 0;
    // Activations go up the ranks and gradients down. Alternating directions lets either pass all of them
    // in one sweep: with upward sweeps alone a gradient would get one rank further in each, and the work
    // would grow with the square of the stages.
    for upwards in [true, false].into_iter().cycle() {
        let mut moved = false;
        for index in 0..positions.len() {
            let rank = if upwards { index } else { positions.len() - 1 - index };
            let list = &schedule.ranks[rank];
            visits += 1;
            while let Some(action) = list.get(positions[rank]) {
                visits += 1;
                if !act(rank, positions[rank], action)? {
                    break;
                }
                positions[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let waiting: Vec<String> = (0..positions.len())
        .filter_map(|rank| Some((rank, schedule.ranks[rank].get(positions[rank])?)))
        .map(|(rank, action)| format!("rank {rank} waits at `{}`", schedule.token(rank, action)))
        .collect();
    match waiting.is_empty() {
        true => Ok(visits),
        false => Err(ScheduleError::Deadlock { waiting: waiting.join(", ") }),
    }
}

/// The all-reduces: nobody leaves before all holders of the virtual stage have arrived.
#[derive(Default)]
pub(super) struct AllReduces {
    /// When each rank arrived at the n-th all-reduce of a virtual stage.
    arrived: HashMap<(usize, usize, usize), f64>,
    /// How many of a virtual stage each rank is done with.
    done: HashMap<(usize, usize), usize>,
}

/// The n-th all-reduce of a virtual stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllReduceRound {
    virtual_stage: usize,
    round: usize,
}

impl AllReduces {
    /// A rank arrives at its next all-reduce of a chunk, and does not wait there.
    pub fn arrive(&mut self, schedule: &Schedule, rank: usize, chunk: usize, now: f64) -> AllReduceRound {
        let virtual_stage = schedule.placement.chunks(rank)[chunk].virtual_stage;
        let done = self.done.entry((rank, virtual_stage)).or_default();
        let reached = AllReduceRound { virtual_stage, round: *done };
        *done += 1;
        self.arrived.insert((rank, virtual_stage, reached.round), now);
        reached
    }

    /// When the last of some all-reduces is over that go on one after the other and take so long each; none
    /// while one has not begun.
    pub fn ended(&self, schedule: &Schedule, rounds: &[(AllReduceRound, f64)]) -> Option<f64> {
        rounds.iter().try_fold(
            f64::NEG_INFINITY,
            |ended, (AllReduceRound { virtual_stage, round }, takes)| {
                let times = schedule
                    .placement
                    .holders(*virtual_stage)
                    .map(|holder| self.arrived.get(&(holder, *virtual_stage, *round)));
                let begin = times.collect::<Option<Vec<&f64>>>()?.into_iter().copied().fold(ended, f64::max);
                Some(begin + takes)
            },
        )
    }

    /// A rank arrives at its next all-reduce of a chunk, or still waits there: when all have arrived, if they
    /// have.
    pub fn rendezvous(&mut self, schedule: &Schedule, rank: usize, chunk: usize, now: f64) -> Option<f64> {
        let virtual_stage = schedule.placement.chunks(rank)[chunk].virtual_stage;
        let round = *self.done.entry((rank, virtual_stage)).or_default();
        self.arrived.entry((rank, virtual_stage, round)).or_insert(now);
        let times = schedule
            .placement
            .holders(virtual_stage)
            .map(|holder| self.arrived.get(&(holder, virtual_stage, round)));
        let all = times.collect::<Option<Vec<&f64>>>()?.into_iter().copied().fold(now, f64::max);
        self.done.insert((rank, virtual_stage), round + 1);
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{ScheduleName, ScheduleOptions};
    use super::*;

    /// Visits for each action, of a walk in which messages arrive at once.
    fn visits_per_action(name: ScheduleName, stages: usize, micro_batches: usize) -> f64 {
        let schedule = name.schedule(&ScheduleOptions::new(stages, micro_batches)).unwrap();
        let (mut sent, mut all_reduces) = (HashSet::new(), AllReduces::default());
        let visits = walk(&schedule, |rank, _, action| {
            Ok(match *action {
                Action::Send(message) => sent.insert((message.peer, schedule.tag(rank, action))),
                Action::Receive(_) => sent.contains(&(rank, schedule.tag(rank, action))),
                Action::AllReduce { chunk } => all_reduces.rendezvous(&schedule, rank, chunk, 0.0).is_some(),
                _ => true,
            })
        });
        visits.unwrap() as f64 / schedule.ranks.iter().map(Vec::len).sum::<usize>() as f64
    }

    /// What made 30,000 stages take half a minute: visits that grow with the square of the stages. Sweeps in
    /// one direction alone need hundreds for each action here.
    #[test]
    fn a_walk_takes_a_few_visits_for_each_action_however_many_stages_or_micro_batches() {
        for name in ScheduleName::ALL {
            for (stages, micro_batches) in [(2_usize, 100_usize), (16, 64), (48, 48), (500, 2)] {
                if name == ScheduleName::Interleaved && !micro_batches.is_multiple_of(stages) {
                    continue;
                }
                let visits = visits_per_action(name, stages, micro_batches);
                assert!(visits < 2.0, "{name}, {stages} stages, {micro_batches} micro-batches: {visits}");
            }
        }
    }
}

//! Going through all lists at once: every rank goes on until it has to wait. Checking and timing both do this.

use std::collections::HashMap;

use super::{Action, Schedule, ScheduleError};

/// Lets every rank act until all have finished. `act(rank, position, action)` returns whether the action
/// could be done; where it could not, it is tried again later. Returns how many looks at a rank's list that
/// took, whether it could go on or not.
pub(super) fn walk(
    schedule: &Schedule,
    mut act: impl FnMut(usize, usize, &Action) -> Result<bool, ScheduleError>,
) -> Result<u64, ScheduleError> {
    let mut positions = vec![0; schedule.ranks.len()];
    let mut looks = 0;
    // Activations go up the ranks and gradients down. Going both ways in turns lets either pass all of them
    // in one sweep: with upward sweeps alone a gradient would get one rank further in each, and the work
    // would grow with the square of the stages.
    for upwards in [true, false].into_iter().cycle() {
        let mut moved = false;
        for index in 0..positions.len() {
            let rank = if upwards { index } else { positions.len() - 1 - index };
            let list = &schedule.ranks[rank];
            looks += 1;
            while let Some(action) = list.get(positions[rank]) {
                looks += 1;
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
        true => Ok(looks),
        false => Err(ScheduleError::Deadlock { waiting: waiting.join(", ") }),
    }
}

/// The all-reduces: nobody leaves before all holders of the virtual stage have come.
#[derive(Default)]
pub(super) struct AllReduces {
    /// When each rank came to the n-th all-reduce of a virtual stage.
    came: HashMap<(usize, usize, usize), f64>,
    /// How many of a virtual stage each rank has left.
    left: HashMap<(usize, usize), usize>,
}

/// The n-th all-reduce of a virtual stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllReduceRound {
    virtual_stage: usize,
    turn: usize,
}

impl AllReduces {
    /// A rank comes to its next all-reduce of a chunk, and does not wait there.
    pub fn come(&mut self, schedule: &Schedule, rank: usize, chunk: usize, now: f64) -> AllReduceRound {
        let virtual_stage = schedule.placement.chunks(rank)[chunk].virtual_stage;
        let left = self.left.entry((rank, virtual_stage)).or_default();
        let meeting = AllReduceRound { virtual_stage, turn: *left };
        *left += 1;
        self.came.insert((rank, virtual_stage, meeting.turn), now);
        meeting
    }

    /// When the last of some all-reduces is over that go on one after the other and take so long each; none
    /// while one has not begun.
    pub fn ended(&self, schedule: &Schedule, meetings: &[(AllReduceRound, f64)]) -> Option<f64> {
        meetings.iter().try_fold(
            f64::NEG_INFINITY,
            |ended, (AllReduceRound { virtual_stage, turn }, takes)| {
                let times = schedule
                    .placement
                    .holders(*virtual_stage)
                    .map(|holder| self.came.get(&(holder, *virtual_stage, *turn)));
                let begin = times.collect::<Option<Vec<&f64>>>()?.into_iter().copied().fold(ended, f64::max);
                Some(begin + takes)
            },
        )
    }

    /// A rank comes to its next all-reduce of a chunk, or is still there: when all have come, if they have.
    pub fn meet(&mut self, schedule: &Schedule, rank: usize, chunk: usize, now: f64) -> Option<f64> {
        let virtual_stage = schedule.placement.chunks(rank)[chunk].virtual_stage;
        let turn = *self.left.entry((rank, virtual_stage)).or_default();
        self.came.entry((rank, virtual_stage, turn)).or_insert(now);
        let times = schedule
            .placement
            .holders(virtual_stage)
            .map(|holder| self.came.get(&(holder, virtual_stage, turn)));
        let all = times.collect::<Option<Vec<&f64>>>()?.into_iter().copied().fold(now, f64::max);
        self.left.insert((rank, virtual_stage), turn + 1);
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{ScheduleName, ScheduleOptions};
    use super::*;

    /// Looks for each action, of a walk in which messages arrive at once.
    fn looks_per_action(name: ScheduleName, stages: usize, micro_batches: usize) -> f64 {
        let schedule = name.schedule(&ScheduleOptions::new(stages, micro_batches)).unwrap();
        let (mut sent, mut meetings) = (HashSet::new(), AllReduces::default());
        let looks = walk(&schedule, |rank, _, action| {
            Ok(match *action {
                Action::Send(message) => sent.insert((message.peer, schedule.tag(rank, action))),
                Action::Receive(_) => sent.contains(&(rank, schedule.tag(rank, action))),
                Action::AllReduce { chunk } => meetings.meet(&schedule, rank, chunk, 0.0).is_some(),
                _ => true,
            })
        });
        looks.unwrap() as f64 / schedule.ranks.iter().map(Vec::len).sum::<usize>() as f64
    }

    /// What made 30,000 stages take half a minute: looks that grow with the square of the stages. Sweeps in
    /// one direction alone need hundreds for each action here.
    #[test]
    fn a_walk_takes_a_few_looks_for_each_action_however_many_stages_or_micro_batches() {
        for name in ScheduleName::ALL {
            for (stages, micro_batches) in [(2_usize, 500_usize), (16, 64), (64, 64), (1000, 2)] {
                if name == ScheduleName::Interleaved && !micro_batches.is_multiple_of(stages) {
                    continue;
                }
                let looks = looks_per_action(name, stages, micro_batches);
                assert!(looks < 2.0, "{name}, {stages} stages, {micro_batches} micro-batches: {looks}");
            }
        }
    }
}

//! AxoNN's message-driven order (Singh & Bhatele, 2022): a rank runs whatever message has arrived. The first
//! rank lets p micro-batches in, then one more for each that has come back; the last runs a backward right
//! after its forward.
//!
//! There is no order to write down but the one that comes of the times, so this plays the rule out. Where a
//! forward and a backward lie there, a rank takes the one that 1F1B would: the forward while fewer than p - s
//! micro-batches are in flight on it. (Taking the older message instead loses against 1F1B on even stages
//! from p = 6 on.) So even stages have 1F1B's bubble, given backwards that take no less than forwards. Uneven
//! ones can have less, since no rank waits for one message while another lies there, and now and then more:
//! what is taken early can keep a slow stage from its turn.
//!
//! The schedule is marked as message-driven: its executor may take what has arrived instead, and the gradient
//! all-reduces then depend on the run; in the order of the lists they repeat.

use std::collections::BTreeSet;

use super::action::PassTask;
use super::{Pass, Placement, Schedule, ScheduleError, ScheduleName, ScheduleOptions};

pub(super) fn schedule(options: &ScheduleOptions) -> Result<Schedule, ScheduleError> {
    let units = options.units;
    message_driven(options, |_, pass| match pass {
        Pass::Forward => units.forward,
        _ => units.backward,
    })
}

/// The order that comes of these times: `time(rank, pass)` is what a forward or backward of one micro-batch
/// takes, and must be finite and above 0.
pub fn message_driven(
    options: &ScheduleOptions,
    time: impl Fn(usize, Pass) -> f64,
) -> Result<Schedule, ScheduleError> {
    options.check(ScheduleName::Axonn)?;
    let &ScheduleOptions { stages, micro_batches, .. } = options;
    let order = order(stages, micro_batches, time);
    let placement = Placement::round_robin(stages, 1, micro_batches);
    let schedule = Schedule::flushed(ScheduleName::Axonn, options, placement, order);
    Ok(Schedule { message_driven: true, ..schedule })
}

/// A message that lies on a rank: what to run, and since when.
struct InboxMessage {
    at: f64,
    pass: Pass,
    micro_batch: usize,
}

/// A rank and what lies there.
#[derive(Default)]
struct AxonnRank {
    free: f64,
    in_flight: usize,
    inbox: Vec<InboxMessage>,
    order: Vec<PassTask>,
}

/// When a rank starts next: then, with what is due or not, since when it lies there. Times are at least 0, so
/// that their bits have their order.
type StartTime = (u64, bool, u64);

impl AxonnRank {
    /// Which of its messages this rank takes next, and when.
    fn next(&self, stages_behind: usize) -> Option<(StartTime, usize)> {
        let forward_is_due = self.in_flight < stages_behind;
        let start = |(index, message): (usize, &InboxMessage)| {
            let is_due = (message.pass == Pass::Forward) == forward_is_due;
            ((f64::max(message.at, self.free).to_bits(), !is_due, message.at.to_bits()), index)
        };
        self.inbox.iter().enumerate().map(start).min()
    }
}

fn order(stages: usize, micro_batches: usize, time: impl Fn(usize, Pass) -> f64) -> Vec<Vec<PassTask>> {
    let mut ranks: Vec<AxonnRank> = (0..stages).map(|_| AxonnRank::default()).collect();
    let mut let_in = stages.min(micro_batches);
    ranks[0].inbox.extend((0..let_in).map(|k| InboxMessage { at: 0.0, pass: Pass::Forward, micro_batch: k }));
    // One entry a rank that has a message. The earliest start anywhere comes first: what is sent later
    // arrives later than that.
    let mut starts = BTreeSet::new();
    starts.extend(ranks[0].next(stages).map(|(start, _)| (start, 0)));
    while let Some((_, rank)) = starts.pop_first() {
        let (_, chosen) = ranks[rank].next(stages - rank).expect("it has an entry");
        let InboxMessage { at, pass, micro_batch } = ranks[rank].inbox.remove(chosen);
        ranks[rank].order.push(PassTask::new(pass, micro_batch, 0));
        let end = f64::max(at, ranks[rank].free) + time(rank, pass);
        ranks[rank].free = end;
        let sent = if pass == Pass::Forward {
            ranks[rank].in_flight += 1;
            match rank + 1 < stages {
                true => Some((rank + 1, Pass::Forward, micro_batch)),
                false => Some((rank, Pass::Backward, micro_batch)),
            }
        } else {
            ranks[rank].in_flight -= 1;
            match rank > 0 {
                true => Some((rank - 1, Pass::Backward, micro_batch)),
                false => (let_in < micro_batches).then_some((0, Pass::Forward, let_in)),
            }
        };
        if let Some((to, pass, micro_batch)) = sent {
            let_in += usize::from(to == 0 && pass == Pass::Forward);
            if to != rank
                && let Some((start, _)) = ranks[to].next(stages - to)
            {
                starts.remove(&(start, to));
            }
            ranks[to].inbox.push(InboxMessage { at: end, pass, micro_batch });
            if to != rank {
                starts.extend(ranks[to].next(stages - to).map(|(start, _)| (start, to)));
            }
        }
        starts.extend(ranks[rank].next(stages - rank).map(|(start, _)| (start, rank)));
    }
    ranks.into_iter().map(|rank| rank.order).collect()
}

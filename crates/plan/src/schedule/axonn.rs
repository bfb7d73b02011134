//! AxoNN's message-driven order (Singh & Bhatele, 2022): a rank runs whatever message has arrived. The first rank lets
//! p micro-batches in, then one more for each that has come back; the last runs a backward right after its forward.
//!
//! There is no order to write down but the one that comes of the times, so this plays the rule out. Where a forward and a
//! backward lie there, a rank takes the one that 1F1B would: the forward while fewer than p - s micro-batches are in
//! flight on it. (Taking the older message instead loses against 1F1B on even stages from p = 6 on.) So even stages have
//! 1F1B's bubble, given backwards that take no less than forwards. Uneven ones can have less, since no rank waits for one
//! message while another lies there, and now and then more: what is taken early can keep a slow stage from its turn.
//!
//! The schedule is marked as message-driven: its executor may take what has arrived instead, and the sums of gradients
//! then depend on the run; in the order of the lists they repeat.

use super::action::Task;
use super::{Error, Name, Options, Pass, Placement, Schedule};

pub(super) fn schedule(options: &Options) -> Result<Schedule, Error> {
    let units = options.units;
    message_driven(options, |_, pass| match pass {
        Pass::Forward => units.forward,
        _ => units.backward,
    })
}

/// The order that comes of these times: `time(rank, pass)` is what a forward or backward of one micro-batch takes, and
/// must be finite and above 0.
pub fn message_driven(options: &Options, time: impl Fn(usize, Pass) -> f64) -> Result<Schedule, Error> {
    options.check(Name::Axonn)?;
    let &Options { stages, micro_batches, .. } = options;
    let order = order(stages, micro_batches, time);
    let placement = Placement::round_robin(stages, 1, micro_batches);
    let schedule = Schedule::flushed(Name::Axonn, options, placement, order);
    Ok(Schedule { message_driven: true, ..schedule })
}

/// A message that lies on a rank: what to run, and since when.
struct Arrived {
    at: f64,
    pass: Pass,
    micro_batch: usize,
}

fn order(stages: usize, micro_batches: usize, time: impl Fn(usize, Pass) -> f64) -> Vec<Vec<Task>> {
    let mut order = vec![Vec::new(); stages];
    let mut free = vec![0.0; stages];
    let mut in_flight = vec![0; stages];
    let mut inbox: Vec<Vec<Arrived>> = (0..stages).map(|_| Vec::new()).collect();
    let mut let_in = stages.min(micro_batches);
    inbox[0].extend((0..let_in).map(|k| Arrived { at: 0.0, pass: Pass::Forward, micro_batch: k }));
    // The earliest start anywhere comes first: whatever is sent later arrives later than that.
    while let Some((rank, chosen)) = earliest(&inbox, &free, &in_flight) {
        let Arrived { at, pass, micro_batch } = inbox[rank].remove(chosen);
        order[rank].push(Task::new(pass, micro_batch, 0));
        let end = f64::max(at, free[rank]) + time(rank, pass);
        free[rank] = end;
        let mut send = |to: usize, pass, micro_batch| inbox[to].push(Arrived { at: end, pass, micro_batch });
        if pass == Pass::Forward {
            in_flight[rank] += 1;
            match rank + 1 < stages {
                true => send(rank + 1, Pass::Forward, micro_batch),
                false => send(rank, Pass::Backward, micro_batch),
            }
        } else {
            in_flight[rank] -= 1;
            if rank > 0 {
                send(rank - 1, Pass::Backward, micro_batch);
            } else if let_in < micro_batches {
                send(0, Pass::Forward, let_in);
                let_in += 1;
            }
        }
    }
    order
}

/// Which rank starts next, and with which of its messages.
fn earliest(inbox: &[Vec<Arrived>], free: &[f64], in_flight: &[usize]) -> Option<(usize, usize)> {
    let mut best = None;
    let mut least = (f64::INFINITY, true, f64::INFINITY);
    for (rank, messages) in inbox.iter().enumerate() {
        let forward_is_due = in_flight[rank] < inbox.len() - rank;
        for (index, message) in messages.iter().enumerate() {
            let is_due = (message.pass == Pass::Forward) == forward_is_due;
            let key = (f64::max(message.at, free[rank]), !is_due, message.at);
            if key < least {
                (least, best) = (key, Some((rank, index)));
            }
        }
    }
    best
}

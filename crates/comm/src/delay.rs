//! A transport behind which every message comes late: for tests of what hides behind computing, and for steps
//! on a network that is not there.
//!
//! What a rank sends, and its part in a collective, reaches the transport beneath it a given time after the
//! rank has handed it over; until then the rank goes on, as it would while a slow network carries the
//! message. So a collective is done that long after the last rank has come to it, and a message arrives that
//! long after it was sent. Receives are not put off: to wait is not to send. A thread for each end of a group
//! waits in the rank's place, in the order of its calls. Where the network has a rate, a rank's messages
//! leave one after the other, those of all its groups over one link, and a collective starts as many as a
//! ring of halves would.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use crate::call::{Call, Operation};
use crate::data::CommBuffer;
use crate::error::{Error, Result};
use crate::traffic::sent_by;
use crate::transport::{CallBuffers, Pending, SplitChoice, Transport};

/// One rank's end of a group whose messages come late.
pub(crate) struct DelayedTransport {
    beneath: Arc<dyn Transport>,
    link: SimulatedLink,
    /// Calls on their way to the thread that hands them on.
    queue: Mutex<Sender<DelayedCall>>,
}

/// What leads out of a rank.
#[derive(Debug, Clone)]
pub(crate) struct SimulatedLink {
    latency: Duration,
    /// Bytes a second, and when the last of those before has left.
    rate: Option<(f64, Arc<Mutex<Instant>>)>,
}

impl SimulatedLink {
    /// Whatever is sent sets off after so long.
    pub(crate) fn with_latency(latency: Duration) -> SimulatedLink {
        SimulatedLink { latency, rate: None }
    }

    /// The same, and leaves at so many bytes a second.
    pub(crate) fn of(latency: Duration, bytes_per_second: f64) -> SimulatedLink {
        SimulatedLink { latency, rate: Some((bytes_per_second, Arc::new(Mutex::new(Instant::now())))) }
    }

    /// When a call of a rank among so many has left it.
    fn due(&self, call: &Call, rank: usize, size: usize) -> Instant {
        let now = Instant::now();
        let Some((rate, free)) = &self.rate else { return now + self.latency };
        let rounds = size.next_power_of_two().ilog2();
        let messages = match call.operation {
            Operation::AllReduce(_) => 2 * rounds,
            Operation::ReduceScatter(_) | Operation::AllGather => rounds,
            Operation::Barrier | Operation::Split => 0,
            Operation::Send { .. } | Operation::Receive { .. } | Operation::Broadcast { .. } => 1,
        };
        let bytes = sent_by(call, rank, size, false).map_or(0, |(_, bytes)| bytes);
        let mut free = free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *free = now.max(*free) + Duration::from_secs_f64(bytes as f64 / rate);
        *free + messages * self.latency
    }
}

/// A call that waits for its time, and where what comes of it is to go.
struct DelayedCall {
    due: Instant,
    buffers: CallBuffers,
    started: Sender<Result<Box<dyn Pending>>>,
}

impl DelayedTransport {
    pub(crate) fn new(beneath: Arc<dyn Transport>, link: SimulatedLink) -> DelayedTransport {
        let (queue, calls) = channel::<DelayedCall>();
        let below = beneath.clone();
        thread::spawn(move || {
            for DelayedCall { due, buffers, started } in calls {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                // Whoever gave up its result still takes part.
                let _ = started.send(below.start(buffers, false));
            }
        });
        DelayedTransport { beneath, link, queue: Mutex::new(queue) }
    }
}

impl fmt::Debug for DelayedTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayedTransport").field("beneath", &self.beneath).field("link", &self.link).finish()
    }
}

impl Transport for DelayedTransport {
    fn rank(&self) -> usize {
        self.beneath.rank()
    }

    fn members(&self) -> &[usize] {
        self.beneath.members()
    }

    fn start(&self, buffers: CallBuffers, attended: bool) -> Result<Box<dyn Pending>> {
        if matches!(buffers.call.operation, Operation::Receive { .. }) {
            return self.beneath.start(buffers, attended);
        }
        let (started, receiver) = channel();
        let call = buffers.call;
        let due = self.link.due(&call, self.rank(), self.members().len());
        let delayed = DelayedCall { due, buffers, started };
        let rank = self.members()[self.rank()];
        let sent = self.queue.lock().is_ok_and(|thread| thread.send(delayed).is_ok());
        match sent {
            true => Ok(Box::new(DelayedPending { rank, call, receiver, there: None })),
            false => Err(lost(rank, call)),
        }
    }

    fn connect(&self, to: &[usize], limit: Duration) -> Result<()> {
        self.beneath.connect(to, limit)
    }

    fn split(&self, choice: SplitChoice, limit: Duration) -> Result<Option<Arc<dyn Transport>>> {
        let beneath = self.beneath.split(choice, limit)?;
        Ok(beneath
            .map(|beneath| Arc::new(DelayedTransport::new(beneath, self.link.clone())) as Arc<dyn Transport>))
    }
}

/// A call that has not reached the transport yet, or has.
struct DelayedPending {
    rank: usize,
    call: Call,
    receiver: Receiver<Result<Box<dyn Pending>>>,
    there: Option<Box<dyn Pending>>,
}

impl Pending for DelayedPending {
    fn is_done(&mut self) -> Result<bool> {
        if self.there.is_none() {
            match self.receiver.try_recv() {
                Ok(started) => self.there = Some(started?),
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Err(lost(self.rank, self.call)),
            }
        }
        self.there.as_mut().map_or(Ok(false), |pending| pending.is_done())
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>> {
        let pending = match self.there {
            Some(pending) => pending,
            None => self.receiver.recv().map_err(|_| lost(self.rank, self.call))??,
        };
        pending.wait(limit)
    }
}

fn lost(rank: usize, call: Call) -> Error {
    Error::Carrier { rank, call, why: "the thread that delays its messages has ended".into() }
}

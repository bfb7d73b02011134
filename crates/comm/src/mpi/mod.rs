//! Ranks as processes that MPI started and connects.
//!
//! One thread of each process, the progress thread, makes all calls of MPI; ranks hand it their calls and
//! wait for it with a limit. So a wait can be given up although MPI's cannot, a call goes on while its rank
//! computes, any MPI will do (no more than `MPI_THREAD_FUNNELED` is asked for), and a rank that is busy or
//! stuck still answers when others ask what it is at: that is how a time-out can name the rank that is
//! missing.
//!
//! The binding is ferrompi: it returns MPI's errors, where rsmpi leaves MPI to abort the process, and it
//! needs no libclang to build. MPI only carries: reductions are ours (`task`), in the order of ranks, so that
//! sums have the bits that they have among threads, bf16 is summed in f32, and a NaN shows.

mod cores;
mod progress;
mod task;

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use progress::{ProgressCommand, ProgressThread, RankEnding};
use task::MpiCall;

use crate::communicator::Communicator;
use crate::data::CommBuffer;
use crate::error::{DisplaySeconds, Error, Result};
use crate::failure::{Failure, RankFailure, panic_message};
use crate::transport::{CallBuffers, Pending, SplitChoice, Transport};

/// How long other ranks have to answer whether they made a call, once a wait for it has timed out.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// How much later than the rank that failed first all others end: a launcher ends the whole job with the
/// first process that ends badly, and that one should have said why, which it does when its farewell is over.
const AFTER_YOU: Duration = Duration::from_millis(1200);

/// How long the progress thread of a rank that failed is given to tell the others. It needs 300 ms, unless it
/// is in a call of MPI that waits for a rank that does not come.
const FAREWELL: Duration = Duration::from_secs(1);

/// Runs `work` as the rank that this process is, and returns what it returns.
///
/// A call waits at most `limit`, and so do the two that MPI makes of all ranks by itself, its start and its
/// end. Where a rank fails or panics, the waits of all others end at once. MPI cannot be started twice, so
/// neither can this be called twice in a process; after a failure, the process should end.
pub fn run<R, E>(limit: Duration, work: impl FnOnce(Communicator) -> Result<R, E>) -> Result<R, Failure<E>>
where
    E: Debug + Display,
{
    let (orders, inbox) = mpsc::channel();
    let (ready, connected) = mpsc::channel();
    let (closed, ended) = mpsc::channel::<()>();
    let progress = thread::Builder::new().name("espalier-mpi".into());
    let started = progress.spawn(move || ProgressThread::run(inbox, ready, closed));
    let launch = |what: String| Failure::Launch(Error::Launch { what });
    started.map_err(|e| launch(format!("cannot start a thread for MPI: {e}")))?;
    let connected = connected.recv_timeout(limit).unwrap_or_else(|why| {
        let what = match why {
            RecvTimeoutError::Disconnected => "MPI's thread ended".into(),
            RecvTimeoutError::Timeout => {
                let waited = DisplaySeconds(limit);
                format!("MPI has not joined the ranks after {waited}: one of them has stopped, or is slower than that")
            }
        };
        Err(Error::Launch { what })
    });
    let (world, members, rank) = connected.map_err(Failure::Launch)?;

    let post = Arc::new(ProgressHandle { orders, world });
    let end = MpiGroup { post: post.clone(), group: 0, members, rank };
    let outcome = catch_unwind(AssertUnwindSafe(|| work(Communicator::new(Arc::new(end), limit))));
    let ending = match &outcome {
        Ok(Ok(_)) => RankEnding::Well,
        Ok(Err(error)) => RankEnding::Failed(error.to_string()),
        Err(panic) => RankEnding::Panicked(panic_message(panic.as_ref())),
    };
    let _ = post.orders.send(ProgressCommand::Ended(ending));
    let well = matches!(outcome, Ok(Ok(_)));
    let farewell = if well { limit } else { FAREWELL };
    // The progress thread's end without a word changes nothing for the result.
    if ended.recv_timeout(farewell) == Err(RecvTimeoutError::Timeout) && well {
        let waited = DisplaySeconds(limit);
        return Err(launch(format!(
            "rank {rank} has ended, and another has not for {waited} since: it has stopped, or is slower than that"
        )));
    }
    if post.world.failed.get().is_some_and(|failed| failed.rank != rank) {
        thread::sleep(AFTER_YOU);
    }
    match outcome {
        Ok(Ok(result)) => match post.world.failed.get() {
            None => Ok(result),
            Some(failed) => {
                Err(Failure::Peer { rank: failed.rank, how: failed.how, why: failed.why.clone() })
            }
        },
        Ok(Err(error)) => Err(Failure::Failed { rank, error }),
        Err(panic) => Err(Failure::Panicked { rank, message: panic_message(panic.as_ref()) }),
    }
}

/// Which MPI the program is linked with, as the library reports it.
pub fn library() -> String {
    ferrompi::Mpi::library_version().unwrap_or_else(|e| format!("unknown ({e})"))
}

/// The channel to the progress thread.
#[derive(Debug)]
struct ProgressHandle {
    orders: Sender<ProgressCommand>,
    world: Arc<MpiWorld>,
}

/// What a rank and its progress thread share.
#[derive(Debug, Default)]
struct MpiWorld {
    /// Threads that wait for something: while there are any, the progress thread does not rest.
    waiting: AtomicUsize,
    /// The first rank that is known to have failed.
    failed: OnceLock<RankFailure>,
}

/// What a rank waits for.
type DeliveryTicket = crate::ticket::Ticket<Delivery>;

/// What a call brings.
#[derive(Debug)]
enum Delivery {
    Data(Option<CommBuffer>),
    /// A split: the progress thread's number of the new group, its members in the world, and its rank among them.
    Group(Option<(usize, Arc<[usize]>, usize)>),
}

/// One rank's end of a group.
#[derive(Debug)]
struct MpiGroup {
    post: Arc<ProgressHandle>,
    /// The progress thread's number of the group.
    group: usize,
    members: Arc<[usize]>,
    rank: usize,
}

impl MpiGroup {
    fn order(&self, buffers: CallBuffers) -> Result<MpiPending> {
        let call = buffers.call;
        let ticket = DeliveryTicket::new(self.members[self.rank], call);
        if let Some(failed) = self.post.world.failed.get() {
            return Err(failed.stops(ticket.rank, call));
        }
        let job = MpiCall::new(self.group, self.rank, self.members.len(), buffers, ticket.clone())?;
        if self.post.orders.send(ProgressCommand::Call(Box::new(job))).is_err() {
            let why = "MPI was shut down".to_owned();
            return Err(Error::Carrier { rank: ticket.rank, call, why });
        }
        Ok(MpiPending { post: self.post.clone(), group: self.group, members: self.members.clone(), ticket })
    }
}

impl Transport for MpiGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn start(&self, buffers: CallBuffers, _attended: bool) -> Result<Box<dyn Pending>> {
        Ok(Box::new(self.order(buffers)?))
    }

    fn split(&self, choice: SplitChoice, limit: Duration) -> Result<Option<Arc<dyn Transport>>> {
        let buffers = CallBuffers::of_split(choice, self.members.len());
        match self.order(buffers)?.wait(limit)? {
            Delivery::Group(group) => Ok(group.map(|(group, members, rank)| -> Arc<dyn Transport> {
                Arc::new(MpiGroup { post: self.post.clone(), group, members, rank })
            })),
            Delivery::Data(_) => unreachable!("a split delivers a group"),
        }
    }
}

/// A call that the progress thread was given.
struct MpiPending {
    post: Arc<ProgressHandle>,
    group: usize,
    members: Arc<[usize]>,
    ticket: Arc<DeliveryTicket>,
}

impl MpiPending {
    fn wait(&self, limit: Duration) -> Result<Delivery> {
        let start = Instant::now();
        self.post.world.waiting.fetch_add(1, Ordering::Relaxed);
        let delivered = self.ticket.wait(limit);
        self.post.world.waiting.fetch_sub(1, Ordering::Relaxed);
        if let Some(result) = delivered {
            return result;
        }
        let waited = start.elapsed();
        self.ticket.timed_out(&self.members, waited, || {
            let (answer, missing_ranks) = mpsc::channel();
            let (group, ticket) = (self.group, self.ticket.clone());
            let _ = self.post.orders.send(ProgressCommand::QueryMissing { group, ticket, answer });
            missing_ranks.recv_timeout(2 * ANSWER_TIMEOUT).unwrap_or_default()
        })
    }
}

impl Pending for MpiPending {
    fn is_done(&mut self) -> Result<bool> {
        Ok(self.ticket.is_done())
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>> {
        match MpiPending::wait(&self, limit)? {
            Delivery::Data(data) => Ok(data),
            Delivery::Group(_) => unreachable!("only a split delivers a group"),
        }
    }
}

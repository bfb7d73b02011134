//! Ranks as threads of one process. Messages are shared memory: a receiver's data is copied from the sender's, once, and a
//! reduction reads and writes the ranks' own buffers.
//!
//! [`run`] starts the ranks and waits for them. A rank that fails or panics ends the waits of all others at once, and its
//! own message is what the caller gets.
//!
//! A call that was only started goes on while its ranks compute: the last rank to come does it on the spot where it is
//! small, and helpers do it where it is large, one thread for each rank but no more than there are cores. A rank that waits
//! helps too, so that blocking calls need no other thread. Every sum is taken in the order of ranks, whoever takes it.
//!
//! Tensors may be on a card, the same one for all ranks: then a courier queues what the call says on a stream of its own
//! (`card`), and the host moves nothing.

mod board;
mod card;
mod work;

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use board::{Guest, Key, Meeting, World};
use card::Ready;

use crate::call::{Call, Operation};
use crate::communicator::Communicator;
use crate::data::Data;
use crate::error::{Error, Result};
use crate::failure::{Failure, panic_message};
use crate::transport::{NewGroup, Parcel, Pending, Transport, choice};

/// Runs `work` on this many ranks, each on a thread of its own, and returns what they return, in the order of ranks.
///
/// A call of theirs waits at most `limit`.
///
/// ```
/// use std::time::Duration;
/// use espalier_comm::{Error, Reduce, threads};
///
/// let sums = threads::run(4, Duration::from_secs(10), |comm| -> Result<u64, Error> {
///     Ok(comm.all_reduce(vec![comm.rank() as u64], Reduce::Sum)?[0])
/// });
/// assert_eq!(sums.unwrap(), [6; 4]);
/// ```
pub fn run<R, E>(
    ranks: usize,
    limit: Duration,
    work: impl Fn(Communicator) -> Result<R, E> + Sync,
) -> Result<Vec<R>, Failure<E>>
where
    R: Send,
    E: Debug + Display + Send,
{
    assert!(ranks > 0, "a world has at least one rank");
    let world = Arc::new(World::new(ranks));
    let members: Arc<[usize]> = (0..ranks).collect();
    let rank = |rank: usize| {
        let end = End::new(world.clone(), 0, members.clone(), rank);
        let outcome = catch_unwind(AssertUnwindSafe(|| work(Communicator::new(Arc::new(end), limit))));
        match &outcome {
            Ok(Ok(_)) => world.end(rank),
            Ok(Err(error)) => world.fail(rank, "failed", error.to_string()),
            Err(panic) => world.fail(rank, "panicked", panic_message(panic.as_ref())),
        }
        outcome
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut helpers = 0;
        while helpers < ranks.min(cores) && ranks > 1 {
            let helper = thread::Builder::new().name(format!("espalier-comm-{helpers}"));
            if helper.spawn_scoped(scope, || world.serve()).is_err() {
                break;
            }
            helpers += 1;
        }
        let start = |r: usize| {
            let thread = thread::Builder::new().name(format!("espalier-rank-{r}"));
            let started = thread.spawn_scoped(scope, move || rank(r));
            started.map_err(|e| {
                world.fail(r, "failed", format!("no thread for it: {e}"));
                let what = format!(
                    "cannot start a thread for rank {r} of {ranks}: {e}; use fewer ranks in one process"
                );
                Failure::Launch(Error::Launch { what })
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("a rank's panic is caught");
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.map(join)).collect();
        world.close();
        match world.failed() {
            None => Ok(outcomes.into_iter().map(succeeded).collect()),
            Some(failed) => Err(match outcomes.into_iter().nth(failed.rank).expect("a rank of this world") {
                Err(no_thread) => no_thread,
                Ok(Err(_)) => Failure::Panicked { rank: failed.rank, message: failed.why },
                Ok(Ok(Err(error))) => Failure::Failed { rank: failed.rank, error },
                Ok(Ok(Ok(_))) => unreachable!("a rank that failed returned a result"),
            }),
        }
    })
}

/// What a rank returned in a world where none failed.
fn succeeded<R, E: Debug + Display>(outcome: Result<thread::Result<Result<R, E>>, Failure<E>>) -> R {
    match outcome {
        Ok(Ok(Ok(result))) => result,
        _ => unreachable!("a rank failed unnoticed"),
    }
}

/// One rank's end of a group.
#[derive(Debug)]
struct End {
    world: Arc<World>,
    group: u64,
    members: Arc<[usize]>,
    rank: usize,
    /// How many collective calls it has made.
    turn: AtomicU64,
}

impl End {
    fn new(world: Arc<World>, group: u64, members: Arc<[usize]>, rank: usize) -> End {
        End { world, group, members, rank, turn: AtomicU64::new(0) }
    }

    fn come(&self, mut parcel: Parcel, attended: bool) -> Result<Waiting> {
        // A tensor that somebody else holds too cannot be written to: that panics here, where no lock is held.
        parcel.write.as_mut().map(Data::claim);
        let (group, rank) = (self.group, self.rank);
        let ready = Ready::of(&parcel).map_err(|why| {
            let (rank, call) = (self.members[rank], parcel.call);
            Error::Carrier { rank, call, why }
        })?;
        let pair = |a: usize, b: usize| -> Arc<[usize]> { [self.members[a], self.members[b]].into() };
        let (key, members, seat) = match parcel.call.operation {
            Operation::Send { to, tag } => (Key::Letter { group, from: rank, to, tag }, pair(rank, to), 0),
            Operation::Receive { from, tag } => {
                (Key::Letter { group, from, to: rank, tag }, pair(from, rank), 1)
            }
            _ => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                (Key::Turn { group, turn }, self.members.clone(), rank)
            }
        };
        let meeting = self.world.come(key, &members, seat, Guest { parcel, ready }, attended)?;
        Ok(Waiting { world: self.world.clone(), meeting, seat })
    }
}

impl Transport for End {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn start(&self, parcel: Parcel, attended: bool) -> Result<Box<dyn Pending>> {
        Ok(Box::new(self.come(parcel, attended)?))
    }

    fn split(
        &self,
        colour: Option<usize>,
        key: usize,
        limit: Duration,
    ) -> Result<Option<Arc<dyn Transport>>> {
        let turn = self.turn.load(Ordering::Relaxed);
        let choice = Data::U64(choice(colour, key).to_vec());
        let choices = Data::U64(vec![0; 2 * self.members.len()]);
        let call = Call::of(Operation::Split, &choices);
        let waiting = self.come(Parcel { call, read: Some(choice), write: Some(choices) }, true)?;
        let Some(Data::U64(choices)) = Box::new(waiting).wait(limit)? else {
            unreachable!("what was gathered comes back as it went in");
        };
        let (Some(colour), Some(new)) = (colour, NewGroup::of(&choices, self.rank)) else { return Ok(None) };
        let members = new.members.iter().map(|&r| self.members[r]).collect();
        let group = self.world.group(self.group, turn, colour);
        Ok(Some(Arc::new(End::new(self.world.clone(), group, members, new.rank))))
    }
}

/// A call that a rank has come to.
struct Waiting {
    world: Arc<World>,
    meeting: Arc<Meeting>,
    seat: usize,
}

impl Pending for Waiting {
    fn is_done(&mut self) -> Result<bool> {
        self.world.is_done(&self.meeting, self.seat)
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<Data>> {
        self.world.wait(&self.meeting, self.seat, limit)
    }
}

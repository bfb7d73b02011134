//! The life of ranks on threads: they are started, report as they end, and are not waited for longer than the
//! caller wants.

use std::convert::Infallible;
use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use super::ThreadGroup;
use super::collective::ThreadWorld;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::failure::{Failure, panic_message};

/// How long ranks are given to come to their end once one has failed, if the limit of a call is not shorter.
/// They do so at their next call; a process that ends before them loses no more than one that is killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Mappings that a rank is reckoned to take: a stack, its guard, a stack for signals and its guard, of the
/// rank, of a thread of its processor and of one that fetches its data; and as many again for what these
/// hold.
const MAPPINGS: usize = 24;

/// Addresses that it is reckoned to take where these are limited (`ulimit -v`): stacks of 2 MiB, and what it
/// holds.
const SPACE: usize = 16 << 20;

/// Runs `work` on this many ranks, each on a thread of its own, and returns what they return, in the order of
/// ranks.
///
/// A call of theirs waits at most `limit`. A rank that hangs outside of any call is named by the others, and
/// still waited for here, since it may hold what `work` borrows: [`run_or_abort`] does not.
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
    run_watched(ranks, limit, None::<fn(Failure<E>) -> Infallible>, work)
}

/// The same for a caller who would rather end the process than wait for a rank that hangs: once a rank has
/// failed, the others are given a little time to come to their end, and then `abort` is called with what to
/// say.
///
/// It cannot return. A thread cannot be ended from outside, and one that borrows from its caller cannot be
/// left to itself either; so the end of the process is the only way on. To lend `work` nothing would be the
/// other choice: every caller would have to share what now is plainly borrowed, and the thread would still be
/// there.
pub fn run_or_abort<R, E>(
    ranks: usize,
    limit: Duration,
    abort: impl FnOnce(Failure<E>) -> Infallible,
    work: impl Fn(Communicator) -> Result<R, E> + Sync,
) -> Result<Vec<R>, Failure<E>>
where
    R: Send,
    E: Debug + Display + Send,
{
    run_watched(ranks, limit, Some(abort), work)
}

/// The most ranks that one process can have as threads. Of all that a thread takes the mappings of memory run
/// out first, and the standard library aborts the process where a thread that has started gets none for its
/// signals: so they are counted before.
pub fn most_ranks() -> usize {
    let known = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let mappings: usize = known.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530);
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let space = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
    let space = space.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(usize::MAX);
    (mappings / MAPPINGS).min(space / SPACE).max(1)
}

fn run_watched<R, E>(
    ranks: usize,
    limit: Duration,
    abort: Option<impl FnOnce(Failure<E>) -> Infallible>,
    work: impl Fn(Communicator) -> Result<R, E> + Sync,
) -> Result<Vec<R>, Failure<E>>
where
    R: Send,
    E: Debug + Display + Send,
{
    assert!(ranks > 0, "a world has at least one rank");
    let most = most_ranks();
    if ranks > most {
        return Err(Failure::Launch(Error::TooManyThreads { ranks, most }));
    }
    let world = Arc::new(ThreadWorld::new(ranks));
    let members: Arc<[usize]> = (0..ranks).collect();
    let rank = |rank: usize| {
        let end = ThreadGroup::new(world.clone(), 0, members.clone(), rank);
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
        let (ended, ends) = mpsc::channel();
        let start = |r: usize| {
            let (thread, tell) = (thread::Builder::new().name(format!("espalier-rank-{r}")), ended.clone());
            // Nobody listens any more where this rank is no longer waited for.
            let started = thread.spawn_scoped(scope, move || drop(tell.send((r, Ok(rank(r))))));
            if let Err(e) = started {
                world.fail(r, "failed", format!("no thread for it: {e}"));
                let what = format!(
                    "cannot start a thread for rank {r} of {ranks}: {e}; use fewer ranks in one process"
                );
                let _ = ended.send((r, Err(Failure::Launch(Error::Launch { what }))));
            }
        };
        (0..ranks).for_each(start);
        let patience = abort.is_some().then(|| limit.min(PATIENCE));
        let (mut outcomes, left) = gather(&ends, ranks, patience, || world.failed().is_some());
        world.close();
        let Some(failed) = world.failed() else {
            return Ok(outcomes.into_iter().flatten().map(succeeded).collect());
        };
        let failure = match outcomes[failed.rank].take().expect("a rank that failed has ended") {
            Err(no_thread) => no_thread,
            Ok(Err(_)) => Failure::Panicked { rank: failed.rank, message: failed.why },
            Ok(Ok(Err(error))) => Failure::Failed { rank: failed.rank, error },
            Ok(Ok(Ok(_))) => unreachable!("a rank that failed returned a result"),
        };
        match (patience, abort) {
            (Some(waited), Some(abort)) if !left.is_empty() => {
                match abort(Failure::LeftBehind { first: Box::new(failure), left, waited }) {}
            }
            _ => Err(failure),
        }
    })
}

/// What a rank came to: the result of its work, or its panic; or there was no thread for it.
type ThreadOutcome<R, E> = Result<thread::Result<Result<R, E>>, Failure<E>>;

/// Waits for all ranks; returns what those who have ended came to, and who has not. Once a rank `has_failed`,
/// the others have as long as `patience` says, or as they need.
fn gather<R, E: Debug + Display>(
    ends: &Receiver<(usize, ThreadOutcome<R, E>)>,
    ranks: usize,
    patience: Option<Duration>,
    has_failed: impl Fn() -> bool,
) -> (Vec<Option<ThreadOutcome<R, E>>>, Vec<usize>) {
    let mut outcomes: Vec<_> = (0..ranks).map(|_| None).collect();
    let mut until: Option<Instant> = None;
    for _ in 0..ranks {
        let ended = match until {
            None => ends.recv().ok(),
            Some(until) => ends.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
        };
        let Some((rank, outcome)) = ended else { break };
        outcomes[rank] = Some(outcome);
        // A rank that fails is known here as soon as it is to others.
        if has_failed() {
            until = until.or(patience.map(|patience| Instant::now() + patience));
        }
    }
    let left = (0..ranks).filter(|&rank| outcomes[rank].is_none()).collect();
    (outcomes, left)
}

/// What a rank returned in a world where none failed.
fn succeeded<R, E: Debug + Display>(outcome: ThreadOutcome<R, E>) -> R {
    match outcome {
        Ok(Ok(Ok(result))) => result,
        _ => unreachable!("a rank failed unnoticed"),
    }
}

//! The promise of a result, between the thread of a rank and the one that carries out its calls.
//!
//! A rank never waits inside a call of MPI or NCCL, which could not be abandoned: another thread makes the
//! call, and the rank waits here, with a limit.

use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::call::{Call, Operation};
use crate::error::{Error, Result};

/// What a rank is to get, once.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    /// The world's number of the rank that asked.
    pub(crate) rank: usize,
    pub(crate) call: Call,
    /// Which of its group's collective calls it is, once it was started.
    pub(crate) seq_no: OnceLock<u64>,
    result: Mutex<Option<Result<T>>>,
    waker: Condvar,
}

impl<T> Ticket<T> {
    pub(crate) fn new(rank: usize, call: Call) -> Arc<Ticket<T>> {
        let (seq_no, result, waker) = (OnceLock::new(), Mutex::new(None), Condvar::new());
        Arc::new(Ticket { rank, call, seq_no, result, waker })
    }

    /// Delivers, unless something was delivered before.
    pub(crate) fn deliver(&self, result: Result<T>) {
        self.result.lock().expect("no panic while locked").get_or_insert(result);
        self.waker.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.result.lock().expect("no panic while locked").is_some()
    }

    /// What was delivered within the limit; `None` where nothing was.
    pub(crate) fn wait(&self, limit: Duration) -> Option<Result<T>> {
        let result = self.result.lock().expect("no panic while locked");
        let waited = self.waker.wait_timeout_while(result, limit, |result| result.is_none());
        waited.expect("no panic while locked").0.take()
    }

    /// The same for so short a time that sleeping and waking up would be most of it: keeps its core.
    pub(crate) fn spin(&self, limit: Duration) -> Option<Result<T>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Ok(mut result) = self.result.try_lock()
                && let Some(result) = result.take()
            {
                return Some(result);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// What a rank says that has waited so long in vain: the peer of a message is missing, or of a group those
    /// whom `find_missing` names.
    pub(crate) fn timed_out(
        &self,
        members: &[usize],
        waited: Duration,
        find_missing: impl FnOnce() -> Vec<usize>,
    ) -> Result<T> {
        let (rank, call) = (self.rank, self.call);
        let (among, missing) = match call.operation {
            Operation::Send { to: peer, .. } | Operation::Receive { from: peer, .. } => {
                (Vec::new(), vec![members[peer]])
            }
            _ => {
                // Without an answer all that is known is that it was one of the others.
                let others = || members.iter().copied().filter(|&member| member != rank).collect();
                let missing = Some(find_missing()).filter(|missing| !missing.is_empty());
                (members.to_vec(), missing.unwrap_or_else(others))
            }
        };
        // It may have arrived while the others were asked.
        self.wait(Duration::ZERO).unwrap_or(Err(Error::TimedOut { rank, call, among, waited, missing }))
    }
}

//! Ranks as threads of one process. Messages are shared memory: a receiver's data is copied from the
//! sender's, once, and a reduction reads and writes the ranks' own buffers.
//!
//! [`run`] starts the ranks and waits for them. A rank that fails or panics ends the waits of all others at
//! once, and its own message is what the caller gets. [`run_or_abort`] is for a caller who will not wait
//! for a rank that hangs.
//!
//! A call that was only started goes on while its ranks compute: the last rank to come does it on the spot
//! where it is small, and helpers do it where it is large, one thread for each rank but no more than there
//! are cores. A rank that waits helps too, so that blocking calls need no other thread. Every sum is taken in
//! the order of ranks, whoever takes it.
//!
//! Tensors may be on a GPU, the same one for all ranks: then a transfer stream is given what the call says
//! (`gpu`), and the host moves nothing.

mod collective;
mod gpu;
mod run;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use collective::{ArrivedRank, CallKey, ThreadCollective, ThreadWorld};
use gpu::ReadyEvent;
pub use run::{most_ranks, run, run_or_abort};

use crate::call::Operation;
use crate::data::CommBuffer;
use crate::error::{Error, Result};
use crate::transport::{CallBuffers, NewGroup, Pending, SplitChoice, Transport};

/// One rank's end of a group.
#[derive(Debug)]
struct ThreadGroup {
    world: Arc<ThreadWorld>,
    group: u64,
    members: Arc<[usize]>,
    rank: usize,
    /// How many collective calls it has made.
    seq_no: AtomicU64,
}

impl ThreadGroup {
    fn new(world: Arc<ThreadWorld>, group: u64, members: Arc<[usize]>, rank: usize) -> ThreadGroup {
        ThreadGroup { world, group, members, rank, seq_no: AtomicU64::new(0) }
    }

    fn come(&self, mut buffers: CallBuffers, attended: bool) -> Result<ThreadPending> {
        // A tensor that somebody else holds too cannot be written to: that panics here, where no lock is held.
        buffers.write.as_mut().map(CommBuffer::claim);
        let (group, rank) = (self.group, self.rank);
        let ready = ReadyEvent::of(&buffers).map_err(|why| {
            let (rank, call) = (self.members[rank], buffers.call);
            Error::Carrier { rank, call, why }
        })?;
        let pair = |a: usize, b: usize| -> Arc<[usize]> { [self.members[a], self.members[b]].into() };
        let (key, members, slot) = match buffers.call.operation {
            Operation::Send { to, tag } => {
                (CallKey::Message { group, from: rank, to, tag }, pair(rank, to), 0)
            }
            Operation::Receive { from, tag } => {
                (CallKey::Message { group, from, to: rank, tag }, pair(from, rank), 1)
            }
            _ => {
                let seq_no = self.seq_no.fetch_add(1, Ordering::Relaxed);
                (CallKey::Turn { group, seq_no }, self.members.clone(), rank)
            }
        };
        let collective = self.world.come(key, &members, slot, ArrivedRank { buffers, ready }, attended)?;
        Ok(ThreadPending { world: self.world.clone(), collective, slot })
    }
}

impl Transport for ThreadGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn start(&self, buffers: CallBuffers, attended: bool) -> Result<Box<dyn Pending>> {
        Ok(Box::new(self.come(buffers, attended)?))
    }

    fn split(&self, choice: SplitChoice, limit: Duration) -> Result<Option<Arc<dyn Transport>>> {
        let seq_no = self.seq_no.load(Ordering::Relaxed);
        let buffers = CallBuffers::of_split(choice, self.members.len());
        let waiting = self.come(buffers, true)?;
        let Some(CommBuffer::U64(choices)) = Box::new(waiting).wait(limit)? else {
            unreachable!("what was gathered comes back as it went in");
        };
        let Some(new) = NewGroup::of(&choices, self.rank) else { return Ok(None) };
        let members = new.members.iter().map(|&r| self.members[r]).collect();
        let group = self.world.group(self.group, seq_no, choice[0]);
        Ok(Some(Arc::new(ThreadGroup::new(self.world.clone(), group, members, new.rank))))
    }
}

/// A call that a rank has come to.
struct ThreadPending {
    world: Arc<ThreadWorld>,
    collective: Arc<ThreadCollective>,
    slot: usize,
}

impl Pending for ThreadPending {
    fn is_done(&mut self) -> Result<bool> {
        self.world.is_done(&self.collective, self.slot)
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>> {
        self.world.wait(&self.collective, self.slot, limit)
    }
}

//! Where ranks meet: one lock for the whole world, and a waker (a condition variable) for each rank.
//!
//! The lock is only held for the moment of coming and going; data is moved outside of it. A call is a
//! [`ThreadCollective`]: ranks fill their slots, the last to come opens the work, and whoever waits helps
//! with it. Calls whose ranks all compute meanwhile are done by helpers, threads of the world's own.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::gpu::{ReadyEvent, TransferStream};
use super::work::{CollectiveWork, RankBuffers};
use crate::call::{Call, Operation};
use crate::data::CommBuffer;
use crate::error::{Error, Result};
use crate::failure::RankFailure;
use crate::stream_event::StreamEvent;
use crate::transport::CallBuffers;

/// Collective calls by group and `seq_no`, messages by group, sender, receiver and tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum CallKey {
    Turn { group: u64, seq_no: u64 },
    Message { group: u64, from: usize, to: usize, tag: u32 },
}

/// A world of ranks in one process.
#[derive(Debug)]
pub(super) struct ThreadWorld {
    state: Mutex<ThreadWorldState>,
    /// One a rank: notified when something that it may wait for has changed.
    wakers: Vec<Condvar>,
    /// Notified when there is work for helpers, or nothing will come any more.
    helpers: Condvar,
    /// Carries what is on a GPU, from the first such call on.
    transfer: Mutex<Option<Arc<TransferStream>>>,
}

#[derive(Debug, Default)]
struct ThreadWorldState {
    failed: Option<RankFailure>,
    /// Ranks that make no more calls.
    ended: Vec<bool>,
    collectives: HashMap<CallKey, VecDeque<Arc<ThreadCollective>>>,
    groups: HashMap<(u64, u64, u64), u64>,
    work: VecDeque<Arc<ThreadCollective>>,
    closed: bool,
}

/// A call on which ranks meet.
#[derive(Debug)]
pub(super) struct ThreadCollective {
    /// The world's ranks that take part, by slot.
    members: Arc<[usize]>,
    slots: Mutex<ArrivalSlots>,
    /// Set when all have come, with data of the host.
    work: OnceLock<CollectiveWork>,
    /// Set when all have come, with data of a GPU: when it passes, all is carried; or why it cannot be.
    carried: OnceLock<Result<StreamEvent, String>>,
    /// Done, or, on a GPU, queued.
    done: AtomicBool,
    /// Two calls that do not belong together, by the ranks that made them.
    mismatch: OnceLock<[(usize, Call); 2]>,
}

/// Who has come, with what. The data stays here until its rank takes it back, so that no address dangles.
#[derive(Debug)]
struct ArrivalSlots {
    arrived: Vec<Option<ArrivedRank>>,
    empty: usize,
}

/// A rank that has come.
#[derive(Debug)]
pub(super) struct ArrivedRank {
    pub(super) buffers: CallBuffers,
    /// Where its data is on a GPU.
    pub(super) ready: Option<ReadyEvent>,
}

impl ThreadWorld {
    pub(super) fn new(ranks: usize) -> ThreadWorld {
        let state = ThreadWorldState { ended: vec![false; ranks], ..ThreadWorldState::default() };
        let wakers = (0..ranks).map(|_| Condvar::new()).collect();
        ThreadWorld { state: Mutex::new(state), wakers, helpers: Condvar::new(), transfer: Mutex::new(None) }
    }

    fn state(&self) -> MutexGuard<'_, ThreadWorldState> {
        self.state.lock().expect("no panic while the state is locked")
    }

    /// Fills a slot, with the data of the call. The last to come does what is small, and otherwise calls for help.
    pub(super) fn come(
        &self,
        key: CallKey,
        members: &Arc<[usize]>,
        slot: usize,
        arrived: ArrivedRank,
        attended: bool,
    ) -> Result<Arc<ThreadCollective>> {
        let (rank, call, on_gpu) = (members[slot], arrived.buffers.call, arrived.ready.is_some());
        let mut state = self.state();
        if let Some(failed) = &state.failed {
            return Err(failed.stops(rank, call));
        }
        let queue = state.collectives.entry(key).or_default();
        // Only the first collective without this rank is its: messages of one tag are matched in order.
        let at = queue.iter().position(|collective| collective.slots().arrived[slot].is_none());
        let collective = match at {
            Some(at) => queue[at].clone(),
            None => {
                let collective = Arc::new(ThreadCollective::new(members.clone()));
                queue.push_back(collective.clone());
                collective
            }
        };
        if let Err(error) = collective.agrees(rank, call) {
            self.wake(members);
            return Err(error);
        }
        let complete = collective.slots().fill(slot, arrived);
        if !complete {
            return Ok(collective);
        }
        let queue = state.collectives.get_mut(&key).expect("this collective's queue");
        queue.retain(|other| !Arc::ptr_eq(other, &collective));
        if queue.is_empty() {
            state.collectives.remove(&key);
        }
        if on_gpu || collective.slots().on_gpu() {
            drop(state);
            let _ = collective.carried.set(self.carry(&collective));
            let _state = self.state();
            self.finish(&collective);
            return Ok(collective);
        }
        let work = collective.open();
        match work.chunks() {
            0 => self.finish(&collective),
            1 => {
                drop(state);
                // A rank that began to wait just now may have taken the chunk: then it reports when that is done.
                if work.help() {
                    let _state = self.state();
                    self.finish(&collective);
                }
            }
            _ => {
                self.wake(members);
                if !attended {
                    state.work.push_back(collective.clone());
                    self.helpers.notify_all();
                }
            }
        }
        Ok(collective)
    }

    /// Waits until a call is done, helping with it, and takes the data of its slot back.
    pub(super) fn wait(
        &self,
        collective: &ThreadCollective,
        slot: usize,
        limit: Duration,
    ) -> Result<Option<CommBuffer>> {
        let (rank, call) = (collective.members[slot], collective.slots().call(slot));
        let start = Instant::now();
        let waker = &self.wakers[rank];
        let mut state = self.state();
        while !collective.is_done() {
            if let Some(&calls) = collective.mismatch.get() {
                return Err(mismatch(calls, rank));
            }
            if let Some(failed) = &state.failed {
                return Err(failed.stops(rank, call));
            }
            if let Some(work) = collective.work.get() {
                if work.has_more() {
                    drop(state);
                    let last = work.help();
                    state = self.state();
                    if last {
                        self.finish(collective);
                    }
                } else {
                    // Others are at the last chunks, which takes them as long as it takes: no limit applies.
                    state = waker.wait(state).expect("no panic while the state is locked");
                }
                continue;
            }
            let missing = collective.missing();
            let ended: Vec<usize> = missing.iter().copied().filter(|&rank| state.ended[rank]).collect();
            if !ended.is_empty() {
                return Err(Error::PeerEnded { rank, call, ended });
            }
            let waited = start.elapsed();
            let Some(rest) = limit.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                let among = match call.operation {
                    Operation::Send { .. } | Operation::Receive { .. } => Vec::new(),
                    _ => collective.members.to_vec(),
                };
                return Err(Error::TimedOut { rank, call, among, waited, missing });
            };
            state = waker.wait_timeout(state, rest).expect("no panic while the state is locked").0;
        }
        drop(state);
        let ArrivedRank { buffers, ready } =
            collective.slots().arrived[slot].take().expect("data is taken back once");
        let carried = match (collective.carried.get(), ready) {
            (Some(Err(why)), _) => Err(why.clone()),
            (Some(Ok(mark)), Some(ready)) => ready.make_wait(mark),
            _ => Ok(()),
        };
        carried.map_err(|why| Error::Carrier { rank, call, why })?;
        Ok(buffers.write.or(buffers.read))
    }

    /// Queues what all have come for on the GPU that holds their data.
    fn carry(&self, collective: &ThreadCollective) -> Result<StreamEvent, String> {
        let slots = collective.slots();
        let mut ranks = Vec::new();
        for (rank, arrived) in collective.members.iter().zip(slots.arrived.iter().flatten()) {
            let Some(ready) = &arrived.ready else {
                return Err(format!("the data of rank {rank} is on the host, that of others on a GPU"));
            };
            ranks.push((&arrived.buffers, ready));
        }
        let mut transfer = self.transfer.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let stream = match &*transfer {
            Some(transfer) => transfer.clone(),
            None => transfer.insert(Arc::new(TransferStream::on_gpu_of(ranks[0].1)?)).clone(),
        };
        drop(transfer);
        stream.carry(&slots.call(0), &ranks)
    }

    /// Whether a call is done; an error where it never will be.
    pub(super) fn is_done(&self, collective: &ThreadCollective, slot: usize) -> Result<bool> {
        if collective.is_done() {
            return Ok(true);
        }
        let rank = collective.members[slot];
        if let Some(&calls) = collective.mismatch.get() {
            return Err(mismatch(calls, rank));
        }
        match &self.state().failed {
            Some(failed) if !collective.is_done() => Err(failed.stops(rank, collective.slots().call(slot))),
            _ => Ok(collective.is_done()),
        }
    }

    /// Ends all waits: a rank failed. Only the first to fail counts.
    pub(super) fn fail(&self, rank: usize, how: &'static str, why: String) {
        let mut state = self.state();
        state.failed.get_or_insert(RankFailure { rank, how, why });
        state.ended[rank] = true;
        self.wakers.iter().for_each(Condvar::notify_all);
    }

    /// Notes that a rank makes no more calls.
    pub(super) fn end(&self, rank: usize) {
        self.state().ended[rank] = true;
        self.wakers.iter().for_each(Condvar::notify_all);
    }

    /// The first rank to fail, if any has.
    pub(super) fn failed(&self) -> Option<RankFailure> {
        self.state().failed.clone()
    }

    /// The number of the group that a split makes for a colour: the same for all its members.
    pub(super) fn group(&self, parent: u64, seq_no: u64, colour: u64) -> u64 {
        let mut state = self.state();
        let next = state.groups.len() as u64 + 1;
        *state.groups.entry((parent, seq_no, colour)).or_insert(next)
    }

    /// Works on calls that nobody attends to, until the world is closed.
    pub(super) fn serve(&self) {
        let mut state = self.state();
        while !state.closed {
            let Some(collective) = state.work.front().cloned() else {
                state = self.helpers.wait(state).expect("no panic while the state is locked");
                continue;
            };
            drop(state);
            let last = collective.work.get().expect("work that was opened").help();
            state = self.state();
            // All its chunks are claimed now. Another helper may have taken it off already.
            state.work.retain(|other| !Arc::ptr_eq(other, &collective));
            if last {
                self.finish(&collective);
            }
        }
    }

    /// Lets the helpers end.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.helpers.notify_all();
    }

    /// Marks a call done and notifies its ranks; the state is locked, so that nobody is about to start waiting.
    fn finish(&self, collective: &ThreadCollective) {
        collective.done.store(true, Ordering::Release);
        self.wake(&collective.members);
    }

    fn wake(&self, ranks: &[usize]) {
        ranks.iter().for_each(|&rank| self.wakers[rank].notify_all());
    }
}

impl ThreadCollective {
    fn new(members: Arc<[usize]>) -> ThreadCollective {
        let slots = ArrivalSlots { arrived: members.iter().map(|_| None).collect(), empty: members.len() };
        ThreadCollective {
            members,
            slots: Mutex::new(slots),
            work: OnceLock::new(),
            carried: OnceLock::new(),
            done: AtomicBool::new(false),
            mismatch: OnceLock::new(),
        }
    }

    fn slots(&self) -> MutexGuard<'_, ArrivalSlots> {
        self.slots.lock().expect("no panic while slots are locked")
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// The ranks that have not come.
    fn missing(&self) -> Vec<usize> {
        let slots = self.slots();
        self.members.iter().zip(&slots.arrived).filter(|(_, g)| g.is_none()).map(|(&rank, _)| rank).collect()
    }

    /// Checks that a call fits those already made; if not, none of them can ever be done.
    fn agrees(&self, rank: usize, call: Call) -> Result<()> {
        if let Some(&calls) = self.mismatch.get() {
            return Err(mismatch(calls, rank));
        }
        let slots = self.slots();
        let Some((other, theirs)) = self
            .members
            .iter()
            .zip(&slots.arrived)
            .find_map(|(&rank, g)| Some((rank, g.as_ref()?.buffers.call)))
        else {
            return Ok(());
        };
        let same = (theirs.element, theirs.elements) == (call.element, call.elements)
            && match (theirs.operation, call.operation) {
                (Operation::Send { .. }, Operation::Receive { .. })
                | (Operation::Receive { .. }, Operation::Send { .. }) => true,
                (theirs, ours) => theirs == ours,
            };
        if same {
            return Ok(());
        }
        let calls = *self.mismatch.get_or_init(|| [(rank, call), (other, theirs)]);
        Err(mismatch(calls, rank))
    }

    /// Turns what was brought into work: all have come.
    fn open(&self) -> &CollectiveWork {
        let mut slots = self.slots();
        let call = slots.call(0);
        let all =
            slots.arrived.iter_mut().map(|arrived| &mut arrived.as_mut().expect("all have come").buffers);
        let buffers =
            all.map(|buffers| RankBuffers::of(buffers.read.as_ref(), buffers.write.as_mut())).collect();
        self.work.get_or_init(|| CollectiveWork::new(&call, buffers))
    }
}

impl Drop for ThreadCollective {
    fn drop(&mut self) {
        // Data that no rank took back may still be in use on the GPU: its memory is handed on behind that use.
        let Some(Ok(mark)) = self.carried.get() else { return };
        let slots = self.slots.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        for ready in slots.arrived.iter().flatten().filter_map(|arrived| arrived.ready.as_ref()) {
            let _ = ready.make_wait(mark);
        }
    }
}

impl ArrivalSlots {
    /// Fills a slot; returns whether it was the last.
    fn fill(&mut self, slot: usize, arrived: ArrivedRank) -> bool {
        self.arrived[slot] = Some(arrived);
        self.empty -= 1;
        self.empty == 0
    }

    fn call(&self, slot: usize) -> Call {
        self.arrived[slot].as_ref().expect("a rank that came").buffers.call
    }

    /// Whether anybody's data is on a GPU.
    fn on_gpu(&self) -> bool {
        self.arrived.iter().flatten().any(|arrived| arrived.ready.is_some())
    }
}

/// As the rank sees it that gets the error: its own call first, where it is one of the two.
fn mismatch([a, b]: [(usize, Call); 2], rank: usize) -> Error {
    let ((rank, call), (other, theirs)) = if b.0 == rank { (b, a) } else { (a, b) };
    Error::Mismatch { rank, call, other, theirs }
}

//! Where ranks meet: one lock for the whole world, and a bell for each rank.
//!
//! The board is only held for the moment of coming and going; data is moved outside of it. A call is a [`Meeting`]: ranks
//! take their seats, the last to come opens the work, and whoever waits helps with it. Calls whose ranks all compute
//! meanwhile are done by helpers, threads of the world's own.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::card::{Courier, Ready};
use super::work::{Place, Work};
use crate::call::{Call, Operation};
use crate::data::Data;
use crate::error::{Error, Result};
use crate::mark::Mark;
use crate::transport::Parcel;

/// Collective calls by group and turn, messages by group, sender, receiver and tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Turn { group: u64, turn: u64 },
    Letter { group: u64, from: usize, to: usize, tag: u32 },
}

/// A world of ranks in one process.
#[derive(Debug)]
pub(super) struct World {
    board: Mutex<Board>,
    /// One a rank: rung when something that it may wait for has changed.
    bells: Vec<Condvar>,
    /// Rung when there is work for helpers, or nothing will come any more.
    helpers: Condvar,
    /// Who carries what is on a card, from the first such call on.
    courier: Mutex<Option<Arc<Courier>>>,
}

#[derive(Debug, Default)]
struct Board {
    failed: Option<Failed>,
    /// Ranks that make no more calls.
    ended: Vec<bool>,
    meetings: HashMap<Key, VecDeque<Arc<Meeting>>>,
    groups: HashMap<(u64, u64, usize), u64>,
    work: VecDeque<Arc<Meeting>>,
    closed: bool,
}

/// The first rank to fail.
#[derive(Debug, Clone)]
pub(super) struct Failed {
    pub(super) rank: usize,
    pub(super) how: &'static str,
    pub(super) why: String,
}

/// A call on which ranks meet.
#[derive(Debug)]
pub(super) struct Meeting {
    /// The world's ranks that take part, by seat.
    members: Arc<[usize]>,
    seats: Mutex<Seats>,
    /// Set when all have come, with data of the host.
    work: OnceLock<Work>,
    /// Set when all have come, with data of a card: when it passes, all is carried; or why it cannot be.
    carried: OnceLock<Result<Mark, String>>,
    /// Done, or, on a card, queued.
    done: AtomicBool,
    /// Two calls that do not belong together, by the ranks that made them.
    mismatch: OnceLock<[(usize, Call); 2]>,
}

/// Who has come, with what. The data stays here until its rank takes it back, so that no address dangles.
#[derive(Debug)]
struct Seats {
    guests: Vec<Option<Guest>>,
    empty: usize,
}

/// A rank that has come.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) parcel: Parcel,
    /// Where its data is on a card.
    pub(super) ready: Option<Ready>,
}

impl World {
    pub(super) fn new(ranks: usize) -> World {
        let board = Board { ended: vec![false; ranks], ..Board::default() };
        let bells = (0..ranks).map(|_| Condvar::new()).collect();
        World { board: Mutex::new(board), bells, helpers: Condvar::new(), courier: Mutex::new(None) }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().expect("no panic while the board is locked")
    }

    /// Takes a seat, with the data of the call. The last to come does what is small, and otherwise calls for help.
    pub(super) fn come(
        &self,
        key: Key,
        members: &Arc<[usize]>,
        seat: usize,
        guest: Guest,
        attended: bool,
    ) -> Result<Arc<Meeting>> {
        let (rank, call, on_card) = (members[seat], guest.parcel.call, guest.ready.is_some());
        let mut board = self.board();
        if let Some(failed) = &board.failed {
            return Err(failed.stops(rank, call));
        }
        let queue = board.meetings.entry(key).or_default();
        // Only the first meeting without this rank is its: messages of one tag are matched in order.
        let at = queue.iter().position(|meeting| meeting.seats().guests[seat].is_none());
        let meeting = match at {
            Some(at) => queue[at].clone(),
            None => {
                let meeting = Arc::new(Meeting::new(members.clone()));
                queue.push_back(meeting.clone());
                meeting
            }
        };
        if let Err(error) = meeting.agrees(rank, call) {
            self.ring(members);
            return Err(error);
        }
        let complete = meeting.seats().sit(seat, guest);
        if !complete {
            return Ok(meeting);
        }
        let queue = board.meetings.get_mut(&key).expect("this meeting's queue");
        queue.retain(|other| !Arc::ptr_eq(other, &meeting));
        if queue.is_empty() {
            board.meetings.remove(&key);
        }
        if on_card || meeting.seats().on_card() {
            drop(board);
            let _ = meeting.carried.set(self.carry(&meeting));
            let _board = self.board();
            self.finish(&meeting);
            return Ok(meeting);
        }
        let work = meeting.open();
        match work.pieces() {
            0 => self.finish(&meeting),
            1 => {
                drop(board);
                work.help();
                let _board = self.board();
                self.finish(&meeting);
            }
            _ => {
                self.ring(members);
                if !attended {
                    board.work.push_back(meeting.clone());
                    self.helpers.notify_all();
                }
            }
        }
        Ok(meeting)
    }

    /// Waits until a call is done, helping with it, and takes the data of its seat back.
    pub(super) fn wait(&self, meeting: &Meeting, seat: usize, limit: Duration) -> Result<Option<Data>> {
        let (rank, call) = (meeting.members[seat], meeting.seats().call(seat));
        let start = Instant::now();
        let bell = &self.bells[rank];
        let mut board = self.board();
        while !meeting.is_done() {
            if let Some(&calls) = meeting.mismatch.get() {
                return Err(mismatch(calls, rank));
            }
            if let Some(failed) = &board.failed {
                return Err(failed.stops(rank, call));
            }
            if let Some(work) = meeting.work.get() {
                if work.has_more() {
                    drop(board);
                    let last = work.help();
                    board = self.board();
                    if last {
                        self.finish(meeting);
                    }
                } else {
                    // Others are at the last pieces, which takes them as long as it takes: no limit applies.
                    board = bell.wait(board).expect("no panic while the board is locked");
                }
                continue;
            }
            let missing = meeting.missing();
            let ended: Vec<usize> = missing.iter().copied().filter(|&rank| board.ended[rank]).collect();
            if !ended.is_empty() {
                return Err(Error::PeerEnded { rank, call, ended });
            }
            let waited = start.elapsed();
            let Some(rest) = limit.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                let among = match call.operation {
                    Operation::Send { .. } | Operation::Receive { .. } => Vec::new(),
                    _ => meeting.members.to_vec(),
                };
                return Err(Error::TimedOut { rank, call, among, waited, missing });
            };
            board = bell.wait_timeout(board, rest).expect("no panic while the board is locked").0;
        }
        drop(board);
        let Guest { parcel, ready } = meeting.seats().guests[seat].take().expect("data is taken back once");
        let carried = match (meeting.carried.get(), ready) {
            (Some(Err(why)), _) => Err(why.clone()),
            (Some(Ok(mark)), Some(ready)) => ready.hold_back(mark),
            _ => Ok(()),
        };
        carried.map_err(|why| Error::Carrier { rank, call, why })?;
        Ok(parcel.write.or(parcel.read))
    }

    /// Queues what all have come for on the card that holds their data.
    fn carry(&self, meeting: &Meeting) -> Result<Mark, String> {
        let seats = meeting.seats();
        let mut ranks = Vec::new();
        for (rank, guest) in meeting.members.iter().zip(seats.guests.iter().flatten()) {
            let Some(ready) = &guest.ready else {
                return Err(format!("the data of rank {rank} is on the host, that of others on a card"));
            };
            ranks.push((&guest.parcel, ready));
        }
        let mut courier = self.courier.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let carrier = match &*courier {
            Some(courier) => courier.clone(),
            None => courier.insert(Arc::new(Courier::beside(ranks[0].1)?)).clone(),
        };
        drop(courier);
        carrier.carry(&seats.call(0), &ranks)
    }

    /// Whether a call is done; an error where it never will be.
    pub(super) fn is_done(&self, meeting: &Meeting, seat: usize) -> Result<bool> {
        if meeting.is_done() {
            return Ok(true);
        }
        let rank = meeting.members[seat];
        if let Some(&calls) = meeting.mismatch.get() {
            return Err(mismatch(calls, rank));
        }
        match &self.board().failed {
            Some(failed) if !meeting.is_done() => Err(failed.stops(rank, meeting.seats().call(seat))),
            _ => Ok(meeting.is_done()),
        }
    }

    /// Ends all waits: a rank failed. Only the first to fail counts.
    pub(super) fn fail(&self, rank: usize, how: &'static str, why: String) {
        let mut board = self.board();
        board.failed.get_or_insert(Failed { rank, how, why });
        board.ended[rank] = true;
        self.bells.iter().for_each(Condvar::notify_all);
    }

    /// Notes that a rank makes no more calls.
    pub(super) fn end(&self, rank: usize) {
        self.board().ended[rank] = true;
        self.bells.iter().for_each(Condvar::notify_all);
    }

    /// The first rank to fail, if any has.
    pub(super) fn failed(&self) -> Option<Failed> {
        self.board().failed.clone()
    }

    /// The number of the group that a split makes for a colour: the same for all its members.
    pub(super) fn group(&self, parent: u64, turn: u64, colour: usize) -> u64 {
        let mut board = self.board();
        let next = board.groups.len() as u64 + 1;
        *board.groups.entry((parent, turn, colour)).or_insert(next)
    }

    /// Works on calls that nobody attends to, until the world is closed.
    pub(super) fn serve(&self) {
        let mut board = self.board();
        while !board.closed {
            let Some(meeting) = board.work.front().cloned() else {
                board = self.helpers.wait(board).expect("no panic while the board is locked");
                continue;
            };
            drop(board);
            let last = meeting.work.get().expect("work that was opened").help();
            board = self.board();
            // All its pieces are claimed now. Another helper may have taken it off already.
            board.work.retain(|other| !Arc::ptr_eq(other, &meeting));
            if last {
                self.finish(&meeting);
            }
        }
    }

    /// Lets helpers go.
    pub(super) fn close(&self) {
        self.board().closed = true;
        self.helpers.notify_all();
    }

    /// Marks a call done and tells its ranks; the board is locked, so that nobody is about to start waiting.
    fn finish(&self, meeting: &Meeting) {
        meeting.done.store(true, Ordering::Release);
        self.ring(&meeting.members);
    }

    fn ring(&self, ranks: &[usize]) {
        ranks.iter().for_each(|&rank| self.bells[rank].notify_all());
    }
}

impl Failed {
    fn stops(&self, rank: usize, call: Call) -> Error {
        Error::PeerFailed { rank, call, failed: self.rank, how: self.how, why: self.why.clone() }
    }
}

impl Meeting {
    fn new(members: Arc<[usize]>) -> Meeting {
        let seats = Seats { guests: members.iter().map(|_| None).collect(), empty: members.len() };
        Meeting {
            members,
            seats: Mutex::new(seats),
            work: OnceLock::new(),
            carried: OnceLock::new(),
            done: AtomicBool::new(false),
            mismatch: OnceLock::new(),
        }
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().expect("no panic while seats are locked")
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// The ranks that have not come.
    fn missing(&self) -> Vec<usize> {
        let seats = self.seats();
        self.members.iter().zip(&seats.guests).filter(|(_, g)| g.is_none()).map(|(&rank, _)| rank).collect()
    }

    /// Checks that a call fits those already made; if not, none of them can ever be done.
    fn agrees(&self, rank: usize, call: Call) -> Result<()> {
        if let Some(&calls) = self.mismatch.get() {
            return Err(mismatch(calls, rank));
        }
        let seats = self.seats();
        let Some((other, theirs)) = self
            .members
            .iter()
            .zip(&seats.guests)
            .find_map(|(&rank, g)| Some((rank, g.as_ref()?.parcel.call)))
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
    fn open(&self) -> &Work {
        let mut seats = self.seats();
        let call = seats.call(0);
        let parcels = seats.guests.iter_mut().map(|guest| &mut guest.as_mut().expect("all have come").parcel);
        let places = parcels.map(|parcel| Place::of(parcel.read.as_ref(), parcel.write.as_mut())).collect();
        self.work.get_or_init(|| Work::new(&call, places))
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // Data that no rank took back may still be in use on the card: its memory is handed on behind that use.
        let Some(Ok(mark)) = self.carried.get() else { return };
        let seats = self.seats.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        for ready in seats.guests.iter().flatten().filter_map(|guest| guest.ready.as_ref()) {
            let _ = ready.hold_back(mark);
        }
    }
}

impl Seats {
    /// Takes a seat; returns whether it was the last.
    fn sit(&mut self, seat: usize, guest: Guest) -> bool {
        self.guests[seat] = Some(guest);
        self.empty -= 1;
        self.empty == 0
    }

    fn call(&self, seat: usize) -> Call {
        self.guests[seat].as_ref().expect("a rank that came").parcel.call
    }

    /// Whether anybody's data is on a card.
    fn on_card(&self) -> bool {
        self.guests.iter().flatten().any(|guest| guest.ready.is_some())
    }
}

/// As the rank sees it that is told: its own call first, where it is one of the two.
fn mismatch([a, b]: [(usize, Call); 2], rank: usize) -> Error {
    let ((rank, call), (other, theirs)) = if b.0 == rank { (b, a) } else { (a, b) };
    Error::Mismatch { rank, call, other, theirs }
}

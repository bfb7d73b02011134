//! What the ranks of a run send each other beside their data: who has ended, who has failed and why, who has
//! made which call, and messages of a few bytes.
//!
//! It goes over the connections of the rendezvous: each rank's to rank 0, which forwards what is for others.
//! A rank that is killed closes its connection, so that all know of it within a moment, whatever they are
//! waiting for; one that hangs still answers, since a thread of its own does. A process that is stopped does
//! not: it is among those who are missing.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::failure::RankFailure;
use crate::rendezvous::Rendezvous;

/// How long other ranks have to answer whether they made a call, once a wait for it has timed out.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a rank that does not read holds up those that write to it.
const WRITE: Duration = Duration::from_secs(2);
/// The longest text of a frame: an error's sentence, an id of NCCL's.
const LONGEST: usize = 64 << 10;
/// Addressed to everybody else.
const ALL: u32 = u32::MAX;
const HEADER: usize = 29;

/// The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameKind {
    /// The sender's work is done.
    Ended = 1,
    /// A rank, whose number is in `seq_no`, has failed: the first byte of the text says how, the rest why.
    Failed,
    /// Asks whether call `seq_no` of the group `name` was made.
    Ask,
    /// To that: a byte, 1 for yes.
    Answer,
    Message,
}

#[derive(Debug, Clone)]
struct ControlFrame {
    kind: FrameKind,
    from: u32,
    to: u32,
    name: u64,
    seq_no: u64,
    text: Vec<u8>,
}

/// One rank's end of the connections over which ranks learn of each other's state.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    rank: usize,
    /// Of rank 0, to all others, in the order of ranks; of the others, to rank 0.
    streams: Vec<Mutex<TcpStream>>,
    state: Mutex<ControlState>,
    changed: Condvar,
    failed: OnceLock<RankFailure>,
}

#[derive(Debug, Default)]
struct ControlState {
    ended: Vec<bool>,
    /// Calls that this rank has made, by the group's name.
    call_counts: HashMap<u64, u64>,
    /// Whether a rank has made a call, by the group's name and the call's `seq_no`.
    answers: HashMap<(u64, u64), Vec<(usize, bool)>>,
    messages: HashMap<u64, Vec<u8>>,
}

impl ControlPlane {
    /// Starts a thread for each connection of the rendezvous, which receives what its peer sends.
    pub(crate) fn start(rendezvous: Rendezvous) -> Result<Arc<ControlPlane>> {
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let peers = rendezvous.into_streams();
        let launch = |error: std::io::Error| Error::Launch {
            what: format!("rank {rank} cannot listen to the others: {error}"),
        };
        let mut streams = Vec::new();
        for peer in &peers {
            let writer = peer.try_clone().map_err(launch)?;
            writer.set_write_timeout(Some(WRITE)).map_err(launch)?;
            writer.set_read_timeout(None).map_err(launch)?;
            streams.push(Mutex::new(writer));
        }
        let state = Mutex::new(ControlState { ended: vec![false; size], ..ControlState::default() });
        let (changed, failed) = (Condvar::new(), OnceLock::new());
        let control = Arc::new(ControlPlane { rank, streams, state, changed, failed });
        for (index, stream) in peers.into_iter().enumerate() {
            let (control, peer) = (control.clone(), if rank == 0 { index + 1 } else { 0 });
            let thread = thread::Builder::new().name("espalier-control".into());
            thread.spawn(move || control.listen(peer, stream)).map_err(launch)?;
        }
        Ok(control)
    }

    /// Its number in the world.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The first rank that is known to have failed.
    pub(crate) fn failed(&self) -> Option<&RankFailure> {
        self.failed.get()
    }

    /// Counts a call of a group, and returns its `seq_no`.
    pub(crate) fn begin_call(&self, name: u64) -> u64 {
        let mut state = self.state();
        let seq_no = state.call_counts.entry(name).or_default();
        *seq_no += 1;
        *seq_no - 1
    }

    /// Asks the other `members` whether they made a call; returns those that have not, or do not answer.
    pub(crate) fn find_missing(&self, name: u64, seq_no: u64, members: &[usize]) -> Vec<usize> {
        let others: Vec<usize> = members.iter().copied().filter(|&member| member != self.rank).collect();
        self.state().answers.insert((name, seq_no), Vec::new());
        for &other in &others {
            self.send(ControlFrame { seq_no, ..self.frame(FrameKind::Ask, other as u32, name) });
        }
        let (until, mut state) = (Instant::now() + ANSWER_TIMEOUT, self.state());
        loop {
            let answers = &state.answers[&(name, seq_no)];
            let left = until.saturating_duration_since(Instant::now());
            if answers.len() == others.len() || left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).expect("no panic while locked").0;
        }
        let answers = state.answers.remove(&(name, seq_no)).expect("inserted above");
        others.into_iter().filter(|&other| !answers.contains(&(other, true))).collect()
    }

    /// Sends a message, which the receiver fetches by its name.
    pub(crate) fn post(&self, to: usize, name: u64, text: Vec<u8>) {
        self.send(ControlFrame { text, ..self.frame(FrameKind::Message, to as u32, name) });
    }

    /// Waits for a message, for as long as no rank has failed.
    pub(crate) fn fetch(&self, name: u64) -> Result<Vec<u8>, String> {
        let mut state = self.state();
        loop {
            if let Some(text) = state.messages.remove(&name) {
                return Ok(text);
            }
            if let Some(RankFailure { rank, how, why }) = self.failed() {
                return Err(format!("rank {rank} {how}: {why}"));
            }
            state = self.changed.wait(state).expect("no panic while locked");
        }
    }

    /// Sends all that this rank's work is done, and waits for theirs; returns whether they have ended within
    /// the limit, or one of them has failed.
    pub(crate) fn end(&self, limit: Duration) -> bool {
        self.state().ended[self.rank] = true;
        self.send(self.frame(FrameKind::Ended, ALL, 0));
        let is_over =
            |state: &mut ControlState| self.failed().is_some() || state.ended.iter().all(|&ended| ended);
        let waited = self.changed.wait_timeout_while(self.state(), limit, |state| !is_over(state));
        let in_time = !waited.expect("no panic while locked").1.timed_out();
        if in_time {
            // The threads that listen, here and there, end with it.
            self.shutdown_writes();
        }
        in_time
    }

    /// Sends all that this rank has failed, or which one did before it.
    pub(crate) fn fail(&self, how: &'static str, why: String) {
        self.state().ended[self.rank] = true;
        self.note(RankFailure { rank: self.rank, how, why });
        // The first failure, whosever it is: the thread that received it may not have sent it on yet.
        self.broadcast_failure();
        self.shutdown_writes();
    }

    /// Closes the connections for writing; what was sent is delivered before that.
    fn shutdown_writes(&self) {
        for stream in &self.streams {
            let _ = stream.lock().expect("no panic while locked").shutdown(Shutdown::Write);
        }
    }

    fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().expect("no panic while locked")
    }

    fn frame(&self, kind: FrameKind, to: u32, name: u64) -> ControlFrame {
        ControlFrame { kind, from: self.rank as u32, to, name, seq_no: 0, text: Vec::new() }
    }

    /// Receives from one connection until it is closed.
    fn listen(&self, peer: usize, mut stream: TcpStream) {
        while let Ok(frame) = ControlFrame::read(&mut stream) {
            self.send(frame);
        }
        if !self.state().ended[peer] {
            let why = "its connection was closed, as of a process that was killed".to_owned();
            if self.note(RankFailure { rank: peer, how: "was lost", why }) {
                self.broadcast_failure();
            }
        }
    }

    /// Hands a frame to its receiver: this rank or, on rank 0, others.
    fn send(&self, frame: ControlFrame) {
        let (rank, from) = (self.rank as u32, frame.from);
        let is_hub = self.rank == 0;
        let bytes = frame.bytes();
        for (index, stream) in self.streams.iter().enumerate() {
            let receiver = index as u32 + 1;
            let wanted = match is_hub {
                true => frame.to == receiver || frame.to == ALL && from != receiver,
                false => from == rank && frame.to != rank,
            };
            if wanted {
                // A rank that cannot be reached is found missing.
                let _ = stream.lock().expect("no panic while locked").write_all(&bytes);
            }
        }
        // It was forwarded first: whoever learns that all have ended may end the process.
        if from != rank && (frame.to == rank || frame.to == ALL) {
            self.receive(&frame);
        }
    }

    fn receive(&self, frame: &ControlFrame) {
        let from = frame.from as usize;
        match frame.kind {
            FrameKind::Ended => self.state().ended[from] = true,
            FrameKind::Failed => {
                let how = match frame.text.first() {
                    Some(b'p') => "panicked",
                    Some(b'w') => "was lost",
                    _ => "failed",
                };
                let why = String::from_utf8_lossy(frame.text.get(1..).unwrap_or_default()).into_owned();
                self.state().ended[from] = true;
                self.note(RankFailure { rank: frame.seq_no as usize, how, why });
            }
            FrameKind::Ask => {
                let made = self.state().call_counts.get(&frame.name).copied().unwrap_or(0);
                let answer = self.frame(FrameKind::Answer, frame.from, frame.name);
                let text = vec![u8::from(made > frame.seq_no)];
                self.send(ControlFrame { seq_no: frame.seq_no, text, ..answer });
            }
            FrameKind::Answer => {
                if let Some(answers) = self.state().answers.get_mut(&(frame.name, frame.seq_no)) {
                    answers.push((from, frame.text == [1]));
                }
            }
            FrameKind::Message => drop(self.state().messages.insert(frame.name, frame.text.clone())),
        }
        self.changed.notify_all();
    }

    /// Notes who failed; returns whether it is the first.
    fn note(&self, failed: RankFailure) -> bool {
        let is_first = self.failed.set(failed).is_ok();
        // Whoever is about to wait has checked, or will be woken up.
        drop(self.state());
        self.changed.notify_all();
        is_first
    }

    fn broadcast_failure(&self) {
        let Some(RankFailure { rank, how, why }) = self.failed() else { return };
        let mut text = vec![how.as_bytes()[0]];
        text.extend(why.bytes().take(LONGEST - 1));
        self.send(ControlFrame { seq_no: *rank as u64, text, ..self.frame(FrameKind::Failed, ALL, 0) });
    }
}

impl ControlFrame {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8];
        bytes.extend(self.from.to_le_bytes());
        bytes.extend(self.to.to_le_bytes());
        bytes.extend(self.name.to_le_bytes());
        bytes.extend(self.seq_no.to_le_bytes());
        bytes.extend((self.text.len() as u32).to_le_bytes());
        bytes.extend(&self.text);
        bytes
    }

    fn read(stream: &mut impl Read) -> std::io::Result<ControlFrame> {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header)?;
        let read_u32 = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let read_u64 = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let kinds =
            [FrameKind::Ended, FrameKind::Failed, FrameKind::Ask, FrameKind::Answer, FrameKind::Message];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == header[0]);
        let length = read_u32(25) as usize;
        let Some(kind) = kind.filter(|_| length <= LONGEST) else {
            return Err(std::io::ErrorKind::InvalidData.into());
        };
        let mut text = vec![0; length];
        stream.read_exact(&mut text)?;
        Ok(ControlFrame {
            kind,
            from: read_u32(1),
            to: read_u32(5),
            name: read_u64(9),
            seq_no: read_u64(17),
            text,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::rendezvous::RendezvousConfig;

    const LONG: Duration = Duration::from_secs(20);

    /// Ranks as threads, each with its end.
    fn ranks<R: Send>(size: usize, work: impl Fn(usize, Arc<ControlPlane>) -> R + Sync) -> Vec<R> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).unwrap();
        let one = |rank: usize| {
            let (host, ports) = ("127.0.0.1".to_owned(), vec![free.port()]);
            let config = RendezvousConfig { rank, size, local_rank: rank, host, ports };
            work(rank, ControlPlane::start(Rendezvous::connect(&config, LONG).unwrap()).unwrap())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || one(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn first_failure(control: &ControlPlane) -> RankFailure {
        let start = Instant::now();
        while control.failed().is_none() {
            assert!(start.elapsed() < LONG, "nothing was heard");
            thread::sleep(Duration::from_millis(1));
        }
        control.failed().unwrap().clone()
    }

    #[test]
    fn letters_arrive_and_all_wait_for_the_last() {
        let received = ranks(4, |rank, control| {
            (0..4)
                .filter(|&to| to != rank)
                .for_each(|to| control.post(to, rank as u64, vec![rank as u8, to as u8]));
            let from = (rank + 1) % 4;
            let letter = control.fetch(from as u64).unwrap();
            assert!(control.end(LONG) && control.failed().is_none());
            (letter, from)
        });
        for (rank, (letter, from)) in received.into_iter().enumerate() {
            assert_eq!(letter, [from as u8, rank as u8]);
        }
    }

    #[test]
    fn the_roll_names_those_who_have_not_come_and_those_who_are_silent() {
        let rolls = ranks(4, |rank, control| {
            let missing = match rank {
                1 => {
                    control.begin_call(7);
                    let seq_no = control.begin_call(7);
                    // Until the others have made their calls.
                    (0..4).filter(|&from| from != 1).for_each(|from| drop(control.fetch(100 + from as u64)));
                    control.find_missing(7, seq_no, &[0, 1, 2, 3])
                }
                // Rank 2 has made one call less.
                _ => {
                    (0..if rank == 2 { 1 } else { 2 }).for_each(|_| assert!(control.begin_call(7) < 2));
                    control.post(1, 100 + rank as u64, Vec::new());
                    Vec::new()
                }
            };
            control.end(LONG);
            missing
        });
        assert_eq!(rolls[1], [2]);
    }

    #[test]
    fn a_rank_that_fails_is_known_to_all_with_its_words() {
        for bad in [0, 2] {
            let failures = ranks(3, |rank, control| {
                if rank == bad {
                    control.fail("panicked", "the disk is on fire".into());
                }
                first_failure(&control)
            });
            for failed in failures {
                assert_eq!((failed.rank, failed.how, &*failed.why), (bad, "panicked", "the disk is on fire"));
            }
        }
    }

    /// As when a process is killed: its connections close, and nothing was sent.
    #[test]
    fn a_rank_whose_connection_closes_is_lost() {
        for bad in [0, 1] {
            let failures = ranks(3, |rank, control| {
                if rank == bad {
                    // All at once, as of a process that is killed: between two it would tell of the first.
                    let streams: Vec<_> = control.streams.iter().map(|it| it.lock().unwrap()).collect();
                    streams.iter().for_each(|stream| stream.shutdown(Shutdown::Both).unwrap());
                }
                let failed = first_failure(&control);
                (rank != bad).then_some((failed.rank, failed.how))
            });
            assert_eq!(failures.into_iter().flatten().collect::<Vec<_>>(), [(bad, "was lost"); 2]);
        }
    }
}

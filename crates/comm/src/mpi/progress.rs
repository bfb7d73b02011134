//! The thread that makes all calls of MPI: begins what it is ordered to, tests whether it is done, and answers
//! the progress threads of other ranks.
//!
//! Progress threads talk among themselves on a communicator of their own: who has made a call (asked after a
//! time-out), who has ended, who has failed. That is why it also polls for their messages while its rank
//! computes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use ferrompi::{Communicator, Mpi, Request, Scope, Source, Tag, ThreadLevel};

use super::cores::CoreSubscription;
use super::task::{MpiCall, StartedCall};
use super::{ANSWER_TIMEOUT, Delivery, DeliveryTicket, MpiWorld};
use crate::call::Operation;
use crate::data::CommBuffer;
use crate::error::{Error, Result};
use crate::failure::RankFailure;
use crate::launch::check_size;
use crate::transport::NewGroup;

/// How often it polls for messages of other progress threads while nothing is under way.
const IDLE_POLL: Duration = Duration::from_millis(1);
/// How long it rests while calls are under way that nobody waits for.
const REST: Duration = Duration::from_micros(50);
/// Polls of what is under way between two polls for such messages.
const POLLS: u32 = 64;
/// How long it keeps its core to itself while somebody waits, before it rests: a message of a megabyte is
/// there by then. It does not yield: on a core that others compute on, that would give them milliseconds, and
/// one who wakes up is let in at once.
const EAGER: Duration = Duration::from_millis(1);
/// The same where there are more ranks than cores: the time of a short message. After that the core may be
/// needed by the very rank that is waited for, and then it does yield.
const BRIEF: Duration = Duration::from_micros(20);
/// How long a failed world is given to learn of it before the process ends.
const GRACE: Duration = Duration::from_millis(300);

/// Messages among progress threads, by tag.
const ASK: i32 = 1;
const ANSWER: i32 = 2;
const ENDED: i32 = 3;
const FAILED: i32 = 4;
const PANICKED: i32 = 5;

/// What a progress thread is ordered to do.
#[derive(Debug)]
pub(super) enum ProgressCommand {
    Call(Box<MpiCall>),
    /// Find out which ranks have not made a call.
    QueryMissing {
        group: usize,
        ticket: Arc<DeliveryTicket>,
        answer: Sender<Vec<usize>>,
    },
    /// The rank's work has ended.
    Ended(RankEnding),
}

#[derive(Debug)]
pub(super) enum RankEnding {
    Well,
    Failed(String),
    Panicked(String),
}

/// Who a progress thread works for: its world, the ranks of it, and its own number.
pub(super) type ProgressContext = (Arc<MpiWorld>, Arc<[usize]>, usize);

struct CommPair {
    /// For the first requests of calls, in the order of calls.
    comm: Communicator,
    /// For second requests. MPI wants all ranks to begin collective requests of a communicator in one order,
    /// and second ones are begun when first ones are done: in the order of calls again, but anywhere between
    /// first ones.
    second: Communicator,
    members: Arc<[usize]>,
    /// Tells the group apart from all others, on all its ranks alike.
    name: u64,
    /// Collective calls that were begun.
    seq_no: u64,
}

/// A question that others have not all answered yet.
struct MissingRanksQuery {
    name: u64,
    seq_no: u64,
    silent: Vec<usize>,
    missing: Vec<usize>,
    until: Instant,
    answer: Sender<Vec<usize>>,
}

pub(super) struct ProgressThread<'s, 'env> {
    scope: &'s Scope<'s, 'env>,
    world: Arc<MpiWorld>,
    rank: usize,
    groups: Vec<CommPair>,
    tasks: Vec<StartedCall<'s>>,
    control: Communicator,
    /// Messages to progress threads that are still being sent.
    sending: Vec<(Request<'s>, Box<[u8]>)>,
    queries: Vec<MissingRanksQuery>,
    ended: Vec<bool>,
    cores: CoreSubscription,
}

impl ProgressThread<'_, '_> {
    /// The life of the thread: starts MPI, says so, works, and shuts MPI down again.
    pub(super) fn run(
        orders: Receiver<ProgressCommand>,
        ready: Sender<Result<ProgressContext>>,
        closed: Sender<()>,
    ) {
        let refused =
            |error: ferrompi::Error| Error::Launch { what: format!("MPI cannot be started: {error}") };
        let mpi = match Mpi::init_thread(ThreadLevel::Funneled) {
            Ok(mpi) => mpi,
            Err(error) => return drop(ready.send(Err(refused(error)))),
        };
        let world = mpi.world();
        let (rank, ranks) = (world.rank() as usize, world.size() as usize);
        let prepare = || -> Result<_> {
            check_size(ranks, |name| std::env::var(name).ok())?;
            let duplicate = || world.duplicate().map_err(refused);
            Ok(([duplicate()?, duplicate()?, duplicate()?], CoreSubscription::of(&world).map_err(refused)?))
        };
        let ([comm, second, control], cores) = match prepare() {
            Ok(prepared) => prepared,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let shared = Arc::<MpiWorld>::default();
        let members: Arc<[usize]> = (0..ranks).collect();
        let _ = ready.send(Ok((shared.clone(), members.clone(), rank)));
        let worked = ferrompi::scope(|scope| {
            let mut progress = ProgressThread {
                scope,
                world: shared,
                rank,
                groups: vec![CommPair { comm, second, members, name: 0, seq_no: 0 }],
                tasks: Vec::new(),
                control,
                sending: Vec::new(),
                queries: Vec::new(),
                ended: vec![false; ranks],
                cores,
            };
            if progress.work(&orders) {
                return Ok(());
            }
            // Some of what is under way will never be done, and MPI cannot be shut down: the process ends without.
            let _ = closed.send(());
            loop {
                std::thread::park();
            }
        });
        drop(mpi);
        debug_assert!(worked.is_ok(), "nothing was under way: {worked:?}");
        let _ = closed.send(());
    }

    /// Works until all ranks have ended; returns whether MPI can be shut down.
    fn work(&mut self, orders: &Receiver<ProgressCommand>) -> bool {
        let (mut ending, mut polls, mut moved) = (None, 0u32, Instant::now());
        loop {
            let mut busy = false;
            while let Ok(order) = orders.try_recv() {
                busy = true;
                if self.execute(order) {
                    ending = Some(Instant::now());
                }
            }
            busy |= self.poll_calls();
            polls = polls.wrapping_add(1);
            if self.tasks.is_empty() || polls.is_multiple_of(POLLS) {
                self.poll_control();
            }
            if let Some(since) = ending {
                let (all, failed) =
                    (self.ended.iter().all(|&ended| ended), self.world.failed.get().is_some());
                if all && !failed && self.tasks.is_empty() && self.sending.is_empty() {
                    return true;
                }
                // Where all have ended well, a request was dropped and its peer has ended: it will never be done.
                let late = since.elapsed() > GRACE;
                if (all && failed) || (late && (all || failed)) {
                    return false;
                }
            }
            if busy {
                moved = Instant::now();
            } else if let Err(order) = self.rest(orders, &mut moved) {
                moved = Instant::now();
                if self.execute(order) {
                    ending = Some(moved);
                }
            }
        }
    }

    /// Waits a little, less where somebody waits for what is under way and it has `moved` lately; an order
    /// that comes meanwhile is an `Err`.
    fn rest(&self, orders: &Receiver<ProgressCommand>, moved: &mut Instant) -> Result<(), ProgressCommand> {
        let waited_for = self.world.waiting.load(Ordering::Relaxed) > 0;
        let time = match (self.tasks.is_empty(), waited_for) {
            (true, _) => IDLE_POLL,
            (false, false) => REST,
            (false, true) => match (self.cores, moved.elapsed()) {
                (CoreSubscription::CoreEach, still) if still >= EAGER => {
                    // Long messages move only while they are polled: after this rest it is eager again.
                    *moved = Instant::now() + REST;
                    REST
                }
                (CoreSubscription::Oversubscribed, still) if still >= BRIEF => {
                    std::thread::yield_now();
                    return Ok(());
                }
                _ => {
                    std::hint::spin_loop();
                    return Ok(());
                }
            },
        };
        match orders.recv_timeout(time) {
            Ok(order) => return Err(order),
            Err(RecvTimeoutError::Timeout) => {}
            // The rank is gone without a word, which `mpi::run` does not let happen.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(time),
        }
        Ok(())
    }

    /// Carries out an order; returns whether it was the last.
    fn execute(&mut self, order: ProgressCommand) -> bool {
        match order {
            ProgressCommand::Call(job) => self.begin(job),
            ProgressCommand::QueryMissing { group, ticket, answer } => {
                self.query_missing(group, &ticket, answer)
            }
            ProgressCommand::Ended(ending) => {
                let (tag, text) = match ending {
                    RankEnding::Well => (ENDED, String::new()),
                    RankEnding::Failed(text) => (FAILED, text),
                    RankEnding::Panicked(text) => (PANICKED, text),
                };
                let this_rank = self.rank;
                for rank in (0..self.ended.len()).filter(|&rank| rank != this_rank) {
                    self.send_control(rank, tag, text.as_bytes());
                }
                self.note_end(this_rank, tag, &text);
                return true;
            }
        }
        false
    }

    fn begin(&mut self, job: Box<MpiCall>) {
        if let Some(failed) = self.world.failed.get() {
            return job.ticket.deliver(Err(failed.stops(job.ticket.rank, job.ticket.call)));
        }
        let group = &mut self.groups[job.group];
        if !matches!(job.ticket.call.operation, Operation::Send { .. } | Operation::Receive { .. }) {
            let _ = job.ticket.seq_no.set(group.seq_no);
            group.seq_no += 1;
        }
        match StartedCall::start(job, &group.comm, self.scope) {
            Ok(task) => self.tasks.push(task),
            Err((job, error)) => {
                let (rank, call) = (job.ticket.rank, job.ticket.call);
                job.ticket.deliver(Err(Error::Carrier { rank, call, why: error.to_string() }));
            }
        }
    }

    /// Polls everything under way; returns whether anything moved.
    fn poll_calls(&mut self) -> bool {
        let mut moved = false;
        let mut at = 0;
        // Groups in which a call is before its second request, so that later ones must wait with theirs.
        let mut blocked = Vec::new();
        while at < self.tasks.len() {
            let task = &mut self.tasks[at];
            let group = task.job.group;
            let result = if task.has_second() && blocked.contains(&group) {
                Ok(false)
            } else {
                task.step(&self.groups[group].second, self.scope)
            };
            if let Ok(false) = result {
                if task.has_second() {
                    blocked.push(group);
                }
                at += 1;
                continue;
            }
            moved = true;
            let task = self.tasks.remove(at);
            if !task.is_idle() {
                // MPI reported an error and may still write: the memory is given up.
                task.job.ticket.deliver(Err(result.expect_err("a call that is done has no request left")));
                std::mem::forget(task);
                continue;
            }
            let ticket = task.job.ticket.clone();
            ticket.deliver(result.and_then(|_| self.delivery(*task.job)));
        }
        moved
    }

    fn delivery(&mut self, job: MpiCall) -> Result<Delivery> {
        let (rank, call) = (job.ticket.rank, job.ticket.call);
        if call.operation != Operation::Split {
            return Ok(Delivery::Data(job.buffers.write.or(job.buffers.read)));
        }
        let group = &self.groups[job.group];
        let Some(CommBuffer::U64(choices)) = &job.buffers.write else {
            unreachable!("a split gathers numbers")
        };
        let group_rank = group.comm.rank() as usize;
        let new = NewGroup::of(choices, group_rank);
        let (number, key) = (new.as_ref().map(NewGroup::number), new.as_ref().map_or(0, |new| new.rank));
        // All ranks of the group have made this call, or their choices would not be here: it waits for nobody.
        let made = group.comm.split(number.map(|number| number as i32), key as i32);
        let refused = |error: ferrompi::Error| Error::Carrier { rank, call, why: error.to_string() };
        let (Some(comm), Some(new)) = (made.map_err(refused)?, new) else {
            return Ok(Delivery::Group(None));
        };
        let second = comm.duplicate().map_err(refused)?;
        let members: Arc<[usize]> = new.members.iter().map(|&rank| group.members[rank]).collect();
        let seq_no = job.ticket.seq_no.get().copied().unwrap_or_default();
        let name = NewGroup::name(group.name, seq_no, choices[2 * group_rank]);
        self.groups.push(CommPair { comm, second, members: members.clone(), name, seq_no: 0 });
        Ok(Delivery::Group(Some((self.groups.len() - 1, members, new.rank))))
    }

    fn query_missing(&mut self, group: usize, ticket: &DeliveryTicket, answer: Sender<Vec<usize>>) {
        let (group, Some(&seq_no)) = (&self.groups[group], ticket.seq_no.get()) else {
            return drop(answer.send(Vec::new()));
        };
        let name = group.name;
        let silent: Vec<usize> = group.members.iter().copied().filter(|&rank| rank != self.rank).collect();
        let question = bytes(&[name, seq_no]);
        for &rank in &silent {
            self.send_control(rank, ASK, &question);
        }
        let until = Instant::now() + ANSWER_TIMEOUT;
        self.queries.push(MissingRanksQuery { name, seq_no, silent, missing: Vec::new(), until, answer });
    }

    /// Sends a few bytes to another progress thread.
    fn send_control(&mut self, rank: usize, tag: i32, message: &[u8]) {
        // Longer ones might wait for the other side to poll.
        let message: Box<[u8]> = message[..message.len().min(2048)].into();
        // SAFETY: the box stays in `sending` until it was sent.
        let still: &'static [u8] = unsafe { std::slice::from_raw_parts(message.as_ptr(), message.len()) };
        // A rank that cannot be reached will time out by itself.
        if let Ok(request) = self.control.isend(self.scope, still, rank as i32, tag) {
            self.sending.push((request, message));
        }
    }

    /// Receives the messages of other progress threads, and answers.
    fn poll_control(&mut self) {
        self.sending.retain_mut(|(request, _)| !matches!(request.test(), Ok(Some(_))));
        while let Ok(Some(status)) = self.control.iprobe::<u8>(Source::Any, Tag::Any) {
            let (Source::Rank(from), Tag::Value(tag)) = (status.source, status.tag) else { break };
            let mut message = vec![0u8; status.count.unwrap_or(0)];
            if self.control.recv(&mut message, from, tag).is_err() {
                break;
            }
            self.handle_control(from as usize, tag, &message);
        }
        let now = Instant::now();
        self.queries.retain_mut(|query| {
            let over = query.silent.is_empty() || now >= query.until;
            if over {
                let mut missing = std::mem::take(&mut query.missing);
                missing.append(&mut query.silent);
                missing.sort_unstable();
                let _ = query.answer.send(missing);
            }
            !over
        });
    }

    fn handle_control(&mut self, from: usize, tag: i32, message: &[u8]) {
        match (tag, &to_u64s(message)[..]) {
            (ASK, &[name, seq_no]) => {
                let arrived = self.groups.iter().any(|group| group.name == name && group.seq_no > seq_no);
                self.send_control(from, ANSWER, &bytes(&[name, seq_no, arrived.into()]));
            }
            (ANSWER, &[name, seq_no, arrived]) => {
                for query in
                    self.queries.iter_mut().filter(|query| (query.name, query.seq_no) == (name, seq_no))
                {
                    query.silent.retain(|&rank| rank != from);
                    if arrived == 0 {
                        query.missing.push(from);
                    }
                }
            }
            (ENDED | FAILED | PANICKED, _) => self.note_end(from, tag, &String::from_utf8_lossy(message)),
            _ => {}
        }
    }

    /// A rank has ended; where it failed, so does everything that is under way.
    fn note_end(&mut self, rank: usize, tag: i32, text: &str) {
        self.ended[rank] = true;
        let how = match tag {
            FAILED => "failed",
            PANICKED => "panicked",
            _ => return,
        };
        let failed = self.world.failed.get_or_init(|| RankFailure { rank, how, why: text.to_owned() });
        for task in &self.tasks {
            let ticket = &task.job.ticket;
            ticket.deliver(Err(failed.stops(ticket.rank, ticket.call)));
        }
    }
}

fn bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn to_u64s(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&number| u64::from_le_bytes(number)).collect()
}

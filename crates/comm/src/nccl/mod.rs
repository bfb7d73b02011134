//! Ranks as processes with a card each, connected by NCCL.
//!
//! A launcher says who they are and where rank 0 is ([`Place`]); over that rendezvous they agree on
//! NCCL's id, and NCCL does the rest. Calls are queued beside the card's compute stream and go on while it computes. A wait
//! looks until the call is done on the card, so that it can be given up.
//!
//! Where NCCL differs from the other transports, and why:
//! - It has no tags. Messages from one rank to another must be received in the order in which they are sent, and a rank
//!   sends nothing to itself.
//! - Messages to higher and to lower ranks go on lines of their own. On each they are carried out in the order of calls: ranks
//!   in a row may all send before they receive, but a message does not overtake another to a third rank.
//! - It cannot tell who is missing. A time-out names all that may be.
//! - Sums are taken in NCCL's order, which is the same every time on the same machines, but not the order of ranks; those of
//!   bf16, which gradients are, in the order of ranks (`exchange`).
//! - Ranks that share a card are refused, by NCCL.

mod exchange;
mod library;
mod line;
mod part;

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, DType, Device, Tensor};
use exchange::{Exchange, Wire};
use library::{Nccl, UniqueId, datatype, operation};
use line::Line;
use part::Part;

use crate::call::{Call, Operation, Reduce};
use crate::communicator::Communicator;
use crate::data::{Data, Element};
use crate::error::{Error, Result, Seconds};
use crate::failure::{Failure, panic_message};
use crate::mark::Mark;
use crate::rendezvous::{Place, Rendezvous};
use crate::transport::{CallBuffers, NewGroup, Pending, Transport, choice};

/// How long a wait keeps its core before it lets others have it between two looks.
const EAGER: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);

/// The version of NCCL that was found, or why none was.
pub fn version() -> Result<String> {
    Ok(Nccl::get()?.version())
}

/// Runs `work` as the rank that a launcher made this process, and returns what it returns.
///
/// Others learn of a rank that fails by waiting for it, at most `limit`, unless their launcher ends them first.
pub fn run<R, E>(
    cuda: &Cuda,
    place: &Place,
    limit: Duration,
    work: impl FnOnce(Communicator) -> Result<R, E>,
) -> Result<R, Failure<E>>
where
    E: Debug + Display,
{
    let mut rendezvous = Rendezvous::meet(place, limit).map_err(Failure::Launch)?;
    let comm = connect(cuda, &mut rendezvous, limit).map_err(Failure::Launch)?;
    match catch_unwind(AssertUnwindSafe(|| work(comm))) {
        Ok(outcome) => outcome.map_err(|error| Failure::Failed { rank: place.rank, error }),
        Err(panic) => Err(Failure::Panicked { rank: place.rank, message: panic_message(panic.as_ref()) }),
    }
}

/// Connects the ranks of a rendezvous, each by its card. A call waits at most `limit`, and so does this.
pub fn connect(cuda: &Cuda, rendezvous: &mut Rendezvous, limit: Duration) -> Result<Communicator> {
    let nccl = Nccl::get()?;
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let failed =
        |why: String| Error::Launch { what: format!("rank {rank} cannot be connected by NCCL: {why}") };
    let mut own = UniqueId([0; 128]);
    if rank == 0 {
        // SAFETY: NCCL writes the id.
        nccl.check(unsafe { (nccl.get_unique_id)(&mut own) }).map_err(failed)?;
    }
    let ids = rendezvous.gather(&own.0.map(|c| c as u8), limit)?;
    let id: [u8; 128] = ids[0][..].try_into().map_err(|_| failed("rank 0 sent no id".to_owned()))?;
    let id = UniqueId(id.map(|byte| byte as _));
    let lines = within(limit, cuda.clone(), move |cuda| {
        let collective = Line::connect(nccl, &cuda, id, rank, size)?;
        Lines::around(collective, rank)
    });
    let lines = lines.map_err(failed)?;
    let members = (0..size).collect();
    let end = End { cuda: cuda.clone(), lines: Arc::new(lines), members, rank };
    Ok(Communicator::new(Arc::new(end), limit))
}

/// Runs what may wait for ever on a thread of its own, for so long.
fn within<A: Send + 'static, R: Send + 'static>(
    limit: Duration,
    with: A,
    work: impl FnOnce(A) -> Result<R, String> + Send + 'static,
) -> Result<R, String> {
    let (done, result) = mpsc::channel();
    let thread = thread::Builder::new().name("espalier-nccl".into());
    thread.spawn(move || done.send(work(with))).map_err(|e| e.to_string())?;
    result
        .recv_timeout(limit)
        .unwrap_or_else(|_| Err(format!("the other ranks did not come within {}", Seconds(limit))))
}

/// The lines of a group.
#[derive(Debug)]
struct Lines {
    collective: Line,
    /// Messages to higher ranks.
    up: Line,
    /// Messages to lower ranks.
    down: Line,
}

impl Lines {
    /// A line for collectives, and two more among the same ranks.
    fn around(collective: Line, rank: usize) -> Result<Lines, String> {
        let another =
            || collective.split(Some(0), rank)?.ok_or_else(|| "NCCL gave no communicator".to_owned());
        let (up, down) = (another()?, another()?);
        Ok(Lines { collective, up, down })
    }

    /// The line of a call that a rank makes.
    fn of(&self, call: Call, rank: usize) -> &Line {
        match call.operation {
            Operation::Send { to, .. } if to > rank => &self.up,
            Operation::Receive { from, .. } if from < rank => &self.up,
            Operation::Send { .. } | Operation::Receive { .. } => &self.down,
            _ => &self.collective,
        }
    }
}

/// One rank's end of a group.
#[derive(Debug)]
struct End {
    cuda: Cuda,
    lines: Arc<Lines>,
    members: Arc<[usize]>,
    rank: usize,
}

impl End {
    fn start(&self, buffers: CallBuffers) -> Result<Waiting> {
        let call = buffers.call;
        let rank = self.members[self.rank];
        let failed = |why: String| Error::Carrier { rank, call, why };
        if let Operation::Send { to: peer, .. } | Operation::Receive { from: peer, .. } = call.operation
            && peer == self.rank
        {
            let problem = "NCCL carries no messages from a rank to itself".to_owned();
            return Err(Error::Argument { rank, call, problem });
        }
        let sums = matches!(
            call.operation,
            Operation::AllReduce(Reduce::Sum) | Operation::ReduceScatter(Reduce::Sum)
        );
        let (n, size) = (call.elements, self.members.len());
        let exchange = Exchange { elements: n, ranks: size, rank: self.rank };
        let scratch = (sums && call.element == Some(Element::Bf16)).then(|| {
            let device = Device::Cuda(self.cuda.clone());
            Tensor::empty(&device, &[exchange.scratch()], DType::Bf16, Category::Communication)
        });
        let scratch = scratch.transpose().map_err(|e| failed(e.to_string()))?;
        // What is written is read as well where the call works in place.
        let in_place = matches!(call.operation, Operation::AllReduce(_) | Operation::Broadcast { .. });
        let (mut read, mut write) = (buffers.read, buffers.write);
        if call.operation == Operation::Barrier {
            write = Some(Data::U64(vec![0]));
        }
        let part = |data: Data, reads: bool| Part::new(&self.cuda, data, reads).map_err(failed);
        let read = read.take().map(|data| part(data, true)).transpose()?;
        let write = write.take().map(|data| part(data, in_place)).transpose()?;

        let kind = datatype(call.element.unwrap_or(Element::U64));
        let address = |part: &Option<Part>| part.as_ref().map_or(0, Part::address);
        let (from, to) = (address(&read), address(&write));
        let line = self.lines.of(call, self.rank);
        let mark = line.queue(|nccl, comm, beside| {
            let stream = beside.compute().raw();
            if let Some(scratch) = &scratch {
                let wire = Wire { nccl, comm, beside, scratch: scratch.cuda_buffer().address() };
                // SAFETY: as below; the scratch space too is kept until the call is done.
                return unsafe {
                    match call.operation {
                        Operation::ReduceScatter(_) => wire.reduce_scatter(exchange, from, to),
                        _ => wire.all_reduce(exchange, to),
                    }
                };
            }
            // SAFETY: the addresses are of tensors on this card with as many elements, which the request keeps until the
            // call is done, and which the compute stream has finished with.
            let code = unsafe {
                match call.operation {
                    Operation::Send { to, .. } => (nccl.send)(from, n, kind, to as i32, comm, stream),
                    Operation::Receive { from, .. } => (nccl.receive)(to, n, kind, from as i32, comm, stream),
                    Operation::Broadcast { root } => {
                        (nccl.broadcast)(to, to, n, kind, root as i32, comm, stream)
                    }
                    Operation::AllReduce(how) => {
                        (nccl.all_reduce)(to, to, n, kind, operation(how), comm, stream)
                    }
                    Operation::ReduceScatter(how) => {
                        (nccl.reduce_scatter)(from, to, n / size, kind, operation(how), comm, stream)
                    }
                    Operation::AllGather | Operation::Split => {
                        (nccl.all_gather)(from, to, n / size, kind, comm, stream)
                    }
                    Operation::Barrier => {
                        (nccl.all_reduce)(to, to, 1, kind, operation(Reduce::Sum), comm, stream)
                    }
                }
            };
            nccl.check(code)
        });
        let mark = mark.map_err(failed)?;
        Ok(Waiting {
            lines: self.lines.clone(),
            members: self.members.clone(),
            group_rank: self.rank,
            call,
            under_way: Some(UnderWay { mark, read, write, _scratch: scratch }),
        })
    }
}

impl Transport for End {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn start(&self, buffers: CallBuffers, _attended: bool) -> Result<Box<dyn Pending>> {
        Ok(Box::new(End::start(self, buffers)?))
    }

    fn split(
        &self,
        colour: Option<usize>,
        key: usize,
        limit: Duration,
    ) -> Result<Option<Arc<dyn Transport>>> {
        let choice = Data::U64(choice(colour, key).to_vec());
        let choices = Data::U64(vec![0; 2 * self.members.len()]);
        let call = Call::of(Operation::Split, &choices);
        let waiting = End::start(self, CallBuffers { call, read: Some(choice), write: Some(choices) })?;
        let Some(Data::U64(choices)) = Box::new(waiting).wait(limit)? else {
            unreachable!("what was gathered comes back as it went in");
        };
        let new = NewGroup::of(&choices, self.rank);
        let (number, key) = (new.as_ref().map(NewGroup::number), new.as_ref().map_or(0, |new| new.rank));
        let split = within(limit, self.lines.clone(), move |lines| {
            let line = lines.collective.split(number, key)?;
            line.map(|line| Lines::around(line, key)).transpose()
        });
        let failed = |why: String| Error::Carrier { rank: self.members[self.rank], call, why };
        let (Some(lines), Some(new)) = (split.map_err(failed)?, new) else { return Ok(None) };
        let members = new.members.iter().map(|&rank| self.members[rank]).collect();
        let (cuda, lines) = (self.cuda.clone(), Arc::new(lines));
        Ok(Some(Arc::new(End { cuda, lines, members, rank: new.rank })))
    }
}

/// A call that was queued.
struct Waiting {
    lines: Arc<Lines>,
    members: Arc<[usize]>,
    group_rank: usize,
    call: Call,
    under_way: Option<UnderWay>,
}

struct UnderWay {
    mark: Mark,
    read: Option<Part>,
    write: Option<Part>,
    /// Where the shares of other ranks come.
    _scratch: Option<Tensor>,
}

impl Waiting {
    fn line(&self) -> &Line {
        self.lines.of(self.call, self.group_rank)
    }

    fn failed(&self, why: String) -> Error {
        Error::Carrier { rank: self.members[self.group_rank], call: self.call, why }
    }

    fn has_passed(&self) -> Result<bool> {
        let Some(UnderWay { mark, .. }) = &self.under_way else { return Ok(true) };
        self.line().has_passed(mark).map_err(|why| self.failed(why))
    }

    fn timed_out(&self, waited: Duration) -> Error {
        let rank = self.members[self.group_rank];
        let (among, missing) = match self.call.operation {
            Operation::Send { to: peer, .. } | Operation::Receive { from: peer, .. } => {
                (Vec::new(), vec![self.members[peer]])
            }
            _ => {
                let others = self.members.iter().copied().filter(|&member| member != rank);
                (self.members.to_vec(), others.collect())
            }
        };
        Error::TimedOut { rank, call: self.call, among, waited, missing }
    }
}

impl Pending for Waiting {
    fn is_done(&mut self) -> Result<bool> {
        self.has_passed()
    }

    fn wait(mut self: Box<Self>, limit: Duration) -> Result<Option<Data>> {
        let start = Instant::now();
        loop {
            let waited = start.elapsed();
            let passed = self.has_passed();
            if let Ok(true) = passed {
                break;
            }
            if passed.is_err() || waited >= limit {
                // The card may still write: the memory is given up, and the line with it.
                self.line().give_up();
                std::mem::forget(self.under_way.take());
                passed?;
                return Err(self.timed_out(waited));
            }
            if waited < EAGER { std::hint::spin_loop() } else { thread::sleep(PAUSE) }
        }
        let UnderWay { read, write, .. } = self.under_way.take().expect("waited for once");
        match (write, read) {
            (Some(write), _) => write.written().map(Some).map_err(|why| self.failed(why)),
            (None, read) => Ok(read.map(Part::untouched)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some(under_way) = self.under_way.take() else { return };
        // Memory is handed on in the order of the compute stream: that has to wait for the call, then.
        if self.line().hold_back_compute(&under_way.mark).is_err() {
            std::mem::forget(under_way);
        }
    }
}

//! Ranks as processes with a GPU each, or a part of one, connected by NCCL.
//!
//! A launcher says who they are and where rank 0 is ([`RendezvousConfig`]). Over that rendezvous they find
//! each other; it stays open and reports a rank that fails or is killed (`control`). Collective calls of a
//! group are carried out by a thread of its own (`collectives`), messages by one for each pair of ranks and
//! direction (`links`), beside the GPU's compute stream. A rank itself makes no call of NCCL: it waits for
//! those threads, and at most as long as its limit. The process should end without the handlers of the C
//! library: NCCL's own threads are still there and, after a failure, one of ours in a call that never
//! returns.
//!
//! Where NCCL differs from the other transports, and why:
//! - A rank sends nothing to itself.
//! - Sums of floating-point numbers are ours, in the order of ranks, so that they have the bits that they
//!   have among threads (`ordered_reduce`); NCCL's own are those of two ranks in f32, where there is only one
//!   order.
//! - Ranks that share a GPU are refused by NCCL, unless it is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE is 1.

mod channel;
mod collectives;
mod frame;
mod inbound;
mod library;
mod links;
mod ordered_reduce;
mod outbound;
mod staged_buffer;

use std::fmt::{Debug, Display};
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use channel::NcclRank;
use collectives::{CollectiveCommand, GroupMembership, NcclCall, StagedBuffers};
use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, DType, Device, Tensor};
use frame::LinkTransfer;
use library::Nccl;
use links::PeerLinks;
use ordered_reduce::OrderedReduce;
use staged_buffer::StagedBuffer;

use crate::call::{Call, Operation, Reduce};
use crate::communicator::Communicator;
use crate::control::ControlPlane;
use crate::data::{CommBuffer, ElementType};
use crate::error::{DisplaySeconds, Error, Result};
use crate::failure::{Failure, panic_message};
use crate::reduce::reduce_gathered;
use crate::rendezvous::{Rendezvous, RendezvousConfig};
use crate::single_rank::SingleRank;
use crate::ticket::Ticket;
use crate::transport::{CallBuffers, NewGroup, Pending, SplitChoice, Transport};

/// How long a rank that waits keeps its core.
const EAGER: Duration = Duration::from_millis(1);
/// How long it then sleeps before it checks whether a rank has failed.
const GLANCE: Duration = Duration::from_millis(20);
/// How much later than the rank that failed first all others end: a launcher ends the whole job with the
/// first process that ends badly, and that one should have said why.
const AFTER_YOU: Duration = Duration::from_millis(200);

/// The version of NCCL that was found, or why none was.
pub fn version() -> Result<String> {
    Ok(Nccl::get()?.version())
}

/// Runs `work` as the rank that a launcher made this process, and returns what it returns.
///
/// A call waits at most `limit`, and so do finding and connecting the others. Where a rank fails, panics or
/// is killed, the waits of all others end at once.
pub fn run<R, E>(
    cuda: &Cuda,
    config: &RendezvousConfig,
    limit: Duration,
    work: impl FnOnce(Communicator) -> Result<R, E>,
) -> Result<R, Failure<E>>
where
    E: Debug + Display,
{
    let rank = config.rank;
    let (world, control) = join(cuda, config, limit).map_err(Failure::Launch)?;
    let connected = match NcclGroup::connect(
        &world,
        GroupMembership { name: 0, members: (0..config.size).collect(), rank },
        limit,
    ) {
        Ok(transport) => Communicator::new(transport, limit),
        Err(error) => {
            control.fail("failed", error.to_string());
            return Err(Failure::Launch(error));
        }
    };
    // Held by groups alone from here on.
    drop(world);
    match catch_unwind(AssertUnwindSafe(|| work(connected))) {
        Ok(Ok(result)) => {
            if !control.end(limit) {
                let waited = DisplaySeconds(limit);
                let what = format!(
                    "rank {rank} has ended, and another has not for {waited} since: it has stopped, or is slower than that"
                );
                return Err(Failure::Launch(Error::Launch { what }));
            }
            if let Some(failed) = control.failed() {
                thread::sleep(AFTER_YOU);
                return Err(Failure::Peer { rank: failed.rank, how: failed.how, why: failed.why.clone() });
            }
            Ok(result)
        }
        Ok(Err(error)) => {
            control.fail("failed", error.to_string());
            if control.failed().is_some_and(|failed| failed.rank != rank) {
                thread::sleep(AFTER_YOU);
            }
            Err(Failure::Failed { rank, error })
        }
        Err(panic) => {
            let message = panic_message(panic.as_ref());
            control.fail("panicked", message.clone());
            Err(Failure::Panicked { rank, message })
        }
    }
}

/// Finds the other ranks.
fn join(
    cuda: &Cuda,
    config: &RendezvousConfig,
    limit: Duration,
) -> Result<(Arc<NcclWorld>, Arc<ControlPlane>)> {
    let nccl = Nccl::get()?;
    let launch =
        |why: String| Error::Launch { what: format!("rank {} cannot be joined by NCCL: {why}", config.rank) };
    let mut rendezvous = Rendezvous::connect(config, limit)?;
    let door = TcpListener::bind(("::", 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let door = door.map_err(|e| launch(format!("no port for its messages: {e}")))?;
    let port = door.local_addr().map_err(|e| launch(e.to_string()))?.port();
    let addresses = rendezvous.addresses(port, limit)?;
    let control = ControlPlane::start(rendezvous)?;
    let shared = NcclRank { nccl, cuda: cuda.clone(), control: control.clone() };
    let links = PeerLinks::open(shared.clone(), door, addresses, limit).map_err(launch)?;
    Ok((Arc::new(NcclWorld { shared, links }), control))
}

/// What all groups of a rank share.
#[derive(Debug)]
struct NcclWorld {
    shared: NcclRank,
    links: Arc<PeerLinks>,
}

/// One rank's end of a group.
#[derive(Debug, Clone)]
struct NcclGroup {
    world: Arc<NcclWorld>,
    membership: GroupMembership,
    orders: Sender<CollectiveCommand>,
}

impl NcclGroup {
    /// Connects the ranks of a group, all of which must come.
    fn connect(
        world: &Arc<NcclWorld>,
        membership: GroupMembership,
        limit: Duration,
    ) -> Result<Arc<dyn Transport>> {
        let rank = membership.world_rank();
        if membership.members.len() == 1 {
            return Ok(Arc::new(SingleRank::new(rank)));
        }
        let call = Call::empty(Operation::Split);
        let failed = |why: String| Error::Carrier { rank, call, why };
        let orders = collectives::start(&world.shared, membership.clone()).map_err(failed)?;
        let group = NcclGroup { world: world.clone(), membership, orders };
        let ticket = group.ticket(call);
        group.order(CollectiveCommand::Connect(ticket.clone()), call)?;
        group.wait(&ticket, limit)?;
        Ok(Arc::new(group))
    }

    /// A ticket of a collective call.
    fn ticket<T>(&self, call: Call) -> Arc<Ticket<T>> {
        let ticket = Ticket::new(self.membership.world_rank(), call);
        let _ = ticket.seq_no.set(self.world.shared.control.begin_call(self.membership.name));
        ticket
    }

    fn order(&self, order: CollectiveCommand, call: Call) -> Result<()> {
        let rank = self.membership.world_rank();
        let control = &self.world.shared.control;
        if let Some(failed) = control.failed() {
            return Err(failed.stops(rank, call));
        }
        let ended = |_| Error::Carrier { rank, call, why: "the thread of its group has ended".into() };
        self.orders.send(order).map_err(ended)
    }

    /// Waits for what was ordered, or names the ranks that have not made the call.
    fn wait<T>(&self, ticket: &Ticket<T>, limit: Duration) -> Result<T> {
        let (start, control) = (Instant::now(), &self.world.shared.control);
        if let Some(result) = ticket.spin(limit.min(EAGER)) {
            return result;
        }
        loop {
            let left = limit.saturating_sub(start.elapsed());
            if let Some(result) = ticket.wait(left.min(GLANCE)) {
                return result;
            }
            if let Some(failed) = control.failed() {
                return Err(failed.stops(ticket.rank, ticket.call));
            }
            if left.is_zero() {
                let GroupMembership { name, members, .. } = &self.membership;
                let seq_no = ticket.seq_no.get().copied().unwrap_or_default();
                let missing = || control.find_missing(*name, seq_no, members);
                return ticket.timed_out(members, start.elapsed(), missing);
            }
        }
    }

    fn start_message(&self, buffers: CallBuffers, peer: usize, tag: u32) -> Result<NcclMessage> {
        let (call, rank) = (buffers.call, self.membership.world_rank());
        if peer == self.membership.rank {
            let problem = "NCCL carries no messages from a rank to itself".to_owned();
            return Err(Error::Argument { rank, call, problem });
        }
        let failed = |why: String| Error::Carrier { rank, call, why };
        if let Some(failed) = self.world.shared.control.failed() {
            return Err(failed.stops(rank, call));
        }
        let (is_sent, data) = match (buffers.read, buffers.write) {
            (Some(read), _) => (true, read),
            (None, write) => (false, write.expect("a message has data")),
        };
        let on_gpu = !data.on_host() && !data.is_empty();
        let ready = on_gpu.then(|| self.world.shared.mark()).transpose().map_err(failed)?;
        let ticket = Ticket::new(rank, call);
        let transfer = LinkTransfer { key: (self.membership.name, tag), data, ready, ticket: ticket.clone() };
        let (links, peer) = (&self.world.links, self.membership.members[peer]);
        let started = if is_sent { links.send(peer, transfer) } else { links.receive(peer, transfer) };
        started.map_err(failed)?;
        Ok(NcclMessage { group: self.clone(), ticket })
    }

    fn start_collective(&self, buffers: CallBuffers) -> Result<NcclCollective> {
        let CallBuffers { call, read, write } = buffers;
        let (rank, size) = (self.membership.world_rank(), self.membership.members.len());
        let shared = &self.world.shared;
        let failed = |why: String| Error::Carrier { rank, call, why };
        let (mut operation, mut elements) = (call.operation, call.elements);
        let (mut read, mut write, mut reduced) = (read, write, None);
        match (operation, write.take()) {
            (Operation::Barrier, _) => write = Some(CommBuffer::U64(vec![0])),
            // Numbers of the host are few: all get those of all, and add them up in the order of ranks.
            (Operation::AllReduce(how), Some(local)) if local.on_host() && !local.is_empty() => {
                write = Some(match local.element() {
                    ElementType::U64 => CommBuffer::U64(vec![0; size * elements]),
                    ElementType::F64 => CommBuffer::F64(vec![0.0; size * elements]),
                    _ => return Err(failed("tensors of the host are not reduced by NCCL".into())),
                });
                (operation, elements) = (Operation::AllGather, size * elements);
                reduced = Some(how);
                read = Some(local);
            }
            (_, other) => write = other,
        }
        // What is written is read as well where the call works in place.
        let in_place =
            matches!(operation, Operation::AllReduce(_) | Operation::Broadcast { .. } | Operation::Barrier);
        let element = call.element.unwrap_or(ElementType::U64);
        let reduces =
            matches!(operation, Operation::AllReduce(Reduce::Sum) | Operation::ReduceScatter(Reduce::Sum));
        let ours = reduces && (element == ElementType::Bf16 || element == ElementType::F32 && size > 2);
        let scratch = ours.then(|| {
            let dtype = if element == ElementType::Bf16 { DType::Bf16 } else { DType::F32 };
            let layout = OrderedReduce { elements, ranks: size, rank: self.membership.rank };
            let device = Device::Cuda(shared.cuda.clone());
            Tensor::empty(&device, &[layout.scratch()], dtype, Category::Communication)
        });
        let scratch = scratch.transpose().map_err(|e| failed(e.to_string()))?;
        let stage = |data: Option<CommBuffer>, reads: bool| {
            data.map(|data| StagedBuffer::new(&shared.cuda, data, reads)).transpose().map_err(failed)
        };
        let staged = (stage(read, true)?, stage(write, in_place)?);
        let ready = shared.mark().map_err(failed)?;
        let ticket = self.ticket(call);
        let job = NcclCall { operation, staged, element, elements, scratch, ready, ticket: ticket.clone() };
        self.order(CollectiveCommand::Call(Box::new(job)), call)?;
        Ok(NcclCollective { group: self.clone(), ticket, reduced })
    }
}

impl Transport for NcclGroup {
    fn rank(&self) -> usize {
        self.membership.rank
    }

    fn members(&self) -> &[usize] {
        &self.membership.members
    }

    fn start(&self, buffers: CallBuffers, _attended: bool) -> Result<Box<dyn Pending>> {
        match buffers.call.operation {
            Operation::Send { to: peer, tag } | Operation::Receive { from: peer, tag } => {
                Ok(Box::new(self.start_message(buffers, peer, tag)?))
            }
            _ => Ok(Box::new(self.start_collective(buffers)?)),
        }
    }

    fn connect(&self, peers: &[usize], limit: Duration) -> Result<()> {
        let start = Instant::now();
        let rank = self.membership.world_rank();
        let connect = |&peer: &usize| {
            let call = Call::empty(Operation::Send { to: peer, tag: 0 });
            let ticket = Ticket::new(rank, call);
            let begun = self.world.links.connect(self.membership.members[peer], ticket.clone());
            begun.map(|()| ticket).map_err(|why| Error::Carrier { rank, call, why })
        };
        let others = peers.iter().filter(|&&peer| peer != self.membership.rank);
        let tickets = others.map(connect).collect::<Result<Vec<Arc<Ticket<CommBuffer>>>>>()?;
        let left = || limit.saturating_sub(start.elapsed());
        tickets.iter().try_for_each(|ticket| self.wait(ticket, left()).map(drop))
    }

    fn split(&self, choice: SplitChoice, limit: Duration) -> Result<Option<Arc<dyn Transport>>> {
        let waiting = self.start_collective(CallBuffers::of_split(choice, self.membership.members.len()))?;
        let seq_no = waiting.ticket.seq_no.get().copied().unwrap_or_default();
        let Some(CommBuffer::U64(choices)) = Box::new(waiting).wait(limit)? else {
            unreachable!("what was gathered comes back as it went in");
        };
        let Some(new) = NewGroup::of(&choices, self.membership.rank) else { return Ok(None) };
        let members = new.members.iter().map(|&rank| self.membership.members[rank]).collect();
        let membership = GroupMembership {
            name: NewGroup::name(self.membership.name, seq_no, choice[0]),
            members,
            rank: new.rank,
        };
        NcclGroup::connect(&self.world, membership, limit).map(Some)
    }
}

/// A message that is on its way.
struct NcclMessage {
    group: NcclGroup,
    ticket: Arc<Ticket<CommBuffer>>,
}

impl Pending for NcclMessage {
    fn is_done(&mut self) -> Result<bool> {
        done(&self.group, &self.ticket)
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>> {
        self.group.wait(&self.ticket, limit).map(Some)
    }
}

/// A collective call that was ordered.
struct NcclCollective {
    group: NcclGroup,
    ticket: Arc<Ticket<StagedBuffers>>,
    /// What is still to be done with numbers of the host that were gathered.
    reduced: Option<Reduce>,
}

impl Pending for NcclCollective {
    fn is_done(&mut self) -> Result<bool> {
        done(&self.group, &self.ticket)
    }

    fn wait(self: Box<Self>, limit: Duration) -> Result<Option<CommBuffer>> {
        let (read, write) = self.group.wait(&self.ticket, limit)?;
        let failed = |why: String| Error::Carrier { rank: self.ticket.rank, call: self.ticket.call, why };
        let data = match (write, read) {
            (Some(write), _) => Some(write.written().map_err(failed)?),
            (None, read) => read.map(StagedBuffer::untouched),
        };
        let n = self.ticket.call.elements;
        Ok(match (self.reduced, data) {
            (Some(how), Some(CommBuffer::U64(all))) => Some(CommBuffer::U64(reduce_gathered(how, &all, n))),
            (Some(how), Some(CommBuffer::F64(all))) => Some(CommBuffer::F64(reduce_gathered(how, &all, n))),
            (_, data) => data,
        })
    }
}

fn done<T>(group: &NcclGroup, ticket: &Ticket<T>) -> Result<bool> {
    if ticket.is_done() {
        return Ok(true);
    }
    match group.world.shared.control.failed() {
        Some(failed) => Err(failed.stops(ticket.rank, ticket.call)),
        None => Ok(false),
    }
}

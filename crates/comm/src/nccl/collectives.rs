//! The thread that carries out the collective calls of a group, one after the other, as all its ranks do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};

use espalier_tensor::Tensor;

use super::channel::{NcclChannel, NcclRank, PollBackoff};
use super::library::{UniqueId, datatype, operation};
use super::ordered_reduce::{OrderedReduce, ReduceContext};
use super::staged_buffer::StagedBuffer;
use crate::call::{Operation, Reduce};
use crate::data::ElementType;
use crate::error::Error;
use crate::stream_event::StreamEvent;
use crate::ticket::Ticket;

/// What a call read, and what it wrote.
pub(super) type StagedBuffers = (Option<StagedBuffer>, Option<StagedBuffer>);

/// A call with all the memory that it needs.
pub(super) struct NcclCall {
    /// What NCCL is to do; the ticket says what was asked for.
    pub(super) operation: Operation,
    pub(super) staged: StagedBuffers,
    pub(super) element: ElementType,
    /// How many elements: of the full data where ranks have shards of it.
    pub(super) elements: usize,
    /// For other ranks' copies of what this one reduces, where the reduction is ours.
    pub(super) scratch: Option<Tensor>,
    /// Behind the work of the compute stream that made the data, or last used its memory.
    pub(super) ready: StreamEvent,
    pub(super) ticket: Arc<Ticket<StagedBuffers>>,
}

/// What the thread is ordered to do.
pub(super) enum CollectiveCommand {
    /// Connect the ranks of the group.
    Connect(Arc<Ticket<StagedBuffers>>),
    Call(Box<NcclCall>),
}

/// A rank's number in a group, and the group.
#[derive(Debug, Clone)]
pub(super) struct GroupMembership {
    /// The group's, the same on all its ranks.
    pub(super) name: u64,
    /// The ranks of the world that form it.
    pub(super) members: Arc<[usize]>,
    pub(super) rank: usize,
}

impl GroupMembership {
    /// Its number in the world.
    pub(super) fn world_rank(&self) -> usize {
        self.members[self.rank]
    }
}

/// Starts the thread of a group.
pub(super) fn start(shared: &NcclRank, group: GroupMembership) -> Result<Sender<CollectiveCommand>, String> {
    let (orders, inbox) = mpsc::channel();
    shared
        .spawn("collectives", move |shared| CollectiveWorker { shared, group, channel: None }.work(&inbox))?;
    Ok(orders)
}

struct CollectiveWorker {
    channel: Option<NcclChannel>,
    group: GroupMembership,
    shared: NcclRank,
}

impl CollectiveWorker {
    fn work(mut self, orders: &Receiver<CollectiveCommand>) {
        let mut in_flight: VecDeque<(StreamEvent, NcclCall)> = VecDeque::new();
        let mut rest = PollBackoff::new();
        loop {
            let order = match in_flight.is_empty() {
                true => orders.recv().map_err(|_| TryRecvError::Disconnected),
                false => orders.try_recv(),
            };
            match order {
                Ok(CollectiveCommand::Connect(ticket)) => {
                    let failed = |why| Error::Carrier { rank: ticket.rank, call: ticket.call, why };
                    ticket.deliver(self.connect().map(|()| (None, None)).map_err(failed));
                }
                Ok(CollectiveCommand::Call(job)) => match self.launch(&job) {
                    Ok(mark) => in_flight.push_back((mark, *job)),
                    Err(why) => abort(*job, why),
                },
                Err(TryRecvError::Disconnected) if in_flight.is_empty() => return,
                Err(_) => {}
            }
            let (Some(channel), Some((mark, _))) = (&self.channel, in_flight.front()) else { continue };
            match channel.has_passed(mark) {
                Ok(true) => {
                    let (_, job) = in_flight.pop_front().expect("it is the first");
                    job.ticket.deliver(Ok(job.staged));
                    rest.moved();
                }
                Ok(false) if self.shared.control.failed().is_none() => rest.take(),
                // Another rank has failed. The GPU may still write: the memory is leaked.
                Ok(false) => return in_flight.drain(..).for_each(|(_, job)| std::mem::forget(job)),
                Err(why) => in_flight.drain(..).for_each(|(_, job)| abort(job, why.clone())),
            }
        }
    }

    /// Rank 0 of the group makes an id and sends it to the others.
    fn connect(&mut self) -> Result<(), String> {
        let GroupMembership { name, members, rank } = &self.group;
        let id = if *rank == 0 {
            let id = self.shared.unique_id()?;
            let text = id.0.map(|letter| letter as u8);
            members[1..].iter().for_each(|&member| self.shared.control.post(member, *name, text.to_vec()));
            id
        } else {
            let text: [u8; 128] =
                self.shared.control.fetch(*name)?[..].try_into().map_err(|_| "no id came")?;
            UniqueId(text.map(|letter| letter as _))
        };
        self.channel = Some(NcclChannel::connect(&self.shared, id, *rank, members.len())?);
        Ok(())
    }

    fn launch(&self, job: &NcclCall) -> Result<StreamEvent, String> {
        let channel = self.channel.as_ref().ok_or("the group is not connected")?;
        let (n, size) = (job.elements, self.group.members.len());
        let kind = datatype(job.element);
        let address = |buffer: &Option<StagedBuffer>| buffer.as_ref().map_or(0, StagedBuffer::address);
        let (from, to) = (address(&job.staged.0), address(&job.staged.1));
        channel.queue(&job.ready, |nccl, comm, cuda| {
            let stream = cuda.compute().raw();
            if let Some(scratch) = &job.scratch {
                let exchange = OrderedReduce { elements: n, ranks: size, rank: self.group.rank };
                let (element, scratch) = (job.element, scratch.cuda_buffer().address());
                let wire = ReduceContext { nccl, comm, cuda, element, scratch };
                // SAFETY: as below; the scratch space too is kept until the call is done.
                return unsafe {
                    match job.operation {
                        Operation::ReduceScatter(_) => wire.reduce_scatter(exchange, from, to),
                        _ => wire.all_reduce(exchange, to),
                    }
                };
            }
            // SAFETY: the addresses are of tensors on this GPU with as many elements, which the job keeps
            // until the call is done, and which the compute stream has finished with where the mark has
            // passed.
            let code = unsafe {
                match job.operation {
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
                    Operation::Send { .. } | Operation::Receive { .. } => {
                        unreachable!("links carry messages")
                    }
                }
            };
            nccl.check(code)
        })
    }
}

/// Ends a call that NCCL refused. The GPU may still write to its memory, which is leaked.
fn abort(job: NcclCall, why: String) {
    let ticket = job.ticket.clone();
    std::mem::forget(job);
    ticket.deliver(Err(Error::Carrier { rank: ticket.rank, call: ticket.call, why }));
}

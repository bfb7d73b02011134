//! One rank's end of a group, as it is used: checks every call, counts what it sends, and carries the time limit.
//!
//! Data goes in by value and comes back by value. A call comes in two forms: `all_reduce` waits;
//! `start_all_reduce` returns a [`Request`] at once, so that the rank can compute while its message is on the
//! way.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::call::{Call, Operation, Reduce};
use crate::data::{CommBuffer, IntoCommBuffer};
use crate::delay::{DelayedTransport, SimulatedLink};
use crate::error::{Error, Result};
use crate::traffic::{self, SentBytes, SentCounter};
use crate::transport::{CallBuffers, Pending, Transport, choice};
use crate::watch::WaitTrace;

/// One rank's end of a group; clones are the same end.
///
/// The members of a group must make the same collective calls in the same order. A rank that computes on
/// several threads talks to a group from one of them at a time. Data that a call may write to (all but what
/// is sent, gathered from or scattered) must have no other owner.
#[derive(Debug, Clone)]
pub struct Communicator {
    transport: Arc<dyn Transport>,
    counter: Arc<SentCounter>,
    limit: Duration,
    halo: bool,
}

impl Communicator {
    /// An end that waits at most `limit` in each call.
    pub fn new(transport: Arc<dyn Transport>, limit: Duration) -> Communicator {
        Communicator { transport, counter: Arc::default(), limit, halo: false }
    }

    /// Its number within the group.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.members().len()
    }

    /// The ranks of the world that form the group, in the group's order.
    pub fn members(&self) -> &[usize] {
        self.transport.members()
    }

    /// Its number in the world: the one that errors name.
    pub fn world_rank(&self) -> usize {
        self.members()[self.rank()]
    }

    /// How long a call waits at most.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The same end with another limit, for calls that take longer, or must not.
    pub fn with_limit(&self, limit: Duration) -> Communicator {
        Communicator { limit, ..self.clone() }
    }

    /// The same end, whose messages between two ranks are counted as halos.
    pub fn for_halos(&self) -> Communicator {
        Communicator { halo: true, ..self.clone() }
    }

    /// The same end on a slower network: what this rank sends leaves only after so long, in groups split
    /// from it too. For tests of what hides behind computing. All members must delay theirs.
    pub fn delayed(&self, latency: Duration) -> Communicator {
        let transport =
            Arc::new(DelayedTransport::new(self.transport.clone(), SimulatedLink::with_latency(latency)));
        Communicator { transport, ..self.clone() }
    }

    /// The same on a network of so much latency and so many bytes a second from every rank, over which
    /// collectives go in rings of halves: for steps on a network that is not there.
    pub fn over(&self, latency: Duration, bytes_per_second: f64) -> Communicator {
        let link = SimulatedLink::of(latency, bytes_per_second);
        let transport = Arc::new(DelayedTransport::new(self.transport.clone(), link));
        Communicator { transport, ..self.clone() }
    }

    /// Bytes that this rank has sent so far, in this group and in all that were split from the same one.
    pub fn sent(&self) -> SentBytes {
        self.counter.sent()
    }

    /// Connects this rank with those that it will send to. Nobody need do so: the first message to each does
    /// otherwise.
    pub fn connect(&self, to: &[usize]) -> Result<()> {
        self.transport.connect(to, self.limit)
    }

    /// Sends to a rank of the group; returns when the data may be used again, at the latest when it was received.
    pub fn send<D: IntoCommBuffer>(&self, data: D, to: usize, tag: u32) -> Result<D> {
        self.begin(self.send_parcel(data.into_buffer(), to, tag)?, true)?.wait()
    }

    pub fn start_send<D: IntoCommBuffer>(&self, data: D, to: usize, tag: u32) -> Result<Request<D>> {
        self.begin(self.send_parcel(data.into_buffer(), to, tag)?, false)
    }

    /// Receives into `data`, which must have the length and type of what is sent.
    pub fn receive<D: IntoCommBuffer>(&self, data: D, from: usize, tag: u32) -> Result<D> {
        self.begin(self.receive_parcel(data.into_buffer(), from, tag)?, true)?.wait()
    }

    pub fn start_receive<D: IntoCommBuffer>(&self, data: D, from: usize, tag: u32) -> Result<Request<D>> {
        self.begin(self.receive_parcel(data.into_buffer(), from, tag)?, false)
    }

    /// Gives `root`'s data to all.
    pub fn broadcast<D: IntoCommBuffer>(&self, data: D, root: usize) -> Result<D> {
        self.begin(self.broadcast_parcel(data.into_buffer(), root)?, true)?.wait()
    }

    pub fn start_broadcast<D: IntoCommBuffer>(&self, data: D, root: usize) -> Result<Request<D>> {
        self.begin(self.broadcast_parcel(data.into_buffer(), root)?, false)
    }

    /// Reduces element by element over all ranks; all get the same bits.
    pub fn all_reduce<D: IntoCommBuffer>(&self, data: D, how: Reduce) -> Result<D> {
        self.begin(in_place(Operation::AllReduce(how), data.into_buffer()), true)?.wait()
    }

    pub fn start_all_reduce<D: IntoCommBuffer>(&self, data: D, how: Reduce) -> Result<Request<D>> {
        self.begin(in_place(Operation::AllReduce(how), data.into_buffer()), false)
    }

    /// Reduces `full` over all ranks and leaves each rank its shard: the `rank`-th of as many equal ones as
    /// there are ranks.
    pub fn reduce_scatter<D: IntoCommBuffer>(&self, full: D, shard: D, how: Reduce) -> Result<D> {
        self.begin(self.scatter_parcel(full.into_buffer(), shard.into_buffer(), how)?, true)?.wait()
    }

    pub fn start_reduce_scatter<D: IntoCommBuffer>(
        &self,
        full: D,
        shard: D,
        how: Reduce,
    ) -> Result<Request<D>> {
        self.begin(self.scatter_parcel(full.into_buffer(), shard.into_buffer(), how)?, false)
    }

    /// Writes the shards of all ranks, which have one length, into `full`, in the order of ranks.
    pub fn all_gather<D: IntoCommBuffer>(&self, shard: D, full: D) -> Result<D> {
        self.begin(self.gather_parcel(shard.into_buffer(), full.into_buffer())?, true)?.wait()
    }

    pub fn start_all_gather<D: IntoCommBuffer>(&self, shard: D, full: D) -> Result<Request<D>> {
        self.begin(self.gather_parcel(shard.into_buffer(), full.into_buffer())?, false)
    }

    /// Waits until all ranks of the group have made the call.
    pub fn barrier(&self) -> Result<()> {
        let buffers = CallBuffers { call: Call::empty(Operation::Barrier), read: None, write: None };
        let watch = WaitTrace::begin(buffers.call, self.members(), true);
        self.transport.start(buffers, true)?.wait(self.limit)?;
        WaitTrace::done(watch);
        Ok(())
    }

    /// Splits the group: ranks of one colour form a new group, in the order of their keys and, where these are
    /// equal, of their ranks. A rank without a colour gets `None`. All members must call it.
    pub fn split(&self, colour: Option<usize>, key: usize) -> Result<Option<Communicator>> {
        let watch = WaitTrace::begin(Call::empty(Operation::Split), self.members(), true);
        let transport = self.transport.split(choice(colour, key), self.limit)?;
        WaitTrace::done(watch);
        Ok(transport.map(|transport| Communicator { transport, ..self.clone() }))
    }

    fn begin<D: IntoCommBuffer>(&self, buffers: CallBuffers, attended: bool) -> Result<Request<D>> {
        if let Some((kind, bytes)) = traffic::sent_by(&buffers.call, self.rank(), self.size(), self.halo) {
            self.counter.add(kind, bytes);
        }
        // Before the transport has it: to start a call may be to wait for it.
        let watch = WaitTrace::begin(buffers.call, self.members(), attended);
        let pending = self.transport.start(buffers, attended)?;
        Ok(Request { pending, limit: self.limit, watch, data: PhantomData })
    }

    fn send_parcel(&self, data: CommBuffer, to: usize, tag: u32) -> Result<CallBuffers> {
        let call = Call::of(Operation::Send { to, tag }, &data);
        self.check_rank(call, to)?;
        Ok(CallBuffers { call, read: Some(data), write: None })
    }

    fn receive_parcel(&self, data: CommBuffer, from: usize, tag: u32) -> Result<CallBuffers> {
        let call = Call::of(Operation::Receive { from, tag }, &data);
        self.check_rank(call, from)?;
        Ok(CallBuffers { call, read: None, write: Some(data) })
    }

    fn broadcast_parcel(&self, data: CommBuffer, root: usize) -> Result<CallBuffers> {
        let call = Call::of(Operation::Broadcast { root }, &data);
        self.check_rank(call, root)?;
        Ok(CallBuffers { call, read: None, write: Some(data) })
    }

    fn scatter_parcel(&self, full: CommBuffer, shard: CommBuffer, how: Reduce) -> Result<CallBuffers> {
        let call = Call::of(Operation::ReduceScatter(how), &full);
        self.check_parts(call, &full, &shard)?;
        Ok(CallBuffers { call, read: Some(full), write: Some(shard) })
    }

    fn gather_parcel(&self, shard: CommBuffer, full: CommBuffer) -> Result<CallBuffers> {
        let call = Call::of(Operation::AllGather, &full);
        self.check_parts(call, &full, &shard)?;
        Ok(CallBuffers { call, read: Some(shard), write: Some(full) })
    }

    fn check_rank(&self, call: Call, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        self.refuse(call, format!("there is no rank {rank} in a group of {}", self.size()))
    }

    fn check_parts(&self, call: Call, full: &CommBuffer, shard: &CommBuffer) -> Result<()> {
        if shard.element() != full.element() {
            return self.refuse(call, format!("the part of a rank is of {}", shard.element()));
        }
        if shard.len().checked_mul(self.size()) != Some(full.len()) {
            let (n, size) = (shard.len(), self.size());
            return self.refuse(
                call,
                format!("{size} ranks with parts of {n} do not make a whole of {}", full.len()),
            );
        }
        Ok(())
    }

    fn refuse<T>(&self, call: Call, problem: String) -> Result<T> {
        Err(Error::Argument { rank: self.world_rank(), call, problem })
    }
}

fn in_place(operation: Operation, data: CommBuffer) -> CallBuffers {
    CallBuffers { call: Call::of(operation, &data), read: None, write: Some(data) }
}

/// A call that goes on while the rank computes; [`Request::wait`] gives its data back.
///
/// Dropping it discards the result: the other ranks still get theirs.
#[must_use = "a message is only certain to have arrived once it was waited for"]
pub struct Request<D> {
    pending: Box<dyn Pending>,
    limit: Duration,
    watch: Option<WaitTrace>,
    data: PhantomData<fn() -> D>,
}

impl<D: IntoCommBuffer> Request<D> {
    /// Waits until it is done, from now at most as long as the communicator's limit.
    pub fn wait(mut self) -> Result<D> {
        if let Some(watch) = &mut self.watch {
            watch.wait();
        }
        let data = self.pending.wait(self.limit)?;
        WaitTrace::done(self.watch);
        Ok(D::from_buffer(data.expect("a call with data gives data back")))
    }

    /// Whether it is done, without waiting; asking also moves the call along where the transport needs that.
    pub fn is_done(&mut self) -> Result<bool> {
        self.pending.is_done()
    }
}

impl<D> std::fmt::Debug for Request<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("limit", &self.limit).finish_non_exhaustive()
    }
}

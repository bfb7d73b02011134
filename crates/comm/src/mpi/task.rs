//! A call as MPI carries it out: one request after another, with our own arithmetic between them.
//!
//! P: ranks of the group; n: elements of the call.
//!
//! A reduction is never MPI's. Where little moves, all gather what all have, and each reduces it (one round
//! of messages). Otherwise each rank gets everyone's copy of the chunk that it is to reduce (all-to-all),
//! reduces it in the order of ranks, and all gather the results: `2 (P - 1) / P n` elements sent by each, as
//! little as a ring. Both give the same bits.

use std::slice;
use std::sync::Arc;

use espalier_tensor::{Category, Tensor, bf16};
use ferrompi::{Communicator, Request, Scope, Status};

use super::DeliveryTicket;
use crate::call::{Call, Operation, Reduce};
use crate::data::{CommBuffer, ElementType};
use crate::error::{Error, Result};
use crate::reduce::{Reducible, reduce};
use crate::traffic::chunk;
use crate::transport::CallBuffers;

/// Bytes that a rank gathers at most to reduce them by itself.
const GATHER_BYTES: usize = 64 << 10;

/// A call with all the memory that it needs.
#[derive(Debug)]
pub(super) struct MpiCall {
    /// The progress thread's number of the group.
    pub(super) group: usize,
    pub(super) buffers: CallBuffers,
    pub(super) ticket: Arc<DeliveryTicket>,
    scratch: Option<CommBuffer>,
    rank: usize,
    size: usize,
    /// How much of what goes to and comes from each rank, and where it lies, in units of MPI.
    counts: [Vec<i32>; 4],
}

impl MpiCall {
    pub(super) fn new(
        group: usize,
        rank: usize,
        size: usize,
        mut buffers: CallBuffers,
        ticket: Arc<DeliveryTicket>,
    ) -> Result<MpiCall> {
        let call = buffers.call;
        // Panics here, on the rank's own thread, where somebody else holds the tensor too.
        buffers.write.as_mut().filter(|data| data.on_host()).map(CommBuffer::bytes_mut);
        let data = || [&buffers.read, &buffers.write].into_iter().flatten();
        if data().any(|data| !data.on_host()) {
            let what = "MPI exchanges tensors of the host here; this one is on a GPU".to_owned();
            return Err(Error::Unsupported { what });
        }
        let refuse = |problem: String| Err(Error::Argument { rank: ticket.rank, call, problem });
        let gathers =
            matches!(call.operation, Operation::AllReduce(_)) && call.bytes() * size <= GATHER_BYTES;
        let scratch = match call.operation {
            Operation::AllReduce(_) if size == 1 => None,
            Operation::AllReduce(_) if gathers => Some(call.elements * size),
            Operation::AllReduce(_) | Operation::ReduceScatter(_) => {
                Some(chunk(call.elements, size, rank).len() * size)
            }
            _ => None,
        };
        let most = data().map(CommBuffer::len).chain(scratch).max().unwrap_or(0);
        if most * scale(call.element) > i32::MAX as usize {
            return refuse(format!("MPI counts no more than {} in a message; send it in parts", i32::MAX));
        }
        if let Operation::Send { tag, .. } | Operation::Receive { tag, .. } = call.operation
            && i32::try_from(tag).is_err()
        {
            return refuse(format!("MPI's tags end at {}", i32::MAX));
        }
        let scratch = match (scratch, data().next()) {
            (Some(len), Some(like)) => Some(alloc_like(like, len).map_err(|why| Error::Carrier {
                rank: ticket.rank,
                call,
                why: format!("no room to reduce in: {why}"),
            })?),
            _ => None,
        };
        Ok(MpiCall { group, buffers, ticket, scratch, rank, size, counts: Default::default() })
    }

    fn call(&self) -> Call {
        self.buffers.call
    }
}

/// A call that MPI has begun.
pub(super) struct StartedCall<'s> {
    request: Option<Request<'s>>,
    stage: RequestStage,
    // After the request: what it uses must outlive it. A task whose request never ends is never dropped.
    pub(super) job: Box<MpiCall>,
}

/// What the request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestStage {
    /// Nothing comes after it.
    Last,
    /// Everyone's data is gathered in the scratch space, to be reduced.
    Gathered(Reduce),
    /// Everyone's copy of this rank's chunk is in the scratch space, to be reduced.
    Exchanged(Reduce),
}

/// What MPI counts in: it only carries, so that the width is all that matters.
fn scale(element: Option<ElementType>) -> usize {
    // There is no datatype of two bytes to be had.
    if element == Some(ElementType::Bf16) { 2 } else { 1 }
}

/// Runs a body with `$unit` standing for the type that MPI moves an element as.
macro_rules! with_unit {
    ($element:expr, $unit:ident => $body:expr) => {
        match $element {
            ElementType::F32 | ElementType::U32 => {
                type $unit = u32;
                $body
            }
            ElementType::U64 | ElementType::F64 => {
                type $unit = u64;
                $body
            }
            ElementType::Bf16 => {
                type $unit = u8;
                $body
            }
        }
    };
}

impl<'s> StartedCall<'s> {
    pub(super) fn start(
        mut job: Box<MpiCall>,
        comm: &Communicator,
        scope: &'s Scope<'s, '_>,
    ) -> Result<StartedCall<'s>, (Box<MpiCall>, ferrompi::Error)> {
        let (call, size) = (job.call(), job.size);
        let element = call.element.unwrap_or(ElementType::U64);
        let mut stage = RequestStage::Last;
        let begun = with_unit!(element, U => {
            // SAFETY: the job owns its data, which nobody else writes, and keeps it as long as the request lives.
            unsafe {
                match call.operation {
                    Operation::Barrier => comm.ibarrier(scope).map(Some),
                    Operation::Send { to, tag } => {
                        comm.isend::<U>(scope, view(&job.buffers.read), to as i32, tag as i32).map(Some)
                    }
                    Operation::Receive { from, tag } => {
                        let into = view_mut::<U>(&mut job.buffers.write);
                        comm.irecv(scope, into, from as i32, tag as i32).map(Some)
                    }
                    Operation::Broadcast { root } => {
                        comm.ibroadcast(scope, view_mut::<U>(&mut job.buffers.write), root as i32).map(Some)
                    }
                    Operation::AllGather | Operation::Split => {
                        let full = view_mut::<U>(&mut job.buffers.write);
                        comm.iallgather(scope, view::<U>(&job.buffers.read), full).map(Some)
                    }
                    Operation::AllReduce(_) if size == 1 => Ok(None),
                    Operation::AllReduce(how) if call.bytes() * size <= GATHER_BYTES => {
                        stage = RequestStage::Gathered(how);
                        let all = view_mut::<U>(&mut job.scratch);
                        comm.iallgather(scope, view::<U>(&job.buffers.write), all).map(Some)
                    }
                    Operation::AllReduce(how) | Operation::ReduceScatter(how) => {
                        stage = RequestStage::Exchanged(how);
                        job.counts = all_to_all_counts(&job);
                        let [sent, from, received, to] = job.counts.each_ref().map(|counts| still(counts));
                        let full = if job.buffers.read.is_some() { &job.buffers.read } else { &job.buffers.write };
                        let full = view::<U>(full);
                        let chunks = view_mut::<U>(&mut job.scratch);
                        comm.ialltoallv(scope, full, sent, from, chunks, received, to).map(Some)
                    }
                }
            }
        });
        match begun {
            Ok(request) => Ok(StartedCall { request, stage, job }),
            Err(error) => Err((job, error)),
        }
    }

    /// Whether a second request is to follow the one that is under way.
    pub(super) fn has_second(&self) -> bool {
        matches!(
            (self.stage, self.job.call().operation),
            (RequestStage::Exchanged(_), Operation::AllReduce(_))
        )
    }

    /// Tests whether the request is done, and goes on to the next, on `comm`; true when there is none left.
    pub(super) fn step(&mut self, comm: &Communicator, scope: &'s Scope<'s, '_>) -> Result<bool> {
        let (rank, call) = (self.job.ticket.rank, self.job.call());
        let fail = |error: ferrompi::Error| Error::Carrier { rank, call, why: error.to_string() };
        if let Some(request) = &mut self.request {
            match request.test().map_err(fail)? {
                None => return Ok(false),
                Some(status) => self.check(status)?,
            }
        }
        self.request = None;
        match self.stage {
            RequestStage::Last => Ok(true),
            RequestStage::Gathered(how) => {
                self.job.reduce(how, call.elements, ReduceTarget::Data);
                Ok(true)
            }
            RequestStage::Exchanged(how) => {
                let local_len = chunk(call.elements, self.job.size, self.job.rank).len();
                if let Operation::ReduceScatter(_) = call.operation {
                    self.job.reduce(how, local_len, ReduceTarget::Data);
                    return Ok(true);
                }
                self.job.reduce(how, local_len, ReduceTarget::Scratch);
                self.stage = RequestStage::Last;
                let (job, units) = (&mut *self.job, local_len * scale(call.element));
                let element = call.element.expect("a reduction of something");
                // SAFETY: as for `start`; the all-to-all, which read the data, is over.
                let request = with_unit!(element, U => unsafe {
                    let [chunks, at, ..] = job.counts.each_ref().map(|counts| still(counts));
                    let local = &view::<U>(&job.scratch)[..units];
                    comm.iallgatherv(scope, local, view_mut::<U>(&mut job.buffers.write), chunks, at)
                });
                self.request = Some(request.map_err(fail)?);
                Ok(false)
            }
        }
    }

    /// Whether MPI is done with the data, so that it may be given back or dropped.
    pub(super) fn is_idle(&self) -> bool {
        self.request.as_ref().is_none_or(Request::is_completed)
    }

    /// A message must have the length that the receiver expects; MPI only objects to longer ones.
    fn check(&self, status: Status) -> Result<()> {
        let call = self.job.call();
        let Operation::Receive { from, tag } = call.operation else { return Ok(()) };
        let unit = call.element.map_or(1, ElementType::bytes) / scale(call.element);
        let expected = call.bytes() / unit.max(1);
        match status.count {
            Some(count) if count != expected => {
                let why = format!(
                    "the message of rank {from} of the group with tag {tag} has {} elements",
                    count / scale(call.element)
                );
                Err(Error::Carrier { rank: self.job.ticket.rank, call, why })
            }
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReduceTarget {
    /// What the call writes.
    Data,
    /// The front of the scratch space.
    Scratch,
}

impl MpiCall {
    /// Reduces the scratch space, which has `len` elements of each rank.
    fn reduce(&mut self, how: Reduce, len: usize, to: ReduceTarget) {
        match self.call().element.expect("a reduction of something") {
            ElementType::F32 => self.reduce_as::<f32>(how, len, to),
            ElementType::Bf16 => self.reduce_as::<bf16>(how, len, to),
            ElementType::U32 => self.reduce_as::<u32>(how, len, to),
            ElementType::U64 => self.reduce_as::<u64>(how, len, to),
            ElementType::F64 => self.reduce_as::<f64>(how, len, to),
        }
    }

    fn reduce_as<T: Reducible>(&mut self, how: Reduce, len: usize, to: ReduceTarget) {
        let scratch = self.scratch.as_mut().expect("a reduction has its scratch space").bytes_mut();
        assert_eq!(scratch.len(), self.size * len * size_of::<T>());
        let scratch = scratch.as_mut_ptr().cast::<T>();
        let y = match to {
            ReduceTarget::Scratch => scratch,
            ReduceTarget::Data => {
                let data = self.buffers.write.as_mut().expect("a reduction writes").bytes_mut();
                assert_eq!(data.len(), len * size_of::<T>());
                data.as_mut_ptr().cast()
            }
        };
        // SAFETY: both lengths were checked; no request is under way, and the two are different memory.
        unsafe {
            let x: Vec<_> = (0..self.size).map(|rank| scratch.add(rank * len).cast_const()).collect();
            reduce(how, &x, &[y], len);
        }
    }
}

/// What goes to each rank and where it lies in the full data; what comes from each, and where it goes in the
/// scratch space.
fn all_to_all_counts(job: &MpiCall) -> [Vec<i32>; 4] {
    let (elements, scale) = (job.call().elements, scale(job.call().element));
    // `MpiCall::new` has compared the largest of these with MPI's limit.
    let units = |elements: usize| (elements * scale) as i32;
    let chunks = || (0..job.size).map(|rank| chunk(elements, job.size, rank));
    let local_len = chunk(elements, job.size, job.rank).len();
    [
        chunks().map(|range| units(range.len())).collect(),
        chunks().map(|range| units(range.start)).collect(),
        vec![units(local_len); job.size],
        (0..job.size).map(|rank| units(rank * local_len)).collect(),
    ]
}

/// Memory of the same kind as `data`, counted as communication where there is a ledger.
fn alloc_like(data: &CommBuffer, len: usize) -> espalier_tensor::Result<CommBuffer> {
    Ok(match data {
        CommBuffer::Tensor(tensor) => CommBuffer::Tensor(Tensor::empty(
            &tensor.device(),
            &[len],
            tensor.dtype(),
            Category::Communication,
        )?),
        CommBuffer::U64(_) => CommBuffer::U64(vec![0; len]),
        CommBuffer::F64(_) => CommBuffer::F64(vec![0.0; len]),
    })
}

/// The data in units of MPI, for as long as the caller says.
///
/// # Safety
/// The data must outlive `'a`, and nobody may write it meanwhile.
unsafe fn view<'a, U>(data: &Option<CommBuffer>) -> &'a [U] {
    let bytes = data.as_ref().expect("the call has this data").bytes();
    // SAFETY: what the caller promises; all data is aligned for its elements, which are as wide as U or wider.
    unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<U>()) }
}

/// The same, for writing.
///
/// # Safety
/// As for [`view`], and nobody else may read it meanwhile.
unsafe fn view_mut<'a, U>(data: &mut Option<CommBuffer>) -> &'a mut [U] {
    let bytes = data.as_mut().expect("the call has this data").bytes_mut();
    // SAFETY: as above.
    unsafe { slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<U>()) }
}

/// Counts of a job, for as long as the caller says.
///
/// # Safety
/// They must outlive `'a`, unchanged.
unsafe fn still<'a>(counts: &[i32]) -> &'a [i32] {
    // SAFETY: what the caller promises.
    unsafe { slice::from_raw_parts(counts.as_ptr(), counts.len()) }
}

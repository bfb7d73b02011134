//! A communicator of NCCL with a stream of its own, beside the GPU's compute stream.
//!
//! Some of NCCL's calls wait for other ranks inside the call, and cannot be given up. So every channel
//! belongs to one thread that does nothing else, and ranks wait for that thread with a limit.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use espalier_tensor::cuda::Cuda;

use super::library::{Nccl, NcclComm, UniqueId};
use crate::control::ControlPlane;
use crate::stream_event::StreamEvent;

/// How long a thread keeps its core while it polls calls, before it yields it between two polls.
const EAGER: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);

/// What the threads of a rank have in common.
#[derive(Clone)]
pub(super) struct NcclRank {
    pub(super) nccl: &'static Nccl,
    pub(super) cuda: Cuda,
    pub(super) control: Arc<ControlPlane>,
}

impl std::fmt::Debug for NcclRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclRank").field("control", &self.control).finish_non_exhaustive()
    }
}

impl NcclRank {
    /// Starts a thread that makes calls of NCCL.
    pub(super) fn spawn(
        &self,
        name: &str,
        work: impl FnOnce(NcclRank) + Send + 'static,
    ) -> Result<(), String> {
        let shared = self.clone();
        let thread = thread::Builder::new().name(format!("espalier-{name}"));
        thread.spawn(move || work(shared)).map(drop).map_err(|e| format!("no thread for it: {e}"))
    }

    /// An id by which the ranks of a new communicator find each other.
    pub(super) fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: NCCL writes the id.
        self.nccl.check(unsafe { (self.nccl.get_unique_id)(&mut id) })?;
        Ok(id)
    }

    /// A mark behind the compute stream's work so far.
    pub(super) fn mark(&self) -> Result<StreamEvent, String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        StreamEvent::new(self.cuda.compute().raw())
    }
}

/// A communicator and its stream. Neither is given back before the process ends: NCCL's own way to do so
/// waits for the other ranks, which may be gone, or give theirs back in another order.
pub(super) struct NcclChannel {
    nccl: &'static Nccl,
    comm: NcclComm,
    /// A handle of the same GPU whose compute stream is the channel's, so that kernels can be queued
    /// there too.
    cuda: &'static Cuda,
}

impl NcclChannel {
    /// Connects all ranks that have the same id; waits for them, inside a call.
    pub(super) fn connect(
        shared: &NcclRank,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<NcclChannel, String> {
        shared.cuda.bind().map_err(|e| e.to_string())?;
        let cuda = shared.cuda.another().map_err(|e| e.to_string())?;
        let (nccl, mut comm) = (shared.nccl, null_mut());
        // SAFETY: the GPU is current on this thread; NCCL writes the handle.
        nccl.check(unsafe { (nccl.comm_init_rank)(&mut comm, size as c_int, id, rank as c_int) })?;
        Ok(NcclChannel { nccl, comm, cuda: Box::leak(Box::new(cuda)) })
    }

    /// The channel's handle of the GPU.
    pub(super) fn cuda(&self) -> &Cuda {
        self.cuda
    }

    /// Queues calls of NCCL, and kernels, behind a mark; the one that is returned passes when they are done.
    pub(super) fn queue(
        &self,
        ready: &StreamEvent,
        calls: impl FnOnce(&Nccl, NcclComm, &Cuda) -> Result<(), String>,
    ) -> Result<StreamEvent, String> {
        let stream: CUstream = self.cuda.compute().raw();
        ready.make_wait(stream)?;
        calls(self.nccl, self.comm, self.cuda)?;
        StreamEvent::new(stream)
    }

    /// Whether a mark has passed; what went wrong meanwhile shows here.
    pub(super) fn has_passed(&self, mark: &StreamEvent) -> Result<bool, String> {
        let mut code = 0;
        // SAFETY: the communicator lives; NCCL writes a code.
        self.nccl.check(unsafe { (self.nccl.comm_get_async_error)(self.comm, &mut code) })?;
        self.nccl.check(code)?;
        mark.has_passed()
    }
}

/// The rest between two polls of what is under way.
pub(super) struct PollBackoff(Instant);

impl PollBackoff {
    pub(super) fn new() -> PollBackoff {
        PollBackoff(Instant::now())
    }

    /// Something has moved: more may soon.
    pub(super) fn moved(&mut self) {
        self.0 = Instant::now();
    }

    pub(super) fn take(&self) {
        if self.0.elapsed() < EAGER { std::hint::spin_loop() } else { thread::sleep(PAUSE) }
    }
}

//! A line: a communicator of NCCL with a stream of its own, beside the card's compute stream.
//!
//! NCCL takes the calls of a communicator one after the other, so ranks have a line for collectives and two for messages.
//! What is queued on a line waits for the compute stream's work so far; nothing on the compute stream waits for a line until
//! somebody asks for the result.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::CUstream;
use espalier_tensor::cuda::Cuda;

use super::library::{Comm, Nccl, UniqueId};
use crate::mark::Mark;

/// A communicator and its stream.
pub(super) struct Line {
    nccl: &'static Nccl,
    comm: Comm,
    cuda: Cuda,
    /// The same card as if it were another: its compute stream is the line's, so that kernels can be queued there too.
    beside: Cuda,
    /// NCCL's calls on a communicator must not overlap.
    calls: Mutex<()>,
    /// Whether a call was given up: then NCCL must not wait for it when the line is closed.
    broken: AtomicBool,
}

// SAFETY: the driver locks its streams, and `calls` keeps those of NCCL apart; both may be used from any thread.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("broken", &self.broken).finish_non_exhaustive()
    }
}

impl Line {
    /// Connects all ranks that have the same id; waits for them.
    pub(super) fn connect(
        nccl: &'static Nccl,
        cuda: &Cuda,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Line, String> {
        cuda.bind().map_err(|e| e.to_string())?;
        let mut comm = null_mut();
        // SAFETY: the card is current on this thread; NCCL writes the handle.
        nccl.check(unsafe { (nccl.comm_init_rank)(&mut comm, size as c_int, id, rank as c_int) })?;
        Line::new(nccl, cuda, comm)
    }

    fn new(nccl: &'static Nccl, cuda: &Cuda, comm: Comm) -> Result<Line, String> {
        let beside = Cuda::open(cuda.gpu().ordinal).map_err(|e| e.to_string())?;
        let (calls, broken) = (Mutex::new(()), AtomicBool::new(false));
        Ok(Line { nccl, comm, cuda: cuda.clone(), beside, calls, broken })
    }

    /// A line among those who give the same colour, in the order of keys; all of this line's ranks must call it.
    pub(super) fn split(&self, colour: Option<usize>, key: usize) -> Result<Option<Line>, String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        let _one = self.calls.lock().expect("no panic while locked");
        let mut comm = null_mut();
        let colour = colour.map_or(-1, |colour| colour as c_int);
        // SAFETY: the communicator lives; NCCL writes the new handle, null where there is no colour.
        let code = unsafe { (self.nccl.comm_split)(self.comm, colour, key as c_int, &mut comm, null_mut()) };
        self.nccl.check(code)?;
        if comm.is_null() { Ok(None) } else { Line::new(self.nccl, &self.cuda, comm).map(Some) }
    }

    /// Queues calls of NCCL, and kernels, behind the compute stream's work so far; the mark passes when they are done.
    pub(super) fn queue(
        &self,
        calls: impl FnOnce(&Nccl, Comm, &Cuda) -> Result<(), String>,
    ) -> Result<Mark, String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        let _one = self.calls.lock().expect("no panic while locked");
        let stream: CUstream = self.beside.compute().raw();
        Mark::new(self.cuda.compute().raw())?.hold_back(stream)?;
        calls(self.nccl, self.comm, &self.beside)?;
        Mark::new(stream)
    }

    /// Lets later work of the compute stream wait for a mark of this line.
    pub(super) fn hold_back_compute(&self, mark: &Mark) -> Result<(), String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        mark.hold_back(self.cuda.compute().raw())
    }

    /// Whether a mark has passed; what went wrong meanwhile shows here.
    pub(super) fn has_passed(&self, mark: &Mark) -> Result<bool, String> {
        self.cuda.bind().map_err(|e| e.to_string())?;
        let mut code = 0;
        // SAFETY: the communicator lives; NCCL writes a code.
        self.nccl.check(unsafe { (self.nccl.comm_get_async_error)(self.comm, &mut code) })?;
        self.nccl.check(code).inspect_err(|_| self.give_up())?;
        mark.has_passed()
    }

    /// Notes that something on this line will not be waited for.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.cuda.bind().is_err() {
            return;
        }
        let broken = *self.broken.get_mut();
        let close = if broken { self.nccl.comm_abort } else { self.nccl.comm_destroy };
        // SAFETY: it was created for this line and is given back once, before its stream; work that is queued ends first,
        // or, where it never would, is ended.
        unsafe {
            let _ = close(self.comm);
        }
    }
}

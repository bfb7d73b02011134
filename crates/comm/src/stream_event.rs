//! Marks in a GPU's streams: what lets work on one stream wait for another without the host.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream};

/// A mark in a stream.
#[derive(Debug)]
pub(crate) struct StreamEvent(CUevent);

// SAFETY: the driver locks its events; any thread may use one.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    /// Behind all work that the stream has now. Its GPU must be current on this thread.
    pub(crate) fn new(stream: CUstream) -> Result<StreamEvent, String> {
        let mut event = null_mut();
        let kind = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a GPU is current; the driver writes the handle.
        check(unsafe { sys::cuEventCreate(&mut event, kind) })?;
        let mark = StreamEvent(event);
        // SAFETY: both handles live.
        check(unsafe { sys::cuEventRecord(mark.0, stream) })?;
        Ok(mark)
    }

    /// Has later work of a stream wait until the mark has passed.
    pub(crate) fn make_wait(&self, stream: CUstream) -> Result<(), String> {
        // SAFETY: both handles live; the driver remembers the mark after it is destroyed.
        check(unsafe { sys::cuStreamWaitEvent(stream, self.0, 0) })
    }

    pub(crate) fn has_passed(&self) -> Result<bool, String> {
        // SAFETY: the handle lives.
        match unsafe { sys::cuEventQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check(other).map(|()| true),
        }
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once; the driver puts it off until the mark has passed.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A result code of the driver.
pub(crate) fn check(result: CUresult) -> Result<(), String> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("CUDA: {other:?}")),
    }
}

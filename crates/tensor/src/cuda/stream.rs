//! Streams: queues of work that the GPU takes in order. Events: marks in them that others wait for.

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUstream, CUstream_flags};

use super::status::{CheckStatus, destroyed_by};
use crate::error::Result;

/// A queue of work on a GPU.
#[derive(Debug)]
pub struct Stream(CUstream);

// SAFETY: the driver locks its streams; any thread may use one.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of the current context that does not wait for the default stream.
    pub(super) fn new() -> Result<Stream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes the handle.
        unsafe { sys::cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }
            .check("creating a stream")?;
        Ok(Stream(stream))
    }

    /// The driver's handle, for libraries that queue work of their own; it lives as long as `self`.
    pub fn raw(&self) -> CUstream {
        self.0
    }

    /// Waits on the host until all its work is done; an error of that work shows here.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { sys::cuStreamSynchronize(self.0) }.check("waiting for the GPU")
    }

    /// Lets its later work wait until `event` has passed, without the host.
    pub(super) fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles live.
        unsafe { sys::cuStreamWaitEvent(self.0, event.0, 0) }.check("making a stream wait")
    }
}

destroyed_by!(Stream, sys::cuStreamDestroy_v2);

/// A mark in a stream.
#[derive(Debug)]
pub(super) struct Event(CUevent);

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new() -> Result<Event> {
        Event::with(CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that knows when it passed.
    pub(super) fn timed() -> Result<Event> {
        Event::with(CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(flags: CUevent_flags) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes the handle.
        unsafe { sys::cuEventCreate(&mut event, flags as u32) }.check("creating an event")?;
        Ok(Event(event))
    }

    /// The time between two events that have passed, both timed.
    pub(super) fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: both handles live; the driver writes a number.
        unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.0, self.0) }.check("timing work")?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Puts the mark behind all work that the stream has now.
    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live.
        unsafe { sys::cuEventRecord(self.0, stream.0) }.check("marking a stream")
    }

    /// Waits on the host until the mark has passed; an event never recorded has.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle lives.
        unsafe { sys::cuEventSynchronize(self.0) }.check("waiting for the GPU")
    }
}

destroyed_by!(Event, sys::cuEventDestroy_v2);

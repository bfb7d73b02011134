//! Copies between host and GPU through pinned memory.
//!
//! The GPU reads pages only where they are pinned; for other memory the driver copies through pages of its
//! own and waits for the stream meanwhile. A few pinned slots of our own keep an upload asynchronous, and let
//! the copy into one slot run beside the transfer of another.

use std::ptr::NonNull;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::status::CheckStatus;
use super::stream::{Event, Stream};
use crate::error::Result;

const SLOTS: usize = 4;
const SLOT: usize = 4 << 20;

/// Pinned slots, used in turn.
#[derive(Debug)]
pub(super) struct Staging {
    slots: Vec<PinnedSlot>,
    next: usize,
}

#[derive(Debug)]
struct PinnedSlot {
    memory: NonNull<u8>,
    /// The slot's last transfer.
    done: Event,
}

// SAFETY: pinned memory is plain memory with one owner.
unsafe impl Send for PinnedSlot {}

impl Staging {
    pub(super) fn new() -> Result<Staging> {
        let slots = (0..SLOTS).map(|_| PinnedSlot::new()).collect::<Result<_>>()?;
        Ok(Staging { slots, next: 0 })
    }

    /// Works with the slots behind a lock; the first to do so makes them, in the current context.
    pub(super) fn with<R>(
        slots: &Mutex<Option<Staging>>,
        work: impl FnOnce(&mut Staging) -> Result<R>,
    ) -> Result<R> {
        let mut staging = slots.lock().expect("no panic while locked");
        if staging.is_none() {
            *staging = Some(Staging::new()?);
        }
        work(staging.as_mut().expect("just made"))
    }

    /// Puts the bytes on the stream's way to `to`. They have been read when this returns; they arrive in the
    /// stream's order.
    ///
    /// # Safety
    /// `to` is the address of at least `bytes.len()` bytes of the GPU's memory.
    pub(super) unsafe fn upload(&mut self, stream: &Stream, to: CUdeviceptr, bytes: &[u8]) -> Result<()> {
        for (i, chunk) in bytes.chunks(SLOT).enumerate() {
            let slot = &self.slots[self.next];
            self.next = (self.next + 1) % SLOTS;
            slot.done.synchronize()?;
            // SAFETY: the slot holds SLOT bytes, and its last transfer is over; the caller vouches for `to`.
            unsafe {
                slot.memory.as_ptr().copy_from_nonoverlapping(chunk.as_ptr(), chunk.len());
                let from = slot.memory.as_ptr().cast_const().cast();
                sys::cuMemcpyHtoDAsync_v2(to + (i * SLOT) as u64, from, chunk.len(), stream.raw())
            }
            .check("copying to the GPU")?;
            slot.done.record(stream)?;
        }
        Ok(())
    }

    /// Brings bytes from `from`, after all earlier work of the stream, and waits for them.
    ///
    /// # Safety
    /// `from` is the address of at least `bytes.len()` bytes of the GPU's memory.
    pub(super) unsafe fn download(
        &mut self,
        stream: &Stream,
        from: CUdeviceptr,
        bytes: &mut [u8],
    ) -> Result<()> {
        let total = bytes.len();
        let chunks = total.div_ceil(SLOT);
        let length = |i: usize| SLOT.min(total - i * SLOT);
        let fetch = |i: usize| -> Result<()> {
            let slot = &self.slots[i % SLOTS];
            // An upload may still read the slot on another stream.
            slot.done.synchronize()?;
            // SAFETY: the slot holds SLOT bytes and is free; the caller vouches for `from`.
            unsafe {
                let to = slot.memory.as_ptr().cast();
                sys::cuMemcpyDtoHAsync_v2(to, from + (i * SLOT) as u64, length(i), stream.raw())
            }
            .check("copying from the GPU")?;
            slot.done.record(stream)
        };
        for i in 0..chunks.min(SLOTS) {
            fetch(i)?;
        }
        for (i, chunk) in bytes.chunks_mut(SLOT).enumerate() {
            let slot = &self.slots[i % SLOTS];
            slot.done.synchronize()?;
            // SAFETY: the transfer into the slot is over, and it brought as many bytes as the chunk has.
            unsafe { chunk.as_mut_ptr().copy_from_nonoverlapping(slot.memory.as_ptr(), chunk.len()) };
            if i + SLOTS < chunks {
                fetch(i + SLOTS)?;
            }
        }
        Ok(())
    }
}

impl PinnedSlot {
    fn new() -> Result<PinnedSlot> {
        let done = Event::new()?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: a context is current; the driver writes the address.
        unsafe { sys::cuMemHostAlloc(&mut memory, SLOT, 0) }.check("pinning host memory")?;
        let memory = NonNull::new(memory.cast()).expect("the driver gave an address");
        Ok(PinnedSlot { memory, done })
    }
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        let _ = self.done.synchronize();
        // SAFETY: allocated by `new`, and no transfer uses it any more.
        let _ = unsafe { sys::cuMemFreeHost(self.memory.as_ptr().cast()) };
    }
}

//! The GPU's memory: blocks counted in the ledger, and kept for reuse when freed.
//!
//! Asking the driver for memory stops the GPU; a training step asks for the same sizes again and again. So
//! freed blocks wait in a list by size. All work on a buffer is queued on the compute stream, hence a block may
//! be handed on while the GPU still uses it: whoever gets it queues behind that use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};

use super::Cuda;
use super::status::CheckStatus;
use super::stream::{Event, Stream};
use crate::error::{Error, Result};
use crate::memory::{BufferLabel, Category};

/// Small blocks are multiples of this, and every block is aligned to it at least.
const ALIGN: usize = 512;
/// The driver maps large blocks in pages of this size.
const PAGE: usize = 2 << 20;

/// A block of a GPU's memory. Its length is what was asked for and counted; its capacity may be larger.
#[derive(Debug)]
pub struct CudaBuffer {
    block: CudaBlock,
    len: usize,
    label: BufferLabel,
    /// Whether it was filled over the copy stream, and its block goes back to others of that kind.
    sent: bool,
    cuda: Cuda,
}

impl CudaBuffer {
    pub(super) fn new(cuda: &Cuda, len: usize, category: Category) -> Result<CudaBuffer> {
        let block = CudaBlock::new(cuda, len, category)?;
        Ok(CudaBuffer { block, len, label: BufferLabel::new(category), sent: false, cuda: cuda.clone() })
    }

    /// One that is filled over the copy stream; counts it.
    pub(super) fn sent(cuda: &Cuda, block: CudaBlock, len: usize, category: Category) -> CudaBuffer {
        cuda.ledger().allocate(category, len);
        CudaBuffer { block, len, label: BufferLabel::new(category), sent: true, cuda: cuda.clone() }
    }

    /// Marks the last use of its block and puts it back to those that are filled over the copy stream; gives
    /// it back where the GPU is broken.
    fn retire(&self, block: CudaBlock) -> Result<(), CudaBlock> {
        let mark = || -> Result<Event> {
            self.cuda.bind()?;
            let last_use = Event::new()?;
            last_use.record(self.cuda.compute())?;
            Ok(last_use)
        };
        match mark() {
            Ok(last_use) => self.cuda.sent_blocks().give(block, last_use),
            Err(_) => return Err(block),
        }
        Ok(())
    }

    /// The GPU it belongs to.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Counts it under another category.
    pub(crate) fn tag_memory(&mut self, category: Category) {
        self.cuda.ledger().retag(self.label.category(), category, self.len);
        self.label = BufferLabel::new(category);
    }

    /// A backward pass waits for it, once more.
    pub(crate) fn save(&self) {
        self.label.save(self.cuda.ledger(), self.len);
    }

    /// One backward pass fewer waits for it.
    pub(crate) fn release(&self) {
        self.label.release(self.cuda.ledger(), self.len);
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address on the GPU, a multiple of 256; 0 where it is empty.
    pub fn address(&self) -> CUdeviceptr {
        self.block.address
    }

    /// Sets every byte, in the order of the compute stream.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        let cuda = self.cuda.clone();
        self.fill_on(cuda.compute(), byte)
    }

    /// The same in the order of another stream.
    pub(crate) fn fill_on(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        self.cuda.bind()?;
        // SAFETY: the block holds `len` bytes.
        unsafe { sys::cuMemsetD8Async(self.address(), byte, self.len, stream.raw()) }.check("filling memory")
    }

    /// Overwrites it with as many bytes of the host, in the order of the compute stream.
    pub fn upload(&mut self, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.len, "an upload of another length");
        // SAFETY: the block holds `len` bytes.
        self.cuda.with_staging(|staging, stream| unsafe { staging.upload(stream, self.address(), bytes) })
    }

    /// Copies it to the host, after all earlier work of the compute stream.
    pub fn download(&self, bytes: &mut [u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.len, "a download of another length");
        // SAFETY: the block holds `len` bytes.
        self.cuda.with_staging(|staging, stream| unsafe { staging.download(stream, self.address(), bytes) })
    }

    /// The first numbers of 8 bytes in it, after all earlier work of the compute stream: a kernel's few results.
    pub fn words<const N: usize>(&self) -> Result<[u64; N]> {
        assert!(8 * N <= self.len, "{N} words were to be read from {} bytes", self.len);
        let mut words = [0u64; N];
        self.cuda.with_staging(|staging, stream| {
            // SAFETY: the block holds as many bytes.
            unsafe { staging.download(stream, self.address(), bytemuck::cast_slice_mut(&mut words)) }
        })?;
        Ok(words)
    }

    /// Overwrites it with another buffer of the same GPU and length, in the order of the compute stream.
    pub(crate) fn copy_from(&mut self, other: &CudaBuffer) -> Result<()> {
        assert_eq!(other.len, self.len, "a copy of another length");
        self.copy_range_from(0, other, 0, self.len)
    }

    /// Overwrites `len` bytes from `at` on with those of another buffer of the same GPU from `from` on, in
    /// the order of the compute stream.
    pub(crate) fn copy_range_from(
        &mut self,
        at: usize,
        other: &CudaBuffer,
        from: usize,
        len: usize,
    ) -> Result<()> {
        assert!(at + len <= self.len && from + len <= other.len, "a copy beyond a buffer's end");
        assert!(self.cuda.is(&other.cuda), "a copy between two GPUs");
        if len == 0 {
            return Ok(());
        }
        self.cuda.bind()?;
        let stream = self.cuda.compute().raw();
        let (into, from) = (self.address() + at as u64, other.address() + from as u64);
        // SAFETY: both blocks hold these bytes, and a buffer borrowed mutably is not the other.
        unsafe { sys::cuMemcpyDtoDAsync_v2(into, from, len, stream) }.check("copying on the GPU")
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.cuda.ledger().free(self.label.category(), self.len);
        let block = std::mem::replace(&mut self.block, CudaBlock { address: 0, capacity: 0 });
        let left = if self.sent && block.capacity > 0 { self.retire(block) } else { Err(block) };
        if let Err(block) = left {
            self.cuda.free_blocks().give(block);
        }
    }
}

/// An owned allocation; capacity 0 owns nothing.
#[derive(Debug)]
pub(super) struct CudaBlock {
    address: CUdeviceptr,
    capacity: usize,
}

impl CudaBlock {
    /// A block of at least `len` bytes, counted. Unlike a [`CudaBuffer`] it does not keep its GPU open.
    pub(super) fn new(cuda: &Cuda, len: usize, category: Category) -> Result<CudaBlock> {
        let block = match cuda.free_blocks().take(len) {
            Some(block) => block,
            None => CudaBlock::fresh(cuda, len, category)?,
        };
        cuda.ledger().allocate(category, len);
        Ok(block)
    }

    /// A block of the driver's, which nobody has used, not counted yet.
    pub(super) fn fresh(cuda: &Cuda, len: usize, category: Category) -> Result<CudaBlock> {
        if len == 0 {
            return Ok(CudaBlock { address: 0, capacity: 0 });
        }
        let refused = || Error::OutOfMemory { asked: len, category, used: Box::new(cuda.ledger().usage()) };
        let capacity = rounded(len).ok_or_else(refused)?;
        cuda.bind()?;
        let free = cuda.free_blocks();
        if let Some(block) = free.ask(capacity)? {
            return Ok(block);
        }
        // The driver waits for the GPU before it takes a block back.
        cuda.sent_blocks().drain().into_iter().for_each(|block| free.give(block));
        free.clear();
        free.ask(capacity)?.ok_or_else(refused)
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for CudaBlock {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: allocated by `CudaFreeBlocks::ask`, freed once. At the process's end the driver may be gone.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// What is asked of the driver for `len` bytes.
fn rounded(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(if len >= PAGE / 2 { PAGE } else { ALIGN })
}

/// Freed blocks by capacity.
#[derive(Debug, Default)]
pub(super) struct CudaFreeBlocks {
    lists: Mutex<FreeLists>,
    held: AtomicUsize,
}

type BlocksByCapacity = BTreeMap<usize, Vec<CudaBlock>>;

/// Blocks for everybody and, while work is recorded, those that it has used: it takes and gives no others.
#[derive(Debug, Default)]
struct FreeLists {
    blocks: BlocksByCapacity,
    aside: Option<BlocksByCapacity>,
}

impl FreeLists {
    fn current(&mut self) -> &mut BlocksByCapacity {
        self.aside.as_mut().unwrap_or(&mut self.blocks)
    }
}

impl CudaFreeBlocks {
    /// Bytes taken from the driver and not given back: buffers in use, and blocks that wait.
    pub(super) fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// The smallest block that holds `len` and wastes little: an eighth, or part of a page.
    fn take(&self, len: usize) -> Option<CudaBlock> {
        if len == 0 {
            return Some(CudaBlock { address: 0, capacity: 0 });
        }
        let slack = (len / 8).max(if len >= PAGE / 2 { PAGE } else { ALIGN });
        let mut lists = self.lists();
        let blocks = lists.current();
        let (&capacity, list) = blocks.range_mut(len..=len.saturating_add(slack)).next()?;
        let block = list.pop();
        if list.is_empty() {
            blocks.remove(&capacity);
        }
        block
    }

    /// A block from the driver; `None` where the GPU is full.
    fn ask(&self, capacity: usize) -> Result<Option<CudaBlock>> {
        let mut address = 0;
        // SAFETY: a context is current; the driver writes the address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, capacity) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Ok(None),
            other => other.check("allocating memory")?,
        }
        self.held.fetch_add(capacity, Relaxed);
        Ok(Some(CudaBlock { address, capacity }))
    }

    pub(super) fn give(&self, block: CudaBlock) {
        if block.capacity > 0 {
            self.lists().current().entry(block.capacity).or_default().push(block);
        }
    }

    /// From now on blocks come from the driver or from those that were freed since, which are kept apart.
    pub(super) fn set_aside(&self) {
        self.lists().aside = Some(BTreeMap::new());
    }

    /// Whether blocks are kept apart.
    pub(super) fn is_setting_aside(&self) -> bool {
        self.lists().aside.is_some()
    }

    /// The blocks that were kept apart; the next ones are for everybody.
    pub(super) fn end_setting_aside(&self) -> Vec<CudaBlock> {
        self.lists().aside.take().into_iter().flatten().flat_map(|(_, list)| list).collect()
    }

    fn lists(&self) -> MutexGuard<'_, FreeLists> {
        self.lists.lock().expect("no panic while locked")
    }

    /// Gives all waiting blocks back to the driver.
    pub(super) fn clear(&self) {
        let blocks = std::mem::take(&mut self.lists().blocks);
        let bytes: usize = blocks.iter().map(|(capacity, list)| capacity * list.len()).sum();
        self.held.fetch_sub(bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    /// Blocks that no driver gave, and so none may take back.
    fn waiting(capacities: &[usize]) -> ManuallyDrop<CudaFreeBlocks> {
        let free = CudaFreeBlocks::default();
        for &capacity in capacities {
            free.give(CudaBlock { address: capacity as u64, capacity });
        }
        ManuallyDrop::new(free)
    }

    #[test]
    fn a_block_is_reused_where_it_fits_and_wastes_little() {
        let free = waiting(&[512, 1024, PAGE, 2 * PAGE, 64 * PAGE]);
        let take = |len| free.take(len).map(|block| ManuallyDrop::new(block).capacity);
        assert_eq!(take(500), Some(512));
        assert_eq!(take(500), None);
        assert_eq!(take(600), Some(1024));
        assert_eq!(take(PAGE - 5), Some(PAGE));
        assert_eq!(take(PAGE - 5), None);
        assert_eq!(take(PAGE + 5), Some(2 * PAGE));
        assert_eq!(take(50 * PAGE), None);
        assert_eq!(take(60 * PAGE), Some(64 * PAGE));
        assert_eq!(take(0), Some(0));
    }

    #[test]
    fn sizes_are_rounded_to_what_the_driver_maps() {
        assert_eq!(rounded(1), Some(512));
        assert_eq!(rounded(PAGE / 2 - 1), Some(PAGE / 2));
        assert_eq!(rounded(PAGE / 2), Some(PAGE));
        assert_eq!(rounded(3 * PAGE + 1), Some(4 * PAGE));
        assert_eq!(rounded(usize::MAX), None);
    }
}

//! Host memory: 64-byte aligned blocks, counted in the ledger, and kept for reuse when freed.
//!
//! A training step asks for the same sizes again and again. Handing large blocks back to the system would
//! cost a page fault for every 4 KiB at the next step, so freed blocks wait in a list by size, and large ones
//! ask for huge pages.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Mutex;

use super::Cpu;
use crate::error::{Error, Result};
use crate::memory::{BufferLabel, Category};

const ALIGN: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// A block of host memory. Its length is what was asked for and counted; its capacity may be larger.
#[derive(Debug)]
pub struct HostBuffer {
    block: HostBlock,
    len: usize,
    label: BufferLabel,
    cpu: Cpu,
}

impl HostBuffer {
    pub(super) fn new(cpu: &Cpu, len: usize, category: Category) -> Result<HostBuffer> {
        let block = match cpu.free_blocks().take(len) {
            Some(block) => block,
            None => HostBlock::new(len).ok_or_else(|| Error::OutOfMemory {
                asked: len,
                category,
                used: Box::new(cpu.ledger().usage()),
            })?,
        };
        cpu.ledger().allocate(category, len);
        Ok(HostBuffer { block, len, label: BufferLabel::new(category), cpu: cpu.clone() })
    }

    /// The processor it belongs to.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Counts it under another category.
    pub(crate) fn tag_memory(&mut self, category: Category) {
        self.cpu.ledger().retag(self.label.category(), category, self.len);
        self.label = BufferLabel::new(category);
    }

    /// A backward pass waits for it, once more.
    pub(crate) fn save(&self) {
        self.label.save(self.cpu.ledger(), self.len);
    }

    /// One backward pass fewer waits for it.
    pub(crate) fn release(&self) {
        self.label.release(self.cpu.ledger(), self.len);
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block holds at least `len` bytes, all initialised: blocks are born zeroed.
        unsafe { std::slice::from_raw_parts(self.block.pointer.as_ptr(), self.len) }
    }

    /// Its bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.block.pointer.as_ptr(), self.len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.cpu.ledger().free(self.label.category(), self.len);
        let block = std::mem::replace(&mut self.block, HostBlock::DANGLING);
        self.cpu.free_blocks().give(block);
    }
}

/// An owned allocation; capacity 0 owns nothing.
#[derive(Debug)]
pub(super) struct HostBlock {
    pointer: NonNull<u8>,
    capacity: usize,
}

// SAFETY: a block is plain memory with one owner.
unsafe impl Send for HostBlock {}
// SAFETY: as above; shared access is read-only.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    // 64 is a non-null, 64-aligned address that is never read through.
    const DANGLING: HostBlock = HostBlock {
        pointer: NonNull::without_provenance(std::num::NonZero::new(ALIGN).unwrap()),
        capacity: 0,
    };

    /// Zeroed memory for at least `len` bytes, unless the system has none.
    pub(super) fn new(len: usize) -> Option<HostBlock> {
        if len == 0 {
            return Some(HostBlock::DANGLING);
        }
        if len >= HUGE_PAGE {
            return HostBlock::map(len);
        }
        let layout = HostBlock::layout(len);
        // SAFETY: the layout is not empty.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(HostBlock { pointer, capacity: layout.size() })
    }

    /// Its first byte.
    pub(super) fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// The bytes it holds.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// A large block straight from the system, so that its pages are huge and come zeroed only when touched.
    fn map(len: usize) -> Option<HostBlock> {
        let capacity = len.checked_next_multiple_of(HUGE_PAGE)?;
        // SAFETY: a fresh anonymous mapping; it aliases nothing.
        let pointer = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                capacity,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if pointer == libc::MAP_FAILED {
            return None;
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice about our own pages; it changes no content, and its failure is harmless.
        unsafe {
            libc::madvise(pointer, capacity, libc::MADV_HUGEPAGE)
        };
        Some(HostBlock { pointer: NonNull::new(pointer.cast())?, capacity })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.next_multiple_of(ALIGN), ALIGN)
            .expect("a block below the size of a huge page")
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        match self.capacity {
            0 => {}
            // SAFETY: mapped by `HostBlock::map` with this length.
            HUGE_PAGE.. => unsafe {
                libc::munmap(self.pointer.as_ptr().cast(), self.capacity);
            },
            // SAFETY: allocated by `HostBlock::new` with this layout.
            _ => unsafe { dealloc(self.pointer.as_ptr(), HostBlock::layout(self.capacity)) },
        }
    }
}

/// Freed blocks by capacity.
#[derive(Debug, Default)]
pub(super) struct HostFreeBlocks(Mutex<BTreeMap<usize, Vec<HostBlock>>>);

impl HostFreeBlocks {
    /// The smallest block that holds `len` and wastes little: an eighth of itself, or part of a huge page.
    fn take(&self, len: usize) -> Option<HostBlock> {
        let mut blocks = self.0.lock().expect("no panic while locked");
        let slack = (len / 8).max(if len >= HUGE_PAGE { HUGE_PAGE } else { ALIGN });
        let (&capacity, list) = blocks.range_mut(len..=len + slack).next()?;
        let block = list.pop();
        if list.is_empty() {
            blocks.remove(&capacity);
        }
        block
    }

    fn give(&self, block: HostBlock) {
        if block.capacity > 0 {
            self.0.lock().expect("no panic while locked").entry(block.capacity).or_default().push(block);
        }
    }

    /// Gives all waiting blocks back to the system.
    pub(super) fn clear(&self) {
        self.0.lock().expect("no panic while locked").clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_counts_every_byte_and_blocks_are_reused() {
        let cpu = Cpu::new(1).unwrap();
        let a = cpu.allocate(1000, Category::Weights).unwrap();
        let b = cpu.allocate(3 << 20, Category::Activations).unwrap();
        assert_eq!(cpu.ledger().current(Category::Weights), 1000);
        assert_eq!(cpu.ledger().total(), 1000 + (3 << 20));
        let address = b.bytes().as_ptr();
        drop(b);
        assert_eq!(cpu.ledger().total(), 1000);
        let c = cpu.allocate(3 << 20, Category::Workspace).unwrap();
        assert_eq!(c.bytes().as_ptr(), address);
        drop((a, c));
        assert!(cpu.free_blocks().take(3 << 20).is_some_and(|block| block.capacity > 0));
        drop(cpu.allocate(5 << 20, Category::Workspace).unwrap());
        cpu.release_unused();
        assert!(cpu.free_blocks().take(5 << 20).is_none(), "the system has them");
        assert_eq!(cpu.ledger().total(), 0);
        assert_eq!(cpu.ledger().total_peak(), 5 << 20);
        assert_eq!(cpu.ledger().peak(Category::Workspace), 5 << 20);
    }

    #[test]
    fn an_absurd_size_is_an_error_not_an_abort() {
        let cpu = Cpu::new(1).unwrap();
        assert!(matches!(cpu.allocate(1 << 60, Category::Weights), Err(Error::OutOfMemory { .. })));
    }
}

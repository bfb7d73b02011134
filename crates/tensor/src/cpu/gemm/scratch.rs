//! Memory that a thread keeps between products, so that a small one does not pay for an allocation.
//!
//! What a product takes of it is counted in the device's ledger while the product runs ([`super::packing`]).
//! Between products it waits unbooked, as freed blocks do: at most what the largest product of the thread
//! took.

use std::cell::Cell;

use crate::cpu::buffer::HostBlock;

/// The scratch space that one product needs.
#[derive(Debug, Default)]
pub(super) struct GemmScratch {
    /// A block of `a`, packed.
    pub a: GrowingBlock,
    /// Which block that is: the product's number, its first row, its first depth.
    pub packed_a: Option<(u64, usize, usize)>,
    /// Sums on their way.
    pub sums: GrowingBlock,
}

/// A block that grows when asked to.
#[derive(Debug, Default)]
pub(super) struct GrowingBlock(Option<HostBlock>);

impl GrowingBlock {
    /// Memory for `len` elements, 64-byte aligned, with any content.
    pub fn alloc<C>(&mut self, len: usize) -> *mut C {
        let bytes = (len * size_of::<C>()).max(64);
        match &self.0 {
            Some(block) if block.capacity() >= bytes => {}
            _ => {
                self.0 = None;
                let block =
                    HostBlock::new(bytes).unwrap_or_else(|| panic!("no memory: {bytes} bytes of scratch"));
                self.0 = Some(block);
            }
        }
        self.0.as_ref().expect("just made").pointer().cast()
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<GemmScratch>>> = const { Cell::new(None) };
    static PACKED: Cell<GrowingBlock> = const { Cell::new(GrowingBlock(None)) };
}

/// Lends this thread's scratch. A call within the call finds none and makes its own.
pub(super) fn with<R>(work: impl FnOnce(&mut GemmScratch) -> R) -> R {
    let mut scratch = SCRATCH.take().unwrap_or_default();
    let result = work(&mut scratch);
    SCRATCH.set(Some(scratch));
    result
}

/// As [`with`], for the panels of `b` (or partial sums), which the threads share while one of them owns it.
pub(super) fn with_shared<R>(work: impl FnOnce(&mut GrowingBlock) -> R) -> R {
    let mut space = PACKED.take();
    let result = work(&mut space);
    PACKED.set(space);
    result
}

//! How operations split their work: into chunks of a size that depends on the shapes alone.

pub(crate) use crate::cpu::CHUNK;
use crate::cpu::Cpu;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Rows of a chunk.
pub(crate) fn rows(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

/// Runs `task` on every item, over the threads, in no particular order.
pub(crate) fn each<T: Send>(cpu: &Cpu, items: impl Iterator<Item = T>, task: impl Fn(T) + Sync) {
    let mut items: Vec<Option<T>> = items.map(Some).collect();
    cpu.for_chunks(&mut items, 1, |_, item| task(item[0].take().expect("each item is met once")));
}

/// The tensor itself if nobody else holds it, otherwise a copy that may be written to.
pub(crate) fn writable(mut x: Tensor) -> Result<Tensor> {
    if x.is_unique() {
        return Ok(x);
    }
    match x.device() {
        Device::Cpu(cpu) => {
            let mut copy = x.empty_like(Category::Transient)?;
            let bytes = x.bytes();
            cpu.for_chunks(copy.bytes_mut(), 4 * CHUNK, |at, copy| copy.copy_from_slice(&bytes[at]));
            Ok(copy)
        }
        Device::Cuda(_) => x.duplicate(Category::Transient),
    }
}

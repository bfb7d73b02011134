//! The processor as a device: a pool of threads, an instruction set, a ledger and a cache of freed blocks.
//!
//! Work is split by its size, never by the number of threads, and partial sums are added in the order of the
//! chunks: so the same run gives the same bits on one thread and on many.

pub mod activation;
pub mod buffer;
pub mod gemm;
pub mod isa;
pub mod lanes;
pub mod math;
mod read;
pub mod scratch;
mod team;

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::memory::{Category, Ledger};
use buffer::{HostBuffer, HostFreeBlocks};
pub use isa::Isa;
use scratch::DisjointSlice;

/// Elements of a chunk of work: enough to hide the cost of handing it to a thread, and within the
/// second-level cache.
pub const CHUNK: usize = 1 << 14;

/// A handle to the processor; clones share its threads, its ledger and its cache of blocks.
#[derive(Debug, Clone)]
pub struct Cpu(Arc<CpuShared>);

#[derive(Debug)]
struct CpuShared {
    pool: rayon::ThreadPool,
    isa: Isa,
    ledger: Ledger,
    free: HostFreeBlocks,
}

/// Runs tasks over the threads of the current pool: of one processor's, or else those that rayon has for all.
pub(crate) fn over_threads(tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    (0..tasks).into_par_iter().with_max_len(1).for_each(task);
}

/// Splits `data` into chunks of at most `chunk` elements, each the `task` of one of those that `spread` runs.
pub(crate) fn chunks_over<T: Send>(
    spread: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
    data: &mut [T],
    chunk: usize,
    task: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let len = data.len();
    let data = DisjointSlice::new(data);
    spread(len.div_ceil(chunk), &|i| {
        let range = i * chunk..((i + 1) * chunk).min(len);
        // SAFETY: the ranges of different tasks do not overlap.
        task(range.clone(), unsafe { data.range_mut(range) });
    });
}

impl Cpu {
    /// The processor with the best instructions it has.
    pub fn new(threads: usize) -> Result<Cpu> {
        Cpu::with_isa(threads, Isa::best())
    }

    /// The processor restricted to one of the instruction sets that it has: how tests reach the slower paths.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Cpu> {
        let refused = |why: String| Error::Threads { threads, why };
        if threads == 0 {
            return Err(refused("at least one is needed".into()));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("espalier-cpu-{i}"))
            .build()
            .map_err(|e| refused(e.to_string()))?;
        Ok(Cpu(Arc::new(CpuShared { pool, isa, ledger: Ledger::default(), free: HostFreeBlocks::default() })))
    }

    pub fn threads(&self) -> usize {
        self.0.pool.current_num_threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.0.isa
    }

    /// What its memory is taken for, by category.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Runs `work` on one of the pool's threads, from where the others are woken fastest.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.pool.install(work)
    }

    /// Runs `task(0) .. task(tasks - 1)` over the threads, in no particular order.
    pub fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.spread(tasks, &task);
    }

    /// [`Cpu::for_each`] behind a pointer: the thread pool's machinery is compiled once, not for every operation.
    fn spread(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.threads() == 1 {
            (0..tasks).for_each(task);
        } else if !self.with_team(tasks, task) {
            self.enter(|| over_threads(tasks, task));
        }
    }

    /// Splits `data` into chunks of at most `chunk` elements and runs `task(chunk's range, chunk)` on each.
    pub(crate) fn for_chunks<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        task: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        chunks_over(|tasks, task| self.spread(tasks, task), data, chunk, task);
    }

    /// Splits `0..len` into chunks, maps each, and returns the results in the order of the chunks.
    pub(crate) fn map_chunks<R: Send>(
        &self,
        len: usize,
        chunk: usize,
        map: impl Fn(Range<usize>) -> R + Sync,
    ) -> Vec<R> {
        let mut results: Vec<Option<R>> = (0..len.div_ceil(chunk)).map(|_| None).collect();
        self.for_chunks(&mut results, 1, |index, result| {
            let start = index.start * chunk;
            result[0] = Some(map(start..(start + chunk).min(len)));
        });
        results.into_iter().map(|result| result.expect("every piece was mapped")).collect()
    }

    /// A block of memory counted under `category`; see [`HostBuffer`].
    pub fn allocate(&self, bytes: usize, category: Category) -> Result<HostBuffer> {
        HostBuffer::new(self, bytes, category)
    }

    /// What tells two processors apart.
    fn address(&self) -> *const () {
        Arc::as_ptr(&self.0).cast()
    }

    /// Gives the memory of freed buffers back to the system.
    pub fn release_unused(&self) {
        self.free_blocks().clear();
    }

    fn free_blocks(&self) -> &HostFreeBlocks {
        &self.0.free
    }
}

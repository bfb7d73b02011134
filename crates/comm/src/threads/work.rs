//! The copies and reductions of a call that all its ranks have made, in chunks that any thread may take.
//!
//! Chunks are cut by size and claimed from a counter. Which thread does which chunk is left to chance; what
//! is computed is not: an element's sum is taken in the order of ranks. An all-reduce reads every rank's
//! chunk once, and writes the result back to lines that are still in the cache: it moves `2 P n` bytes, the
//! least there is.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use espalier_tensor::bf16;

use crate::call::{Call, Operation, Reduce};
use crate::data::{CommBuffer, ElementType};
use crate::reduce::{self, Reducible};

/// Bytes of one rank that a thread takes at a time: enough to make claiming cheap, few enough to spread over
/// threads.
const CHUNK_BYTES: usize = 256 << 10;

/// Where a rank's data lies. Empty where the call gives the rank none.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankBuffers {
    read: *const u8,
    write: *mut u8,
}

impl RankBuffers {
    /// The addresses of a rank's data, which must stay where it is until the work is done.
    pub(super) fn of(read: Option<&CommBuffer>, write: Option<&mut CommBuffer>) -> RankBuffers {
        RankBuffers {
            read: read.map_or(std::ptr::null(), |data| data.bytes().as_ptr()),
            write: write.map_or(std::ptr::null_mut(), |data| data.bytes_mut().as_mut_ptr()),
        }
    }
}

/// The work of one call.
#[derive(Debug)]
pub(super) struct CollectiveWork {
    task: DataMove,
    element: ElementType,
    /// Elements that are cut into chunks.
    elements: usize,
    chunks: usize,
    buffers: Vec<RankBuffers>,
    claimed: AtomicUsize,
    done: AtomicUsize,
}

// SAFETY: the buffers are memory of data that the collective owns while the work exists; `run_chunk` says why
// threads that work on different chunks never touch the same bytes, but to read.
unsafe impl Send for CollectiveWork {}
// SAFETY: as above.
unsafe impl Sync for CollectiveWork {}

/// What is done, with ranks as indices into the buffers.
#[derive(Debug, Clone, Copy)]
enum DataMove {
    /// Nothing moves.
    Barrier,
    /// One rank's data to all that write.
    Copy { from: usize },
    /// The reduction of what all write, to all.
    AllReduce(Reduce),
    /// The reduction of what all read; rank `r` writes the `r`-th shard.
    ReduceScatter(Reduce),
    /// What each reads, to the `r`-th shard of all.
    AllGather,
}

impl CollectiveWork {
    /// The work of a call between these buffers: those of each rank, or of sender and receiver.
    pub(super) fn new(call: &Call, buffers: Vec<RankBuffers>) -> CollectiveWork {
        let ranks = buffers.len();
        let (task, elements) = match call.operation {
            Operation::Barrier => (DataMove::Barrier, 0),
            Operation::Send { .. } | Operation::Receive { .. } => (DataMove::Copy { from: 0 }, call.elements),
            Operation::Broadcast { root } => (DataMove::Copy { from: root }, call.elements),
            // What a single rank has is reduced already.
            Operation::AllReduce(how) => {
                (DataMove::AllReduce(how), if ranks == 1 { 0 } else { call.elements })
            }
            Operation::ReduceScatter(how) => (DataMove::ReduceScatter(how), call.elements),
            Operation::AllGather | Operation::Split => (DataMove::AllGather, call.elements),
        };
        let element = call.element.unwrap_or(ElementType::U32);
        let chunks = (elements * element.bytes()).div_ceil(CHUNK_BYTES);
        let (claimed, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        CollectiveWork { task, element, elements, chunks, buffers, claimed, done }
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Whether a chunk is left that nobody works on.
    pub(super) fn has_more(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) < self.chunks
    }

    /// Works on chunks until none is left; returns whether this thread finished the last one to be done.
    pub(super) fn help(&self) -> bool {
        let mut last = false;
        while self.has_more() {
            let chunk = self.claimed.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                break;
            }
            self.run_chunk(chunk);
            // The one who counts the last chunk sees what all others wrote.
            last = self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.chunks;
        }
        last
    }

    fn run_chunk(&self, chunk: usize) {
        let each = CHUNK_BYTES / self.element.bytes();
        let range = chunk * each..((chunk + 1) * each).min(self.elements);
        let bytes = |at: usize| at * self.element.bytes();
        match self.task {
            DataMove::Barrier => {}
            DataMove::Copy { from } => {
                // A sender's data is only read; the root of a broadcast hands its own over like all others.
                let source = match self.buffers[from] {
                    RankBuffers { read, write } if read.is_null() => write.cast_const(),
                    RankBuffers { read, .. } => read,
                };
                let others = self.buffers.iter().enumerate().filter(|(rank, _)| *rank != from);
                for (_, peer) in others {
                    // SAFETY: both hold `elements`, as their calls were compared, and are different data.
                    unsafe { copy(source, peer.write, bytes(range.start)..bytes(range.end)) };
                }
            }
            DataMove::AllGather => self.gather(range),
            DataMove::AllReduce(how) | DataMove::ReduceScatter(how) => match self.element {
                ElementType::F32 => self.reduce::<f32>(how, range),
                ElementType::Bf16 => self.reduce::<bf16>(how, range),
                ElementType::U32 => self.reduce::<u32>(how, range),
                ElementType::U64 => self.reduce::<u64>(how, range),
                ElementType::F64 => self.reduce::<f64>(how, range),
            },
        }
    }

    /// Elements `range` of the full data, each from the rank whose shard it is in.
    fn gather(&self, range: Range<usize>) {
        for (rank, range) in self.by_shard(range) {
            let start = rank * self.shard_len();
            let bytes = self.element.bytes();
            for peer in &self.buffers {
                // SAFETY: a shard has `shard_len()` elements and the full data as many for every rank; they
                // are different data.
                unsafe {
                    let source = self.buffers[rank].read.add((range.start - start) * bytes);
                    copy(source, peer.write.add(range.start * bytes), 0..range.len() * bytes);
                }
            }
        }
    }

    fn reduce<T: Reducible>(&self, how: Reduce, range: Range<usize>) {
        let all_reduce = matches!(self.task, DataMove::AllReduce(_));
        let source = |peer: &RankBuffers| if all_reduce { peer.write.cast_const() } else { peer.read };
        // SAFETY: every buffer holds `elements` of T, aligned, and `range` of them.
        let x = |at: usize| self.buffers.iter().map(move |peer| unsafe { source(peer).cast::<T>().add(at) });
        if all_reduce {
            // SAFETY: as above.
            let y = self.buffers.iter().map(|peer| unsafe { peer.write.cast::<T>().add(range.start) });
            let (x, y): (Vec<_>, Vec<_>) = (x(range.start).collect(), y.collect());
            // SAFETY: `range` belongs to this chunk alone, and different buffers are different data.
            unsafe { reduce::reduce(how, &x, &y, range.len()) };
            return;
        }
        for (rank, range) in self.by_shard(range) {
            let x: Vec<_> = x(range.start).collect();
            // SAFETY: a rank's shard has `shard_len()` elements, and these belong to this chunk alone.
            unsafe {
                let y = self.buffers[rank].write.cast::<T>().add(range.start - rank * self.shard_len());
                reduce::reduce(how, &x, &[y], range.len());
            }
        }
    }

    /// Elements of the full data that belong to one rank.
    fn shard_len(&self) -> usize {
        self.elements / self.buffers.len()
    }

    /// A range of the full data, cut where the shards of two ranks meet.
    fn by_shard(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let shard_len = self.shard_len();
        (range.start / shard_len..range.end.div_ceil(shard_len))
            .map(move |rank| (rank, range.start.max(rank * shard_len)..range.end.min((rank + 1) * shard_len)))
    }
}

/// Copies bytes `range` of one to the same bytes of the other.
///
/// # Safety
/// Both must be valid up to the end of the range, and must not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, range: Range<usize>) {
    // SAFETY: what the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from.add(range.start), to.add(range.start), range.len()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However long the shards, each element of a range is named once, with its rank.
        #[test]
        fn shards_cover_a_range(shard_len in 1..50usize, ranks in 1..6usize, a in 0..250usize, b in 0..250usize) {
            let peer = RankBuffers { read: std::ptr::null(), write: std::ptr::null_mut() };
            let call = Call { operation: Operation::AllGather, element: Some(ElementType::F32), elements: shard_len * ranks };
            let work = CollectiveWork::new(&call, vec![peer; ranks]);
            let (start, end) = (a.min(b).min(shard_len * ranks), a.max(b).min(shard_len * ranks));
            let mut next = start;
            for (rank, range) in work.by_shard(start..end).filter(|(_, range)| !range.is_empty()) {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.clone().all(|i| i / shard_len == rank));
                next = range.end;
            }
            prop_assert_eq!(next, end);
        }
    }
}

//! The moving and adding of a call on which all its ranks have met, cut into pieces that any thread may take.
//!
//! Pieces are cut by size and claimed from a counter. Which thread does which piece is left to chance; what
//! is computed is not: an element's sum is taken in the order of ranks. An all-reduce reads every rank's
//! piece once, and writes the result back to lines that are still in the cache: it moves `2 P n` bytes, the
//! least there is.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use espalier_tensor::bf16;

use crate::call::{Call, Operation, Reduce};
use crate::data::{CommBuffer, ElementType};
use crate::reduce::{self, Reducible};

/// Bytes of one rank that a thread takes at a time: enough to make claiming cheap, few enough to share out.
const PIECE: usize = 256 << 10;

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
    /// Elements that are cut into pieces.
    elements: usize,
    pieces: usize,
    places: Vec<RankBuffers>,
    claimed: AtomicUsize,
    done: AtomicUsize,
}

// SAFETY: the places are memory of data that the collective owns while the work exists; `piece` says why
// threads that work on different pieces never touch the same bytes, but to read.
unsafe impl Send for CollectiveWork {}
// SAFETY: as above.
unsafe impl Sync for CollectiveWork {}

/// What is done, with ranks as indices into the places.
#[derive(Debug, Clone, Copy)]
enum DataMove {
    /// Nothing moves.
    Meet,
    /// One rank's data to all that write.
    Copy { from: usize },
    /// The reduction of what all write, to all.
    AllReduce(Reduce),
    /// The reduction of what all read; rank `r` writes the `r`-th part.
    ReduceScatter(Reduce),
    /// What each reads, to the `r`-th part of all.
    AllGather,
}

impl CollectiveWork {
    /// The work of a call between these places: one a rank, or sender and receiver.
    pub(super) fn new(call: &Call, places: Vec<RankBuffers>) -> CollectiveWork {
        let parts = places.len();
        let (task, elements) = match call.operation {
            Operation::Barrier => (DataMove::Meet, 0),
            Operation::Send { .. } | Operation::Receive { .. } => (DataMove::Copy { from: 0 }, call.elements),
            Operation::Broadcast { root } => (DataMove::Copy { from: root }, call.elements),
            // What one rank has is its own sum.
            Operation::AllReduce(how) => {
                (DataMove::AllReduce(how), if parts == 1 { 0 } else { call.elements })
            }
            Operation::ReduceScatter(how) => (DataMove::ReduceScatter(how), call.elements),
            Operation::AllGather | Operation::Split => (DataMove::AllGather, call.elements),
        };
        let element = call.element.unwrap_or(ElementType::U32);
        let pieces = (elements * element.bytes()).div_ceil(PIECE);
        let (claimed, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        CollectiveWork { task, element, elements, pieces, places, claimed, done }
    }

    /// Into how many pieces it was cut.
    pub(super) fn pieces(&self) -> usize {
        self.pieces
    }

    /// Whether a piece is left that nobody works on.
    pub(super) fn has_more(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) < self.pieces
    }

    /// Works on pieces until none is left; returns whether this thread finished the last one to be done.
    pub(super) fn help(&self) -> bool {
        let mut last = false;
        while self.has_more() {
            let piece = self.claimed.fetch_add(1, Ordering::Relaxed);
            if piece >= self.pieces {
                break;
            }
            self.piece(piece);
            // The one who counts the last piece sees what all others wrote.
            last = self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.pieces;
        }
        last
    }

    fn piece(&self, piece: usize) {
        let each = PIECE / self.element.bytes();
        let range = piece * each..((piece + 1) * each).min(self.elements);
        let bytes = |at: usize| at * self.element.bytes();
        match self.task {
            DataMove::Meet => {}
            DataMove::Copy { from } => {
                // A sender's data is only read; the root of a broadcast hands its own over like all others.
                let source = match self.places[from] {
                    RankBuffers { read, write } if read.is_null() => write.cast_const(),
                    RankBuffers { read, .. } => read,
                };
                let others = self.places.iter().enumerate().filter(|(rank, _)| *rank != from);
                for (_, place) in others {
                    // SAFETY: both hold `elements`, as their calls were compared, and are different data.
                    unsafe { copy(source, place.write, bytes(range.start)..bytes(range.end)) };
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

    /// Elements `range` of the whole, each from the rank whose part it is in.
    fn gather(&self, range: Range<usize>) {
        for (rank, range) in self.by_part(range) {
            let start = rank * self.part();
            let bytes = self.element.bytes();
            for place in &self.places {
                // SAFETY: a part has `part()` elements and a whole as many for every rank; they are different
                // data.
                unsafe {
                    let source = self.places[rank].read.add((range.start - start) * bytes);
                    copy(source, place.write.add(range.start * bytes), 0..range.len() * bytes);
                }
            }
        }
    }

    fn reduce<T: Reducible>(&self, how: Reduce, range: Range<usize>) {
        let all_reduce = matches!(self.task, DataMove::AllReduce(_));
        let source = |place: &RankBuffers| if all_reduce { place.write.cast_const() } else { place.read };
        // SAFETY: every place holds `elements` of T, aligned, and `range` of them.
        let x = |at: usize| self.places.iter().map(move |place| unsafe { source(place).cast::<T>().add(at) });
        if all_reduce {
            // SAFETY: as above.
            let y = self.places.iter().map(|place| unsafe { place.write.cast::<T>().add(range.start) });
            let (x, y): (Vec<_>, Vec<_>) = (x(range.start).collect(), y.collect());
            // SAFETY: `range` belongs to this piece alone, and different places are different data.
            unsafe { reduce::reduce(how, &x, &y, range.len()) };
            return;
        }
        for (rank, range) in self.by_part(range) {
            let x: Vec<_> = x(range.start).collect();
            // SAFETY: rank's part has `part()` elements, and these belong to this piece alone.
            unsafe {
                let y = self.places[rank].write.cast::<T>().add(range.start - rank * self.part());
                reduce::reduce(how, &x, &[y], range.len());
            }
        }
    }

    /// Elements of the whole that belong to one rank.
    fn part(&self) -> usize {
        self.elements / self.places.len()
    }

    /// A range of the whole, cut where the parts of ranks meet.
    fn by_part(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let part = self.part();
        (range.start / part..range.end.div_ceil(part))
            .map(move |rank| (rank, range.start.max(rank * part)..range.end.min((rank + 1) * part)))
    }
}

/// Copies bytes `range` of one to the same place in the other.
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
        /// However long the parts, each element of a range is named once, with its rank.
        #[test]
        fn parts_cover_a_range(part in 1..50usize, ranks in 1..6usize, a in 0..250usize, b in 0..250usize) {
            let place = RankBuffers { read: std::ptr::null(), write: std::ptr::null_mut() };
            let call = Call { operation: Operation::AllGather, element: Some(ElementType::F32), elements: part * ranks };
            let work = CollectiveWork::new(&call, vec![place; ranks]);
            let (start, end) = (a.min(b).min(part * ranks), a.max(b).min(part * ranks));
            let mut next = start;
            for (rank, range) in work.by_part(start..end).filter(|(_, range)| !range.is_empty()) {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.clone().all(|i| i / part == rank));
                next = range.end;
            }
            prop_assert_eq!(next, end);
        }
    }
}

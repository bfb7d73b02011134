//! Bytes that a rank sends, by what they are for.
//!
//! A collective is counted as what it must move at least, whatever algorithm carries it: so the count is the
//! same on every transport, and the plan can predict it to the byte. An all-reduce is a reduce-scatter and an
//! all-gather: of `n` bytes among `P` ranks each sends `2 (P - 1) / P n`.

use std::fmt;
use std::ops::{Range, Sub};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::call::{Call, Operation};

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrafficKind {
    /// Of sums or maxima, which all get.
    AllReduce,
    /// Of shards, which all get.
    AllGather,
    /// Of sums or maxima, of which each gets a shard.
    ReduceScatter,
    /// One rank's data to all.
    Broadcast,
    /// One rank's data to another.
    PointToPoint,
    /// The same, for the edges of an image that is cut.
    Halo,
}

impl TrafficKind {
    /// All of them, in the order in which they are printed.
    pub const ALL: [TrafficKind; 6] = [
        TrafficKind::AllReduce,
        TrafficKind::AllGather,
        TrafficKind::ReduceScatter,
        TrafficKind::Broadcast,
        TrafficKind::PointToPoint,
        TrafficKind::Halo,
    ];

    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            TrafficKind::AllReduce => "all_reduce",
            TrafficKind::AllGather => "all_gather",
            TrafficKind::ReduceScatter => "reduce_scatter",
            TrafficKind::Broadcast => "broadcast",
            TrafficKind::PointToPoint => "point_to_point",
            TrafficKind::Halo => "halo",
        }
    }
}

impl fmt::Display for TrafficKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SentBytes([u64; TrafficKind::ALL.len()]);

impl SentBytes {
    /// Bytes of one kind of message.
    pub fn of(&self, traffic: TrafficKind) -> u64 {
        self.0[traffic as usize]
    }

    /// What that is for each of so many.
    pub fn per(self, count: u64) -> SentBytes {
        SentBytes(self.0.map(|bytes| bytes / count.max(1)))
    }

    /// Bytes of all kinds of messages.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// What was sent since an earlier count.
impl Sub for SentBytes {
    type Output = SentBytes;

    fn sub(self, earlier: SentBytes) -> SentBytes {
        SentBytes(std::array::from_fn(|i| self.0[i] - earlier.0[i]))
    }
}

/// The running count of one rank, shared by all its groups.
#[derive(Debug, Default)]
pub(crate) struct SentCounter([AtomicU64; TrafficKind::ALL.len()]);

impl SentCounter {
    pub(crate) fn add(&self, traffic: TrafficKind, bytes: usize) {
        self.0[traffic as usize].fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn sent(&self) -> SentBytes {
        SentBytes(std::array::from_fn(|i| self.0[i].load(Relaxed)))
    }
}

/// The chunk of a message that a rank reduces: as even as can be, the first ranks one more. It is the rule by
/// which `plan` splits too.
pub fn chunk(elements: usize, size: usize, rank: usize) -> Range<usize> {
    let (each, left) = (elements / size, elements % size);
    let start = rank * each + rank.min(left);
    start..start + each + usize::from(rank < left)
}

/// What a call sends from this rank: `halo` says what messages between two ranks are for.
pub(crate) fn sent_by(call: &Call, rank: usize, size: usize, halo: bool) -> Option<(TrafficKind, usize)> {
    let bytes = call.bytes();
    let others = size - 1;
    match call.operation {
        Operation::Send { .. } if halo => Some((TrafficKind::Halo, bytes)),
        Operation::Send { .. } => Some((TrafficKind::PointToPoint, bytes)),
        Operation::Broadcast { root } if root == rank => Some((TrafficKind::Broadcast, bytes * others)),
        Operation::AllReduce(_) => {
            let local_len = chunk(call.elements, size, rank).len() * call.element?.bytes();
            Some((TrafficKind::AllReduce, bytes - local_len + local_len * others))
        }
        Operation::ReduceScatter(_) => Some((TrafficKind::ReduceScatter, bytes / size * others)),
        Operation::AllGather => Some((TrafficKind::AllGather, bytes / size * others)),
        Operation::Receive { .. } | Operation::Broadcast { .. } | Operation::Barrier | Operation::Split => {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::call::Reduce;
    use crate::data::ElementType;

    fn call(operation: Operation, elements: usize) -> Call {
        Call { operation, element: Some(ElementType::Bf16), elements }
    }

    proptest! {
        /// All ranks together send exactly what the formula says, however uneven the chunks.
        #[test]
        fn an_all_reduce_moves_everything_twice_to_all_but_one(size in 1..9usize, elements in 0..100usize) {
            let call = call(Operation::AllReduce(Reduce::Sum), elements);
            let sent: usize = (0..size).map(|rank| sent_by(&call, rank, size, false).unwrap().1).sum();
            prop_assert_eq!(sent, 2 * (size - 1) * elements * 2);
        }

        #[test]
        fn chunks_cover_the_elements(size in 1..9usize, elements in 0..100usize) {
            let chunks: Vec<_> = (0..size).map(|rank| chunk(elements, size, rank)).collect();
            prop_assert_eq!(chunks.iter().cloned().flatten().collect::<Vec<_>>(), (0..elements).collect::<Vec<_>>());
            let lengths = chunks.iter().map(ExactSizeIterator::len);
            prop_assert!(lengths.clone().max().unwrap() - lengths.min().unwrap() <= 1);
        }
    }

    #[test]
    fn what_each_call_sends() {
        let sent = |operation, rank| sent_by(&call(operation, 12), rank, 4, false);
        assert_eq!(sent(Operation::Send { to: 1, tag: 0 }, 0), Some((TrafficKind::PointToPoint, 24)));
        assert_eq!(sent(Operation::Receive { from: 1, tag: 0 }, 0), None);
        assert_eq!(sent(Operation::Broadcast { root: 2 }, 2), Some((TrafficKind::Broadcast, 72)));
        assert_eq!(sent(Operation::Broadcast { root: 2 }, 1), None);
        assert_eq!(sent(Operation::AllReduce(Reduce::Max), 3), Some((TrafficKind::AllReduce, 36)));
        assert_eq!(sent(Operation::ReduceScatter(Reduce::Sum), 3), Some((TrafficKind::ReduceScatter, 18)));
        assert_eq!(sent(Operation::AllGather, 0), Some((TrafficKind::AllGather, 18)));
        let halo = sent_by(&call(Operation::Send { to: 1, tag: 0 }, 12), 0, 4, true);
        assert_eq!(halo, Some((TrafficKind::Halo, 24)));
    }
}

//! In which order a rank sends to several others and receives from them.
//!
//! Where messages are carried out in the order of calls (NCCL, those to higher ranks apart from those to lower ones) that order must
//! not close a circle. Receives come before sends; on the way up messages are in the order of senders and then of receivers, on the
//! way down in the reverse of both: every rank calls in the order in which all of them can happen.

/// In which order a rank receives from its neighbours, and then sends to them; the first `lower` of them have lower ranks.
pub(crate) fn order_of_calls(
    lower: usize,
    neighbours: usize,
) -> (impl Iterator<Item = usize>, impl Iterator<Item = usize>) {
    ((0..lower).chain((lower..neighbours).rev()), (0..lower).rev().chain(lower..neighbours))
}

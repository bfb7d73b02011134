//! In which order a rank sends to several others and receives from them, and the tags by which it tells their messages apart.
//!
//! Where messages are carried out in the order of calls (NCCL, those to higher ranks apart from those to lower ones) that order must
//! not close a circle. Receives come before sends; on the way up messages are in the order of senders and then of receivers, on the
//! way down in the reverse of both: every rank calls in the order in which all of them can happen.

/// Of halos, which have a group of their own and come in the order in which they were sent.
pub(super) const HALO: u32 = 0;

/// Of what ranks along an axis deal out to each other, likewise.
pub(super) const DEAL: u32 = 1;

/// In which order a rank receives from its neighbours, and then sends to them; the first `lower` of them have lower ranks.
pub(super) fn order_of_calls(
    lower: usize,
    neighbours: usize,
) -> (impl Iterator<Item = usize>, impl Iterator<Item = usize>) {
    ((0..lower).chain((lower..neighbours).rev()), (0..lower).rev().chain(lower..neighbours))
}

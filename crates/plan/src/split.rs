//! How so many things are split over the ranks of a group: the one rule for samples, heads, classes, rows and
//! ZeRO's shards.

use std::ops::Range;

/// What falls to a rank of `n` things in a row: as many as to the others, and one more on the first ranks
/// where they do not come out even.
pub fn split(n: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, left) = (n / ranks, n % ranks);
    let start = rank * each + rank.min(left);
    start..start + each + usize::from(rank < left)
}

/// A rank of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRank {
    /// How many there are.
    pub ranks: usize,
    /// Which of them this one is.
    pub rank: usize,
}

impl GroupRank {
    /// The only one of its group.
    pub const SINGLE: GroupRank = GroupRank { ranks: 1, rank: 0 };

    /// Whether there are no others.
    pub fn is_single(&self) -> bool {
        self.ranks == 1
    }

    /// Its [split] of `n` things.
    pub fn split(&self, n: usize) -> Range<usize> {
        split(n, self.ranks, self.rank)
    }

    /// The most that any rank has of `n` things: what messages that need equal shards are padded to.
    pub fn largest(&self, n: usize) -> usize {
        n.div_ceil(self.ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_follow_each_other_and_differ_by_one_at_most(n in 0usize..2000, ranks in 1usize..20) {
            let shards: Vec<_> = (0..ranks).map(|rank| split(n, ranks, rank)).collect();
            prop_assert_eq!(shards.iter().cloned().flatten().collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
            prop_assert!(shards.is_sorted_by(|a, b| a.len() >= b.len() && a.len() <= b.len() + 1 || a.len() == b.len()));
            let first = GroupRank { ranks, rank: 0 };
            prop_assert_eq!((first.split(n).len(), first.largest(n)), (n.div_ceil(ranks), n.div_ceil(ranks)));
            prop_assert_eq!(split(n, ranks, ranks - 1).len(), n / ranks);
        }
    }
}

//! The order in which samples are met, by random access: nothing is shuffled, stored or replayed.
//!
//! The sample at global position p belongs to epoch p / len, and the samples of an epoch are a permutation of
//! `0..len` that is a pure function of (seed, epoch). A run resumed at p, and any number of ranks that split
//! the positions of a batch, therefore agree without a message.
//!
//! The permutation is a Feistel network on the smallest even number of bits that holds `len`; a value that
//! falls outside is sent through again until it lands inside ("cycle walking", Black and Rogaway 2002). The
//! domain is less than four times `len`, so that takes four passes at most on average.

use espalier_tensor::random;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"order   ");
const ROUNDS: usize = 8;

/// The order of all epochs of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOrder {
    key: u64,
    len: usize,
}

impl SampleOrder {
    /// The order of `len` samples under a run's seed.
    pub fn new(seed: u64, len: usize) -> SampleOrder {
        SampleOrder { key: random::key(seed, PURPOSE), len }
    }

    /// The samples at global positions `position .. position + count`, each as (epoch, index). Panics if
    /// there are no samples.
    pub fn indices(&self, position: u64, count: usize) -> Vec<(u64, usize)> {
        assert!(self.len > 0, "an order needs at least one sample");
        let len = self.len as u64;
        let mut current: Option<(u64, Permutation)> = None;
        let pick = |p: u64| {
            let epoch = p / len;
            let permutation = match current {
                Some((of, permutation)) if of == epoch => permutation,
                _ => current.insert((epoch, Permutation::new(random::key(self.key, epoch), len))).1,
            };
            (epoch, permutation.at(p % len) as usize)
        };
        (position..position + count as u64).map(pick).collect()
    }
}

/// The `i`th of `count` samples out of `all`: the middle of each of `count` equal ranges, in order. Files of a
/// split stand one after another, so the first samples would be those of one or two of them.
pub fn spread(i: usize, count: usize, all: usize) -> usize {
    debug_assert!(i < count && count <= all);
    ((2 * i as u128 + 1) * all as u128 / (2 * count as u128)) as usize
}

/// A permutation of `0..len` by random access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    len: u64,
    half: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation that belongs to this key.
    pub(crate) fn new(key: u64, len: u64) -> Permutation {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let keys = std::array::from_fn(|round| random::key(key, round as u64));
        Permutation { len, half: bits.div_ceil(2).max(1), keys }
    }

    /// The number at index `i`.
    pub(crate) fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.len);
        let mut x = self.once(i);
        while x >= self.len {
            x = self.once(x);
        }
        x
    }

    /// One pass through the network: a bijection of `2 * half` bits.
    fn once(&self, x: u64) -> u64 {
        let low = (1u64 << self.half) - 1;
        let (left, right) = self.keys.iter().fold((x >> self.half, x & low), |(left, right), &key| {
            (right, left ^ (u64::from(random::bits(key, right)) >> (32 - self.half)))
        });
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch_of(seed: u64, len: usize, epoch: u64) -> Vec<usize> {
        let picks = SampleOrder::new(seed, len).indices(epoch * len as u64, len);
        assert!(picks.iter().all(|&(e, _)| e == epoch));
        picks.into_iter().map(|(_, i)| i).collect()
    }

    proptest! {
        /// Every sample is met exactly once an epoch.
        #[test]
        fn an_epoch_is_a_permutation(seed: u64, len in 1usize..3000, epoch in 0u64..1000) {
            let mut seen = epoch_of(seed, len, epoch);
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..len));
        }

        /// Resuming anywhere, or sharing a batch between ranks, meets the same samples.
        #[test]
        fn chunks_do_not_matter(seed: u64, len in 1usize..500, start in 0u64..2000, cuts in prop::collection::vec(0usize..70, 1..9)) {
            let order = SampleOrder::new(seed, len);
            let mut chunks = Vec::new();
            for cut in &cuts {
                chunks.extend(order.indices(start + chunks.len() as u64, *cut));
            }
            prop_assert_eq!(order.indices(start, cuts.iter().sum()), chunks);
        }

        /// Different samples, the largest gap between them one more than the smallest, and no end of the
        /// split left out.
        #[test]
        fn a_part_is_spread_over_the_whole(all in 1usize..5000, count in 1usize..300) {
            let count = count.min(all);
            let picks: Vec<usize> = (0..count).map(|i| spread(i, count, all)).collect();
            let gaps = picks.windows(2).map(|pair| pair[1] - pair[0]);
            prop_assert!(gaps.clone().all(|gap| gap >= 1 && gap.abs_diff(all / count) <= 1));
            prop_assert!(picks[0] <= all / count && all - 1 - picks[count - 1] <= all / count);
            prop_assert!(count < all || picks.into_iter().eq(0..all));
        }

        /// Neither another epoch nor another seed repeats the order.
        #[test]
        fn epochs_and_seeds_differ(seed: u64, len in 20usize..2000, epoch in 0u64..1000) {
            prop_assert_ne!(epoch_of(seed, len, epoch), epoch_of(seed, len, epoch + 1));
            prop_assert_ne!(epoch_of(seed, len, epoch), epoch_of(seed ^ 1, len, epoch));
        }
    }

    /// Over many epochs each sample stands at each position equally often, also where the network has few bits.
    #[test]
    fn positions_are_uniform() {
        for len in [2usize, 3, 7, 10, 16, 17, 50] {
            let epochs = 400 * len as u64;
            let mut seen = vec![0u32; len * len];
            for epoch in 0..epochs {
                for (position, index) in epoch_of(5, len, epoch).into_iter().enumerate() {
                    seen[position * len + index] += 1;
                }
            }
            let chi: f64 = seen.iter().map(|&n| (f64::from(n) - 400.0).powi(2) / 400.0).sum();
            let freedom = ((len - 1) * (len - 1)) as f64;
            assert!(chi < freedom + 6.0 * (2.0 * freedom).sqrt() + 6.0, "{len}: {chi} against {freedom}");
        }
    }

    /// Neighbours in the order are not neighbours in the set.
    #[test]
    fn neighbours_part() {
        let order = epoch_of(1, 100_000, 0);
        let near = order.windows(2).filter(|w| w[0].abs_diff(w[1]) < 100).count();
        assert!((100..300).contains(&near), "{near} of about 200");
    }

    #[test]
    fn huge_sets_are_reached_at_random() {
        let order = SampleOrder::new(3, 1 << 40);
        let picks = order.indices((1 << 40) - 1, 2);
        assert_eq!((picks[0].0, picks[1].0), (0, 1));
        assert!(picks.iter().all(|&(_, i)| i < 1 << 40));
    }
}

//! How ranks share out what need not be on each of them (ZeRO, Rajbhandari et al. 2020): every parameter's vector of kept
//! weights is cut into as many parts as there are ranks, so that one large embedding does not sit on one of them.
//!
//! Parts are equal, as messages need them, but for the last ones, which may be shorter or empty.

use std::ops::Range;

/// Gradients of at least so many bytes are summed over ranks one by one, smaller ones packed into messages of at most so
/// many: enough to make the cost of starting a message small beside the cost of its bytes.
pub const BUCKET: u64 = 1 << 20;

/// A rank's place among those that share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// How many there are.
    pub ranks: usize,
    /// Which of them this one is.
    pub rank: usize,
}

impl Cut {
    /// Nothing is shared.
    pub const ALONE: Cut = Cut { ranks: 1, rank: 0 };

    /// Whether nothing is shared.
    pub fn is_alone(&self) -> bool {
        self.ranks == 1
    }

    /// Elements of a part of a vector; the first rank has them all.
    pub fn part(&self, elements: usize) -> usize {
        elements.div_ceil(self.ranks)
    }

    /// The part of a rank.
    pub fn of(&self, rank: usize, elements: usize) -> Range<usize> {
        let part = self.part(elements);
        (rank * part).min(elements)..((rank + 1) * part).min(elements)
    }

    /// The part of this rank.
    pub fn own(&self, elements: usize) -> Range<usize> {
        self.of(self.rank, elements)
    }
}

/// Which parameters travel together, given the bytes of each, in their order: large ones alone, small ones packed.
pub fn packets(bytes: &[u64]) -> Vec<Vec<usize>> {
    packets_of(bytes, BUCKET)
}

/// The same for packets of at most so many bytes.
pub(crate) fn packets_of(bytes: &[u64], most: u64) -> Vec<Vec<usize>> {
    let (mut packets, mut open, mut waiting) = (Vec::new(), Vec::new(), 0);
    for (i, &bytes) in bytes.iter().enumerate() {
        if bytes >= most {
            packets.push(vec![i]);
            continue;
        }
        if waiting + bytes > most {
            packets.push(std::mem::take(&mut open));
            waiting = 0;
        }
        open.push(i);
        waiting += bytes;
    }
    if !open.is_empty() {
        packets.push(open);
    }
    packets
}

/// Bytes of messages at their peak when parameters of so many elements, of so many bytes each, are shared: gradients
/// are all on their way at once, new weights in two packets.
pub(crate) fn message_bytes(elements: &[u64], size: u64, ranks: u64) -> u64 {
    // Padded, and a part of it.
    let padded = |n: u64| n.div_ceil(ranks).saturating_mul(ranks).saturating_add(n.div_ceil(ranks));
    // A gradient that is large and need not be padded is sent as it is.
    let as_it_is = |n: u64| n.saturating_mul(size) >= BUCKET && n.is_multiple_of(ranks);
    let gradients = sum(elements.iter().map(|&n| if as_it_is(n) { n / ranks } else { padded(n) }));
    let bytes: Vec<u64> = elements.iter().map(|n| n.saturating_mul(size)).collect();
    let packet = |packet: &Vec<usize>| sum(packet.iter().map(|&i| padded(elements[i])));
    let packets: Vec<u64> = packets(&bytes).iter().map(packet).collect();
    let pair = |i: usize| packets[i].saturating_add(packets.get(i + 1).copied().unwrap_or(0));
    let weights = (0..packets.len()).map(pair).max().unwrap_or(0);
    gradients.max(weights).saturating_mul(size)
}

/// A sum that stops at the largest number: nothing of that size fits anyway.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// Bytes of the largest message when parameters of so many elements are averaged with their state: of `each` bytes of
/// weight and state those that are exact, as f32.
pub(crate) fn average_bytes(elements: &[u64], each: u64) -> u64 {
    // A weight in bf16 follows its master.
    let vectors = each / 4;
    let bytes: Vec<u64> =
        elements.iter().flat_map(|n| (0..vectors).map(move |_| n.saturating_mul(4))).collect();
    packets(&bytes).iter().map(|packet| sum(packet.iter().map(|&i| bytes[i]))).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_follow_each_other_and_the_first_is_the_longest(elements in 0usize..2000, ranks in 1usize..20) {
            let cut = Cut { ranks, rank: 0 };
            let parts: Vec<_> = (0..ranks).map(|rank| cut.of(rank, elements)).collect();
            prop_assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..elements).collect::<Vec<_>>());
            prop_assert_eq!(parts.iter().map(ExactSizeIterator::len).max(), Some(cut.part(elements)));
            prop_assert_eq!(parts[0].len(), cut.part(elements));
        }

        #[test]
        fn every_parameter_travels_once_in_a_packet_that_is_not_too_large(bytes in prop::collection::vec(0u64..2 * BUCKET, 0..40)) {
            let packets = packets(&bytes);
            let mut all: Vec<usize> = packets.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..bytes.len()).collect::<Vec<_>>());
            for packet in packets {
                let sum: u64 = packet.iter().map(|&i| bytes[i]).sum();
                prop_assert!(packet.len() == 1 || sum <= BUCKET);
            }
        }
    }
}

//! Which elements of a tensor are here: some ranges of each dimension, and all elements whose positions lie in
//! them; of these perhaps the kept ones alone; of those perhaps a flat range.
//!
//! ```text
//! the full tensor      0 1 2 3 | 4 5 6 7      two rows of four
//! its second half      2 3 6 7                a shard: columns 2 and 3
//! the kept ones of it  3 6                    where the mask keeps 0 3 4 6, and the kept vector of the full tensor is 0 3 4 6
//! ```
//!
//! A linear layer split by its outputs has a range of one dimension; the queries, keys and values of some
//! heads, side by side in one weight, are three. Ranges ascend, so the elements of a shard are in the order
//! in which the full tensor has them: what is earlier in a shard is earlier in the full tensor, and the kept
//! weights of a shard are a subsequence of those of the full tensor. So any shard is put together from any
//! others, run by run.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Which elements of a tensor a rank holds, or a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// The shape of the full tensor.
    full: Vec<usize>,
    /// Of each dimension the ranges that are here: ascending, apart, none empty unless the shard is.
    ranges: Vec<Vec<Range<usize>>>,
    values: ShardValues,
    /// Where what is here begins among these values, if ranks with the same ranges split them (ZeRO): then no
    /// other rank has this shard.
    start: Option<usize>,
}

/// What there is for the elements of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardValues {
    /// A number for each.
    Dense,
    /// A number for each that the mask of this name keeps.
    KeptBy(String),
    /// So many bits for each, from the lowest bit of a word of 32 to its highest, and on in the next.
    Packed(usize),
}

/// Elements that follow each other in the shard and in the full tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementRun {
    /// The position of the first in the shard, flattened.
    pub at: usize,
    /// Its position in the full tensor, flattened.
    pub in_full: usize,
    /// How many they are.
    pub length: usize,
}

impl Shard {
    /// All of a tensor.
    pub fn full(shape: &[usize]) -> Shard {
        let everything = |&size: &usize| std::iter::once(0..size).collect();
        Shard {
            full: shape.to_vec(),
            ranges: shape.iter().map(everything).collect(),
            values: ShardValues::Dense,
            start: None,
        }
    }

    /// Of its elements those that the mask of a name keeps.
    pub fn kept_by(self, mask: &str) -> Shard {
        Shard { values: ShardValues::KeptBy(mask.to_owned()), ..self }
    }

    /// So many bits for each of its elements, packed into words.
    pub fn packed(self, bits: usize) -> Shard {
        Shard { values: ShardValues::Packed(bits), ..self }
    }

    /// Some of its values, from one on, that no other rank has.
    pub fn starting_at(self, start: usize) -> Shard {
        Shard { start: Some(start), ..self }
    }

    /// The same with some ranges of one dimension; neighbours are joined.
    pub fn narrow(mut self, dim: usize, ranges: &[Range<usize>]) -> Shard {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            assert!(range.end <= self.full[dim], "{range:?} of a dimension of {}", self.full[dim]);
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                last => {
                    assert!(last.is_none_or(|last| last.end < range.start), "ranges ascend");
                    joined.push(range.clone());
                }
            }
        }
        self.ranges[dim] = joined;
        self
    }

    /// The same ranges of a tensor that is longer in one dimension.
    pub fn of_longer(mut self, dim: usize, size: usize) -> Shard {
        assert!(size >= self.full[dim], "{size} is less than {}", self.full[dim]);
        self.full[dim] = size;
        self
    }

    /// The same elements of the tensor with its dimensions in another order; what there is for each is not said.
    pub fn permuted<const N: usize>(&self, dims: [usize; N]) -> Shard {
        assert_eq!(N, self.full.len(), "an order of all dimensions");
        let (full, ranges) = dims.iter().map(|&dim| (self.full[dim], self.ranges[dim].clone())).unzip();
        Shard { full, ranges, values: ShardValues::Dense, start: None }
    }

    /// The shape of the full tensor.
    pub fn full_shape(&self) -> &[usize] {
        &self.full
    }

    /// Which of a dimension are here.
    pub fn ranges(&self, dim: usize) -> &[Range<usize>] {
        &self.ranges[dim]
    }

    /// What there is for each element.
    pub fn values(&self) -> &ShardValues {
        &self.values
    }

    /// Where what is here begins among the shard's values, where ranks split them.
    pub fn start(&self) -> Option<usize> {
        self.start
    }

    /// The elements that it is about, whatever there is for each and whoever else has some: what ranks with
    /// the same weights share.
    pub fn elements(&self) -> Shard {
        Shard { values: ShardValues::Dense, start: None, ..self.clone() }
    }

    /// Whether its ranges are all of the tensor.
    pub fn is_full(&self) -> bool {
        self.len() == self.full.iter().product::<usize>()
    }

    /// The shape of its ranges.
    pub fn shape(&self) -> Vec<usize> {
        self.ranges.iter().map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum()).collect()
    }

    /// Elements in its ranges.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements, in order, as runs that are as long as they can be.
    pub fn runs(&self) -> ElementRuns<'_> {
        // Behind the last dimension that is cut, what is contiguous in the shard is contiguous in the full tensor.
        let cut = self.ranges.iter().zip(&self.full).rposition(|(held, of)| held[..] != [0..*of]);
        let outer = cut.map_or(0, |dim| dim);
        let inner = self.full.iter().skip(outer + 1).product();
        let empty = self.is_empty();
        ElementRuns { shard: self, outer, inner, next: vec![(0, 0); outer], range: 0, at: 0, done: empty }
    }

    /// Where an element of the shard is in the full tensor.
    pub fn in_full(&self, at: usize) -> usize {
        let (mut rest, mut index, mut stride) = (at, 0, 1);
        for (ranges, of) in self.ranges.iter().zip(&self.full).rev() {
            let extent: usize = ranges.iter().map(ExactSizeIterator::len).sum();
            index += stride * nth(ranges, rest % extent);
            rest /= extent;
            stride *= of;
        }
        index
    }

    /// The elements that two shards of one tensor have in common.
    pub fn intersect(&self, other: &Shard) -> Shard {
        debug_assert_eq!(self.full, other.full);
        let both = |(a, b): (&Vec<Range<usize>>, &Vec<Range<usize>>)| {
            let pairs = a.iter().flat_map(|a| b.iter().map(move |b| a.start.max(b.start)..a.end.min(b.end)));
            pairs.filter(|range| !range.is_empty()).collect()
        };
        Shard { ranges: self.ranges.iter().zip(&other.ranges).map(both).collect(), ..self.elements() }
    }
}

/// The n-th of the numbers in some ranges.
fn nth(ranges: &[Range<usize>], mut n: usize) -> usize {
    for range in ranges {
        if n < range.len() {
            return range.start + n;
        }
        n -= range.len();
    }
    panic!("a place outside of the shard")
}

/// The runs of a shard.
#[derive(Debug)]
pub struct ElementRuns<'a> {
    shard: &'a Shard,
    /// The last dimension that is cut: a range of it, and all behind it, is a run.
    outer: usize,
    /// Elements behind that dimension.
    inner: usize,
    /// In each dimension before it: the range, and the index in it.
    next: Vec<(usize, usize)>,
    /// The range of the cut dimension that is next.
    range: usize,
    at: usize,
    done: bool,
}

impl Iterator for ElementRuns<'_> {
    type Item = ElementRun;

    fn next(&mut self) -> Option<ElementRun> {
        let Shard { full, ranges, .. } = self.shard;
        if self.done {
            return None;
        }
        if full.is_empty() {
            self.done = true;
            return Some(ElementRun { at: 0, in_full: 0, length: 1 });
        }
        let row = self
            .next
            .iter()
            .enumerate()
            .fold(0, |row, (dim, &(range, index))| row * full[dim] + ranges[dim][range].start + index);
        let range = &ranges[self.outer][self.range];
        let run = ElementRun {
            at: self.at,
            in_full: (row * full[self.outer] + range.start) * self.inner,
            length: range.len() * self.inner,
        };
        self.at += run.length;
        self.range += 1;
        if self.range == ranges[self.outer].len() {
            self.range = 0;
            self.done = !self.step();
        }
        Some(run)
    }
}

impl ElementRuns<'_> {
    /// The next index of the dimensions before the split one, or none.
    fn step(&mut self) -> bool {
        for dim in (0..self.outer).rev() {
            let (range, index) = &mut self.next[dim];
            *index += 1;
            if *index == self.shard.ranges[dim][*range].len() {
                (*range, *index) = (*range + 1, 0);
            }
            if *range < self.shard.ranges[dim].len() {
                return true;
            }
            *range = 0;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The elements of a shard, one by one from its definition.
    fn by_hand(shard: &Shard) -> Vec<usize> {
        let mut indices = vec![0];
        for (ranges, of) in shard.ranges.iter().zip(&shard.full) {
            let held = || ranges.iter().cloned().flatten();
            indices = indices.iter().flat_map(|index| held().map(move |i| index * of + i)).collect();
        }
        indices
    }

    /// Some ranges of a dimension, from bits that say which of its indices are local.
    fn ranges_of(bits: &[bool]) -> Vec<Range<usize>> {
        (0..bits.len()).filter(|i| bits[*i]).map(|i| i..i + 1).collect()
    }

    prop_compose! {
        fn shards()(dims in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..6), 0..4)) -> Shard {
            let shape: Vec<usize> = dims.iter().map(Vec::len).collect();
            let full = Shard::full(&shape);
            dims.iter().enumerate().fold(full, |shard, (dim, bits)| shard.narrow(dim, &ranges_of(bits)))
        }
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_in_order(shard in shards()) {
            let (mut indices, mut at) = (Vec::new(), 0);
            for run in shard.runs() {
                prop_assert_eq!(run.at, at);
                at += run.length;
                indices.extend(run.in_full..run.in_full + run.length);
            }
            prop_assert_eq!(&indices, &by_hand(&shard));
            prop_assert_eq!(indices.len(), shard.len());
            prop_assert!(indices.is_sorted());
            for (at, index) in indices.iter().enumerate() {
                prop_assert_eq!(shard.in_full(at), *index);
            }
        }

        #[test]
        fn what_two_shards_have_in_common(shard in shards(), bits in prop::collection::vec(any::<bool>(), 6)) {
            prop_assume!(!shard.full.is_empty());
            let other = Shard::full(&shard.full).narrow(0, &ranges_of(&bits[..shard.full[0]]));
            let (a, b) = (by_hand(&shard), by_hand(&other));
            let common: Vec<usize> = a.into_iter().filter(|index| b.contains(index)).collect();
            prop_assert_eq!(by_hand(&shard.intersect(&other)), common);
        }
    }

    #[test]
    fn a_full_tensor_is_one_run() {
        let full = Shard::full(&[3, 4, 5]);
        assert!(full.is_full());
        assert_eq!(full.runs().collect::<Vec<_>>(), [ElementRun { at: 0, in_full: 0, length: 60 }]);
        let rows = Shard::full(&[3, 4]).narrow(0, &[1..3]);
        assert_eq!(rows.runs().collect::<Vec<_>>(), [ElementRun { at: 0, in_full: 4, length: 8 }]);
        let heads = Shard::full(&[2, 12]).narrow(1, &[0..2, 4..6, 8..10]);
        assert_eq!((heads.shape(), heads.runs().count()), (vec![2, 6], 6));
    }
}

//! What a rank holds of a tensor: some ranges of each dimension, and all elements whose places lie in them.
//!
//! A linear layer cut by its outputs has a range of one dimension; the queries, keys and values of some heads, side by side in one
//! weight, are three. Ranges ascend, so the elements of a piece are in the order in which the whole has them: what is earlier in
//! a piece is earlier in the whole, and the kept weights of a piece are a subsequence of those of the whole.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// The shape of the whole.
    of: Vec<usize>,
    /// Of each dimension the ranges that are held: ascending, apart, none empty unless the piece is.
    ranges: Vec<Vec<Range<usize>>>,
}

/// Elements that follow each other in the piece and in the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The place of the first in the piece, flattened.
    pub at: usize,
    /// Its place in the whole, flattened.
    pub in_whole: usize,
    /// How many they are.
    pub length: usize,
}

impl Piece {
    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Piece {
        let everything = |&extent: &usize| std::iter::once(0..extent).collect();
        Piece { of: shape.to_vec(), ranges: shape.iter().map(everything).collect() }
    }

    /// The same with some ranges of one dimension; neighbours are joined.
    pub fn cut(mut self, dim: usize, ranges: &[Range<usize>]) -> Piece {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            assert!(range.end <= self.of[dim], "{range:?} of a dimension of {}", self.of[dim]);
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
    pub fn of_longer(mut self, dim: usize, extent: usize) -> Piece {
        assert!(extent >= self.of[dim], "{extent} is less than {}", self.of[dim]);
        self.of[dim] = extent;
        self
    }

    /// The shape of the whole.
    pub fn of(&self) -> &[usize] {
        &self.of
    }

    /// What is held of a dimension.
    pub fn ranges(&self, dim: usize) -> &[Range<usize>] {
        &self.ranges[dim]
    }

    /// Whether it is all of the tensor.
    pub fn is_whole(&self) -> bool {
        self.len() == self.of.iter().product::<usize>()
    }

    /// The shape of the piece.
    pub fn shape(&self) -> Vec<usize> {
        self.ranges.iter().map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum()).collect()
    }

    /// Elements of the piece.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements, in order, as runs that are as long as they can be.
    pub fn runs(&self) -> Runs<'_> {
        // Behind the last dimension that is cut, what is contiguous in the piece is contiguous in the whole.
        let cut = self.ranges.iter().zip(&self.of).rposition(|(held, of)| held[..] != [0..*of]);
        let outer = cut.map_or(0, |dim| dim);
        let inner = self.of.iter().skip(outer + 1).product();
        let empty = self.is_empty();
        Runs { piece: self, outer, inner, next: vec![(0, 0); outer], range: 0, at: 0, done: empty }
    }

    /// Where an element of the piece is in the whole.
    pub fn in_whole(&self, at: usize) -> usize {
        let (mut rest, mut place, mut stride) = (at, 0, 1);
        for (ranges, of) in self.ranges.iter().zip(&self.of).rev() {
            let extent: usize = ranges.iter().map(ExactSizeIterator::len).sum();
            place += stride * nth(ranges, rest % extent);
            rest /= extent;
            stride *= of;
        }
        place
    }

    /// The elements that two pieces of one tensor have in common.
    pub fn intersect(&self, other: &Piece) -> Piece {
        debug_assert_eq!(self.of, other.of);
        let both = |(a, b): (&Vec<Range<usize>>, &Vec<Range<usize>>)| {
            let pairs = a.iter().flat_map(|a| b.iter().map(move |b| a.start.max(b.start)..a.end.min(b.end)));
            pairs.filter(|range| !range.is_empty()).collect()
        };
        Piece { of: self.of.clone(), ranges: self.ranges.iter().zip(&other.ranges).map(both).collect() }
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
    panic!("a place outside of the piece")
}

/// The runs of a piece.
#[derive(Debug)]
pub struct Runs<'a> {
    piece: &'a Piece,
    /// The last dimension that is cut: a range of it, and all behind it, is a run.
    outer: usize,
    /// Elements behind that dimension.
    inner: usize,
    /// In each dimension before it: the range, and the place in it.
    next: Vec<(usize, usize)>,
    /// The range of the cut dimension that is next.
    range: usize,
    at: usize,
    done: bool,
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let Piece { of, ranges } = self.piece;
        if self.done {
            return None;
        }
        if of.is_empty() {
            self.done = true;
            return Some(Run { at: 0, in_whole: 0, length: 1 });
        }
        let row = self
            .next
            .iter()
            .enumerate()
            .fold(0, |row, (dim, &(range, place))| row * of[dim] + ranges[dim][range].start + place);
        let range = &ranges[self.outer][self.range];
        let run = Run {
            at: self.at,
            in_whole: (row * of[self.outer] + range.start) * self.inner,
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

impl Runs<'_> {
    /// The next place of the dimensions before the cut one, or none.
    fn step(&mut self) -> bool {
        for dim in (0..self.outer).rev() {
            let (range, place) = &mut self.next[dim];
            *place += 1;
            if *place == self.piece.ranges[dim][*range].len() {
                (*range, *place) = (*range + 1, 0);
            }
            if *range < self.piece.ranges[dim].len() {
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

    /// The elements of a piece, one by one from its definition.
    fn by_hand(piece: &Piece) -> Vec<usize> {
        let mut places = vec![0];
        for (ranges, of) in piece.ranges.iter().zip(&piece.of) {
            let held = || ranges.iter().cloned().flatten();
            places = places.iter().flat_map(|place| held().map(move |i| place * of + i)).collect();
        }
        places
    }

    /// Some ranges of a dimension, from bits that say which of its places are held.
    fn ranges_of(bits: &[bool]) -> Vec<Range<usize>> {
        (0..bits.len()).filter(|i| bits[*i]).map(|i| i..i + 1).collect()
    }

    prop_compose! {
        fn pieces()(dims in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..6), 0..4)) -> Piece {
            let shape: Vec<usize> = dims.iter().map(Vec::len).collect();
            let whole = Piece::whole(&shape);
            dims.iter().enumerate().fold(whole, |piece, (dim, bits)| piece.cut(dim, &ranges_of(bits)))
        }
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_in_order(piece in pieces()) {
            let (mut places, mut at) = (Vec::new(), 0);
            for run in piece.runs() {
                prop_assert_eq!(run.at, at);
                at += run.length;
                places.extend(run.in_whole..run.in_whole + run.length);
            }
            prop_assert_eq!(&places, &by_hand(&piece));
            prop_assert_eq!(places.len(), piece.len());
            prop_assert!(places.is_sorted());
            for (at, place) in places.iter().enumerate() {
                prop_assert_eq!(piece.in_whole(at), *place);
            }
        }

        #[test]
        fn what_two_pieces_have_in_common(piece in pieces(), bits in prop::collection::vec(any::<bool>(), 6)) {
            prop_assume!(!piece.of.is_empty());
            let other = Piece::whole(&piece.of).cut(0, &ranges_of(&bits[..piece.of[0]]));
            let (a, b) = (by_hand(&piece), by_hand(&other));
            let common: Vec<usize> = a.into_iter().filter(|place| b.contains(place)).collect();
            prop_assert_eq!(by_hand(&piece.intersect(&other)), common);
        }
    }

    #[test]
    fn a_whole_tensor_is_one_run() {
        let whole = Piece::whole(&[3, 4, 5]);
        assert!(whole.is_whole());
        assert_eq!(whole.runs().collect::<Vec<_>>(), [Run { at: 0, in_whole: 0, length: 60 }]);
        let rows = Piece::whole(&[3, 4]).cut(0, &[1..3]);
        assert_eq!(rows.runs().collect::<Vec<_>>(), [Run { at: 0, in_whole: 4, length: 8 }]);
        let heads = Piece::whole(&[2, 12]).cut(1, &[0..2, 4..6, 8..10]);
        assert_eq!((heads.shape(), heads.runs().count()), (vec![2, 6], 6));
    }
}

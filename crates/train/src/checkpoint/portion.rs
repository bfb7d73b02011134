//! What a file has of a tensor, or a rank wants of one: a piece of it; of that perhaps the kept weights alone; of these perhaps a range.
//!
//! ```text
//! the whole            0 1 2 3 | 4 5 6 7      two rows of four
//! its second half      2 3 6 7                a piece: columns 2 and 3
//! the kept ones of it  3 6                    where the mask keeps 0 3 4 6, and the kept vector of the whole is 0 3 4 6
//! ```
//!
//! Whatever a portion is, it is in the order of the whole: a list of runs, each of elements that follow each other in the
//! portion and in the whole. Of kept weights the whole is their vector, and the mask says at which place of it a run begins.
//! So any portion is put together from any others, run by run.

use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;

use espalier_plan::layout::{Piece, Run};
use serde::{Deserialize, Serialize};

/// Under this key a file's own description says which of its tensors are portions of others.
pub(super) const PIECES: &str = "pieces";

/// What a file says of its portions, by name.
pub(super) type Descriptions = BTreeMap<String, Description>;

/// A part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// The part of the whole tensor that it is of.
    pub(super) piece: Piece,
    pub(super) form: Form,
    /// Where what is here begins among them, if ranks with the same piece share it out: then no other rank has this portion.
    pub(super) start: Option<usize>,
}

/// What there is for the elements of a piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Form {
    /// A number for each.
    Numbers,
    /// A number for each that the mask of this name keeps.
    KeptBy(String),
    /// So many bits for each, from the lowest bit of a word of 32 to its highest, and on in the next.
    Packed(usize),
}

impl Portion {
    /// The numbers of a piece.
    pub fn of(piece: Piece) -> Portion {
        Portion { piece, form: Form::Numbers, start: None }
    }

    /// Those of a piece that the mask of a name keeps.
    pub fn kept(piece: Piece, mask: &str) -> Portion {
        Portion { form: Form::KeptBy(mask.to_owned()), ..Portion::of(piece) }
    }

    /// So many bits for each element of a piece, packed into words.
    pub fn packed(piece: Piece, bits: usize) -> Portion {
        Portion { form: Form::Packed(bits), ..Portion::of(piece) }
    }

    /// Some of it, from one on, that no other rank has.
    pub fn from(self, start: usize) -> Portion {
        Portion { start: Some(start), ..self }
    }

    /// Its elements as runs, given how many it has; of kept weights as runs of the whole's vector of them.
    pub(super) fn runs(&self, length: usize, kept: Option<&Kept>) -> Box<dyn Iterator<Item = Run> + '_> {
        let start = self.start.unwrap_or(0);
        let within = move |run: Run| {
            let (first, end) = (run.at.max(start), (run.at + run.length).min(start + length));
            let in_whole = run.in_whole + first.saturating_sub(run.at);
            (first < end).then(|| Run { at: first - start, in_whole, length: end - first })
        };
        let runs: Box<dyn Iterator<Item = Run>> = match kept {
            None => Box::new(self.piece.runs()),
            Some(kept) => Box::new(kept.runs(self.piece.runs()).collect::<Vec<_>>().into_iter()),
        };
        Box::new(runs.filter_map(within))
    }
}

/// A portion as a file describes it. Ranges of whole tensors have a start and a shape alone, as they had before there were
/// pieces.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<usize>,
    /// The shape of the whole tensor.
    shape: Vec<usize>,
    /// The ranges that are held of each dimension that is cut, `[first, end]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    held: BTreeMap<usize, Vec<[usize; 2]>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bits: Option<usize>,
}

impl Description {
    pub(super) fn of(portion: &Portion) -> Description {
        let Portion { piece, form, start } = portion;
        let ranges = |dim| piece.ranges(dim).iter().map(|range: &Range<usize>| [range.start, range.end]);
        let is_cut = |dim: &usize| piece.ranges(*dim) != [0..piece.of()[*dim]];
        Description {
            start: *start,
            shape: piece.of().to_vec(),
            held: (0..piece.of().len()).filter(is_cut).map(|dim| (dim, ranges(dim).collect())).collect(),
            kept_by: match form {
                Form::KeptBy(mask) => Some(mask.clone()),
                _ => None,
            },
            bits: match form {
                Form::Packed(bits) => Some(*bits),
                _ => None,
            },
        }
    }

    /// What it describes, or why it cannot be: a file may say anything.
    pub(super) fn portion(self) -> Result<Portion, String> {
        let elements = self.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
        // Bits of all of them must be countable too.
        if elements.is_none_or(|elements| elements > usize::MAX / 64) {
            return Err(format!("it is a piece of {:?}", self.shape));
        }
        let mut piece = Piece::whole(&self.shape);
        for (dim, ranges) in self.held {
            let extent = self.shape.get(dim).copied();
            let ends = ranges.iter().flatten();
            let ascend = ranges.iter().all(|[first, end]| first < end) && ends.clone().is_sorted();
            if extent.is_none() || !ascend || ends.last().copied() > extent {
                return Err(format!("it holds {ranges:?} of dimension {dim} of {:?}", self.shape));
            }
            piece = piece.cut(dim, &ranges.iter().map(|[first, end]| *first..*end).collect::<Vec<_>>());
        }
        let form = match (self.kept_by, self.bits) {
            (None, None) => Form::Numbers,
            (Some(mask), None) => Form::KeptBy(mask),
            (None, Some(bits)) if (1..=32).contains(&bits) => Form::Packed(bits),
            (mask, bits) => return Err(format!("it is kept by {mask:?} and has {bits:?} bits an element")),
        };
        Ok(Portion { piece, form, start: self.start })
    }
}

/// A mask of a whole tensor on the host, and how many weights it keeps before each of its words.
#[derive(Debug)]
pub(super) struct Kept {
    words: Vec<u32>,
    before: Vec<usize>,
}

impl Kept {
    pub(super) fn new(words: Vec<u32>) -> Kept {
        let counts = words.iter().scan(0, |sum, word| {
            *sum += word.count_ones() as usize;
            Some(*sum)
        });
        Kept { before: iter::once(0).chain(counts).collect(), words }
    }

    /// A bit for each weight.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Weights kept.
    pub(super) fn count(&self) -> usize {
        self.before[self.words.len()]
    }

    /// Weights kept before a place.
    fn rank(&self, place: usize) -> usize {
        let below = |word: &u32| (word & !(u32::MAX << (place % 32))).count_ones() as usize;
        self.before[place / 32] + self.words.get(place / 32).map_or(0, below)
    }

    /// Weights kept of a piece.
    pub(super) fn count_in(&self, piece: &Piece) -> usize {
        piece.runs().map(|run| self.rank(run.in_whole + run.length) - self.rank(run.in_whole)).sum()
    }

    /// The runs of the kept weights, given those of all.
    fn runs(&self, runs: impl Iterator<Item = Run>) -> impl Iterator<Item = Run> {
        runs.scan(0, |at, run| {
            let (first, end) = (self.rank(run.in_whole), self.rank(run.in_whole + run.length));
            let kept = Run { at: *at, in_whole: first, length: end - first };
            *at += kept.length;
            Some(kept)
        })
        .filter(|run| run.length > 0)
    }
}

/// Elements that two portions have in common, and that follow each other in both.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Common {
    /// The place of the first in the one,
    pub(super) from: usize,
    /// and in the other.
    pub(super) to: usize,
    pub(super) length: usize,
}

/// What two portions of one tensor have in common, as few runs as there can be.
pub(super) fn common(from: impl Iterator<Item = Run>, to: impl Iterator<Item = Run>) -> Vec<Common> {
    let (mut from, mut to) = (from.peekable(), to.peekable());
    let mut found: Vec<Common> = Vec::new();
    while let (Some(a), Some(b)) = (from.peek(), to.peek()) {
        let (a_end, b_end) = (a.in_whole + a.length, b.in_whole + b.length);
        let (first, end) = (a.in_whole.max(b.in_whole), a_end.min(b_end));
        if first < end {
            let (from, to) = (a.at + first - a.in_whole, b.at + first - b.in_whole);
            match found.last_mut() {
                Some(last) if (last.from + last.length, last.to + last.length) == (from, to) => {
                    last.length += end - first;
                }
                _ => found.push(Common { from, to, length: end - first }),
            }
        }
        if a_end <= b_end {
            from.next();
        } else {
            to.next();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The picture at the top of this file.
    #[test]
    fn the_kept_weights_of_a_column_are_runs_of_the_kept_vector() {
        let half = Piece::whole(&[2, 4]).cut(1, &[2..4]);
        let kept = Kept::new(vec![0b0101_1001]);
        assert_eq!((kept.count(), kept.count_in(&half)), (4, 2));
        let portion = Portion::kept(half.clone(), "w");
        let runs: Vec<Run> = portion.runs(2, Some(&kept)).collect();
        assert_eq!(runs, [Run { at: 0, in_whole: 1, length: 1 }, Run { at: 1, in_whole: 3, length: 1 }]);
        let second: Vec<Run> = portion.from(1).runs(1, Some(&kept)).collect();
        assert_eq!(second, [Run { at: 0, in_whole: 3, length: 1 }]);
        let rows = Portion::of(Piece::whole(&[2, 4]).cut(0, &[1..2]));
        let shared = common(Portion::of(half).runs(4, None), rows.runs(4, None));
        assert_eq!(shared, [Common { from: 2, to: 2, length: 2 }]);
    }

    #[test]
    fn a_range_of_a_whole_tensor_is_described_as_it_always_was() {
        let text = |portion: &Portion| serde_json::to_string(&Description::of(portion)).unwrap();
        let range = Portion::of(Piece::whole(&[10, 3])).from(4);
        assert_eq!(text(&range), r#"{"start":4,"shape":[10,3]}"#);
        let heads = Piece::whole(&[2, 12]).cut(1, &[0..2, 4..6, 8..10]);
        let portion = Portion::kept(heads.clone(), "w").from(3);
        assert_eq!(
            text(&portion),
            r#"{"start":3,"shape":[2,12],"held":{"1":[[0,2],[4,6],[8,10]]},"kept_by":"w"}"#
        );
        for portion in [range, portion, Portion::packed(heads, 1)] {
            let read: Description = serde_json::from_str(&text(&portion)).unwrap();
            assert_eq!(read.portion().unwrap(), portion);
        }
    }

    #[test]
    fn a_description_that_makes_no_sense_is_refused() {
        for text in [
            r#"{"shape":[4],"held":{"1":[[0,2]]}}"#,
            r#"{"shape":[4],"held":{"1":[]}}"#,
            r#"{"shape":[4],"held":{"0":[[0,5]]}}"#,
            r#"{"shape":[4],"held":{"0":[[2,4],[0,1]]}}"#,
            r#"{"shape":[4],"held":{"0":[[2,2]]}}"#,
            r#"{"shape":[4],"kept_by":"w","bits":1}"#,
            r#"{"shape":[4],"bits":0}"#,
            r#"{"shape":[4294967296,4294967296,4294967296]}"#,
        ] {
            let description: Description = serde_json::from_str(text).unwrap();
            assert!(description.portion().is_err(), "{text}");
        }
    }
}

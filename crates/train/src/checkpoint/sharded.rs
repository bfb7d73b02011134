//! Shards of tensors in a checkpoint's files: how a file describes one, and what two shards of one tensor
//! have in common.
//!
//! A shard is a list of runs, each of elements that follow each other in the shard and in the full tensor. Of
//! kept weights the full tensor is their vector, and the mask says at which position of it a run begins.

use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;

use espalier_plan::shard::{ElementRun, Shard, ShardValues};
use serde::{Deserialize, Serialize};

/// Under this key a file's own description says which of its tensors are shards of others.
pub(super) const SHARDS_KEY: &str = "pieces";

/// What a file says of its shards, by name.
pub(super) type ShardDescriptions = BTreeMap<String, ShardDescription>;

/// The elements of a shard as runs, given how many it has; of kept weights as runs of the full tensor's
/// vector of them.
pub(super) fn runs<'a>(
    shard: &'a Shard,
    length: usize,
    kept: Option<&MaskIndex>,
) -> Box<dyn Iterator<Item = ElementRun> + 'a> {
    let start = shard.start().unwrap_or(0);
    let within = move |run: ElementRun| {
        let (first, end) = (run.at.max(start), (run.at + run.length).min(start + length));
        let in_full = run.in_full + first.saturating_sub(run.at);
        (first < end).then(|| ElementRun { at: first - start, in_full, length: end - first })
    };
    let runs: Box<dyn Iterator<Item = ElementRun>> = match kept {
        None => Box::new(shard.runs()),
        Some(kept) => Box::new(kept.runs(shard.runs()).collect::<Vec<_>>().into_iter()),
    };
    Box::new(runs.filter_map(within))
}

/// A shard as a file describes it. Ranges of full tensors have a start and a shape alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardDescription {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<usize>,
    /// The shape of the full tensor.
    shape: Vec<usize>,
    /// The ranges that are held of each dimension that is split, `[first, end]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    held: BTreeMap<usize, Vec<[usize; 2]>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bits: Option<usize>,
}

impl ShardDescription {
    pub(super) fn of(shard: &Shard) -> ShardDescription {
        let ranges = |dim| shard.ranges(dim).iter().map(|range: &Range<usize>| [range.start, range.end]);
        let full = shard.full_shape();
        let is_split = |dim: &usize| shard.ranges(*dim) != [0..full[*dim]];
        ShardDescription {
            start: shard.start(),
            shape: full.to_vec(),
            held: (0..full.len()).filter(is_split).map(|dim| (dim, ranges(dim).collect())).collect(),
            kept_by: match shard.values() {
                ShardValues::KeptBy(mask) => Some(mask.clone()),
                _ => None,
            },
            bits: match shard.values() {
                ShardValues::Packed(bits) => Some(*bits),
                _ => None,
            },
        }
    }

    /// What it describes, or why it cannot be: a file may say anything.
    pub(super) fn shard(self) -> Result<Shard, String> {
        let elements = self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        // Bits of all of them must be countable too.
        if elements.is_none_or(|elements| elements > usize::MAX / 64) {
            return Err(format!("it is a shard of {:?}", self.shape));
        }
        let mut shard = Shard::full(&self.shape);
        for (dim, ranges) in self.held {
            let size = self.shape.get(dim).copied();
            let ends = ranges.iter().flatten();
            let ascend = ranges.iter().all(|[first, end]| first < end) && ends.clone().is_sorted();
            if size.is_none() || !ascend || ends.last().copied() > size {
                return Err(format!("it holds {ranges:?} of dimension {dim} of {:?}", self.shape));
            }
            shard = shard.narrow(dim, &ranges.iter().map(|[first, end]| *first..*end).collect::<Vec<_>>());
        }
        let shard = match (self.kept_by, self.bits) {
            (None, None) => shard,
            (Some(mask), None) => shard.kept_by(&mask),
            (None, Some(bits)) if (1..=32).contains(&bits) => shard.packed(bits),
            (mask, bits) => return Err(format!("it is kept by {mask:?} and has {bits:?} bits an element")),
        };
        Ok(match self.start {
            Some(start) => shard.starting_at(start),
            None => shard,
        })
    }
}

/// A mask of a full tensor on the host, and how many weights it keeps before each of its words.
#[derive(Debug)]
pub(super) struct MaskIndex {
    words: Vec<u32>,
    before: Vec<usize>,
}

impl MaskIndex {
    pub(super) fn new(words: Vec<u32>) -> MaskIndex {
        let counts = words.iter().scan(0, |sum, word| {
            *sum += word.count_ones() as usize;
            Some(*sum)
        });
        MaskIndex { before: iter::once(0).chain(counts).collect(), words }
    }

    /// A bit for each weight.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    pub(super) fn count(&self) -> usize {
        self.before[self.words.len()]
    }

    /// Weights kept before an index.
    fn rank(&self, index: usize) -> usize {
        let below = |word: &u32| (word & !(u32::MAX << (index % 32))).count_ones() as usize;
        self.before[index / 32] + self.words.get(index / 32).map_or(0, below)
    }

    /// Weights kept of a shard.
    pub(super) fn count_in(&self, shard: &Shard) -> usize {
        shard.runs().map(|run| self.rank(run.in_full + run.length) - self.rank(run.in_full)).sum()
    }

    /// The runs of the kept weights, given those of all.
    fn runs(&self, runs: impl Iterator<Item = ElementRun>) -> impl Iterator<Item = ElementRun> {
        runs.scan(0, |at, run| {
            let (first, end) = (self.rank(run.in_full), self.rank(run.in_full + run.length));
            let kept = ElementRun { at: *at, in_full: first, length: end - first };
            *at += kept.length;
            Some(kept)
        })
        .filter(|run| run.length > 0)
    }
}

/// Elements that two shards have in common, and that follow each other in both.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overlap {
    /// The index of the first in the one,
    pub(super) from: usize,
    /// and in the other.
    pub(super) to: usize,
    pub(super) length: usize,
}

/// What two shards of one tensor have in common, as few runs as there can be.
pub(super) fn overlap(
    from: impl Iterator<Item = ElementRun>,
    to: impl Iterator<Item = ElementRun>,
) -> Vec<Overlap> {
    let (mut from, mut to) = (from.peekable(), to.peekable());
    let mut found: Vec<Overlap> = Vec::new();
    while let (Some(a), Some(b)) = (from.peek(), to.peek()) {
        let (a_end, b_end) = (a.in_full + a.length, b.in_full + b.length);
        let (first, end) = (a.in_full.max(b.in_full), a_end.min(b_end));
        if first < end {
            let (from, to) = (a.at + first - a.in_full, b.at + first - b.in_full);
            match found.last_mut() {
                Some(last) if (last.from + last.length, last.to + last.length) == (from, to) => {
                    last.length += end - first;
                }
                _ => found.push(Overlap { from, to, length: end - first }),
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

    /// The picture at the top of `plan::shard`.
    #[test]
    fn the_kept_weights_of_a_column_are_runs_of_the_kept_vector() {
        let half = Shard::full(&[2, 4]).narrow(1, &[2..4]);
        let kept = MaskIndex::new(vec![0b0101_1001]);
        assert_eq!((kept.count(), kept.count_in(&half)), (4, 2));
        let shard = half.clone().kept_by("w");
        let both: Vec<ElementRun> = runs(&shard, 2, Some(&kept)).collect();
        assert_eq!(
            both,
            [ElementRun { at: 0, in_full: 1, length: 1 }, ElementRun { at: 1, in_full: 3, length: 1 }]
        );
        let second: Vec<ElementRun> = runs(&shard.starting_at(1), 1, Some(&kept)).collect();
        assert_eq!(second, [ElementRun { at: 0, in_full: 3, length: 1 }]);
        let rows = Shard::full(&[2, 4]).narrow(0, &[1..2]);
        let shared = overlap(runs(&half, 4, None), runs(&rows, 4, None));
        assert_eq!(shared, [Overlap { from: 2, to: 2, length: 2 }]);
    }

    #[test]
    fn a_range_of_a_full_tensor_is_described_as_it_always_was() {
        let text = |shard: &Shard| serde_json::to_string(&ShardDescription::of(shard)).unwrap();
        let range = Shard::full(&[10, 3]).starting_at(4);
        assert_eq!(text(&range), r#"{"start":4,"shape":[10,3]}"#);
        let heads = Shard::full(&[2, 12]).narrow(1, &[0..2, 4..6, 8..10]);
        let shard = heads.clone().kept_by("w").starting_at(3);
        assert_eq!(
            text(&shard),
            r#"{"start":3,"shape":[2,12],"held":{"1":[[0,2],[4,6],[8,10]]},"kept_by":"w"}"#
        );
        for shard in [range, shard, heads.packed(1)] {
            let read: ShardDescription = serde_json::from_str(&text(&shard)).unwrap();
            assert_eq!(read.shard().unwrap(), shard);
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
            let description: ShardDescription = serde_json::from_str(text).unwrap();
            assert!(description.shard().is_err(), "{text}");
        }
    }
}

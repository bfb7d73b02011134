//! What a method that scores by gradients holds before the first step, and in how many passes it does so
//! where memory is short.
//!
//! SNIP accumulates gradients of all candidates in f32: 4 bytes each. GraSP has a copy of all weights in f32
//! that moves (4), the direction in which it moves (4), and accumulates the product with the Hessian (4). All
//! of it is gone before gradients and the optimizer's state exist. Accumulators may be there for some of the
//! candidates at a time: a pass then goes over all samples for these alone, and since the best are found by
//! reading all scores three times, P passes cost 3 P times the work of one. The masks are the same.

use std::ops::Range;

use serde::Serialize;

use crate::batch::BatchSizes;
use crate::error::Error;
use crate::pruning::{PruneMethod, Pruning};
use crate::spec::Parameter;
use crate::split::split;

/// In how many passes weights are scored, and what that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Scoring {
    /// Into how many ranges the candidates are split, each scored in a pass of its own.
    pub passes: usize,
    /// The most bytes that a rank holds for it, beside weights and activations.
    pub bytes: u64,
}

/// How the samples that weights are scored by run.
///
/// Without batch norms each replica takes its slice of them, in micro-batches as large as those of its steps.
/// A batch norm sees whatever runs at a time, and masks are to be the same on every layout: so its groups are
/// those that one rank would have, and replicas split each of them and measure it together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoredBatch {
    /// Samples that run at a time: on a replica, or on all of them together.
    pub samples: usize,
    /// Replicas that split them.
    pub replicas: usize,
    /// Samples that are normalised together where steps do so (ghost batch norm).
    norm_group: Option<usize>,
}

impl ScoredBatch {
    /// So many on each replica, which has samples of its own.
    pub fn of_each(samples: usize) -> ScoredBatch {
        ScoredBatch { samples, replicas: 1, norm_group: None }
    }

    /// Those of a method, in a run of such steps.
    pub fn of(method: Option<PruneMethod>, batch: &BatchSizes, has_batch_norms: bool) -> ScoredBatch {
        let shared_out = has_batch_norms && batch.replicas > 1;
        let replicas = if shared_out { batch.replicas } else { 1 };
        let usual = replicas * batch.micro_batch;
        let samples = method.map_or(usual, |method| method.scored_at_once(usual));
        ScoredBatch { samples, replicas, norm_group: batch.norm_group }
    }

    /// What a replica runs of `count` samples that run at a time, and whether batch norms measure them over
    /// all replicas: not where these are complete ghost groups, of which each has some.
    pub fn replica_slice(&self, count: usize, replica: usize) -> (Range<usize>, bool) {
        match self.norm_group.filter(|group| count.is_multiple_of(*group)) {
            Some(group) => {
                let groups = split(count / group, self.replicas, replica);
                (groups.start * group..groups.end * group, false)
            }
            None => (split(count, self.replicas, replica), true),
        }
    }

    /// The most samples that a rank runs at a time.
    pub(crate) fn most(&self) -> usize {
        let group = self.norm_group.filter(|group| self.samples.is_multiple_of(*group)).unwrap_or(1);
        (self.samples / group).div_ceil(self.replicas) * group
    }
}

/// What a rank needs to score its shard of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScoringMemory {
    /// Held from the first pass to the last.
    persistent: u64,
    /// The accumulators of each candidate.
    accumulators: Vec<u64>,
}

impl ScoringMemory {
    /// Those of the rank that holds some of all parameters of a model; none where nothing is scored by gradients.
    pub(crate) fn of(all: &[Parameter], local: &[usize], pruning: Option<&Pruning>) -> Option<ScoringMemory> {
        let prune = pruning?;
        if !matches!(prune.method, PruneMethod::Snip { .. } | PruneMethod::Grasp { .. }) {
            return None;
        }
        // Sizes that no machine has are an error elsewhere, not an overflow here.
        let bytes = |parameter: &Parameter| parameter.elements().saturating_mul(4);
        let local = local.iter().map(|id| &all[*id]);
        let accumulators: Vec<u64> = local.clone().filter(|p| prune.covers(p)).map(bytes).collect();
        let persistent = match prune.method {
            PruneMethod::Grasp { .. } => {
                sum(&local.map(bytes).collect::<Vec<_>>()).saturating_add(sum(&accumulators))
            }
            _ => 0,
        };
        Some(ScoringMemory { persistent, accumulators })
    }

    /// Bytes held at most in so many passes.
    pub(crate) fn bytes(&self, passes: usize) -> u64 {
        let largest = partition(&self.accumulators, passes)
            .into_iter()
            .map(|range| sum(&self.accumulators[range]))
            .max();
        self.persistent.saturating_add(largest.unwrap_or(0))
    }

    /// Passes that fit into so many bytes beside what is held; none where the largest candidate alone is too
    /// large.
    fn passes(&self, headroom: u64) -> Option<usize> {
        let largest = self.accumulators.iter().copied().max().unwrap_or(0);
        (largest <= headroom).then(|| fill(&self.accumulators, headroom).len().max(1))
    }
}

/// How candidates are scored by ranks of these needs on devices of so much memory, what the system and the
/// kernels take included, beside weights and activations of so many bytes. An error where it does not fit,
/// however it is split.
pub(crate) fn fit(
    method: &str,
    needs: &[ScoringMemory],
    memory: Option<u64>,
    weights: u64,
    activations: u64,
) -> Result<Scoring, Error> {
    let mut passes = 1;
    for (needs, memory) in needs.iter().filter_map(|needs| Some((needs, memory?))) {
        let largest = needs.accumulators.iter().copied().max().unwrap_or(0);
        // A gradient as its layer makes it, logits, what kernels need: theirs to know, so a guess.
        let spare = largest.saturating_add(memory / 20);
        let taken = sum(&[weights, activations, needs.persistent, spare]);
        passes = needs.passes(memory.saturating_sub(taken)).map(|fitting| fitting.max(passes)).ok_or_else(|| {
            let gb = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
            Error::conflict("prune.method", format!(
                    "is \"{method}\", which needs {} to score this model even one parameter at a time (weights {}, activations {}, \
                     f32 copies and accumulators {}), and the device has {}: use more pipeline stages or a smaller micro-batch, or \
                     choose another method",
                    gb(taken.saturating_add(largest)),
                    gb(weights),
                    gb(activations),
                    gb(needs.persistent.saturating_add(largest)),
                    gb(memory),
                ))
        })?;
    }
    let bytes = needs.iter().map(|needs| needs.bytes(passes)).max().unwrap_or(0);
    Ok(Scoring { passes, bytes })
}

/// The chunks of candidates for which RigL accumulates dense gradients over several micro-batches, one after
/// the other.
const GROWTH_CHUNKS: usize = 4;

/// Which of the candidates that move, of so many elements each, RigL accumulates gradients of in each pass
/// over the batch: about a quarter of all elements, the last pass whatever is left.
pub fn growth_chunks(elements: &[u64]) -> Vec<Range<usize>> {
    let most = sum(elements).div_ceil(GROWTH_CHUNKS as u64);
    let mut start = 0;
    let chunk = |number: usize| {
        let (mut end, mut filled) = (start, 0u64);
        while let Some(size) = elements.get(end) {
            if number < GROWTH_CHUNKS && filled > 0 && filled.saturating_add(*size) > most {
                break;
            }
            (end, filled) = (end + 1, filled.saturating_add(*size));
        }
        let range = start..end;
        start = end;
        range
    };
    (1..=GROWTH_CHUNKS).map(chunk).collect()
}

/// A candidate of RigL's, as a rank has it.
pub(crate) struct GrowthCandidate {
    /// Elements of all of it,
    pub full: u64,
    /// and of what the rank has.
    pub elements: u64,
    /// Of these, how many are kept.
    pub kept: u64,
}

/// Bytes that RigL's accumulators of dense gradients take at most, in f32; nothing where one micro-batch makes the
/// gradient of a step, since each layer's is then let go as soon as its growth is chosen.
pub(crate) fn growth_bytes(pruning: &Pruning, micro_batches: usize, candidates: &[GrowthCandidate]) -> u64 {
    let PruneMethod::Rigl(moving) = pruning.method else { return 0 };
    if micro_batches == 1 {
        return 0;
    }
    let moves = |one: &&GrowthCandidate| {
        let kept = one.kept as f64 * one.full as f64 / one.elements.max(1) as f64;
        one.kept < one.elements && moving.fraction * kept >= 0.5
    };
    let moving: Vec<&GrowthCandidate> = candidates.iter().filter(moves).collect();
    let chunks = growth_chunks(&moving.iter().map(|one| one.full).collect::<Vec<_>>()).into_iter();
    let bytes = chunks.map(|chunk| sum(&moving[chunk].iter().map(|one| one.elements).collect::<Vec<_>>()));
    bytes.max().unwrap_or(0).saturating_mul(4)
}

fn sum(sizes: &[u64]) -> u64 {
    sizes.iter().fold(0, |sum, size| sum.saturating_add(*size))
}

/// Splits consecutive things of some sizes into so many ranges, the largest as small as can be; the last may be
/// empty.
pub fn partition(sizes: &[u64], ranges: usize) -> Vec<Range<usize>> {
    let (mut low, mut high) = (sizes.iter().copied().max().unwrap_or(0), sum(sizes));
    while low < high {
        let middle = low + (high - low) / 2;
        match fill(sizes, middle).len() <= ranges {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    let mut found = fill(sizes, low);
    found.resize(ranges.max(1), sizes.len()..sizes.len());
    found
}

/// Consecutive things in ranges of at most `limit` together, each filled before the next is begun.
fn fill(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut filled = 0u64;
    for (i, size) in sizes.iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if filled.saturating_add(*size) <= limit => {
                range.end = i + 1;
                filled = filled.saturating_add(*size);
            }
            _ => {
                ranges.push(i..i + 1);
                filled = *size;
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunFile;
    use crate::plan::{DataFacts, Plan};

    fn plan(model: &str, method: &str, precision: &str) -> Plan {
        let text = format!(
            "[model]\nname = \"{model}\"\n[train]\nbatch = 1\nprecision = \"{precision}\"\nrecompute = \"block\"\n[prune]\nmethod = \"{method}\"\nsparsity = 0.9"
        );
        let facts = DataFacts { vocab: Some(50257), image: None, classes: None };
        Plan::new(RunFile::parse(&text, &[]).unwrap(), facts).unwrap()
    }

    #[test]
    fn partitions_are_even_and_cover_everything() {
        assert_eq!(partition(&[4, 1, 1, 1, 3], 2), [0..2, 2..5]);
        assert_eq!(partition(&[4, 1, 1, 1, 3], 3), [0..1, 1..4, 4..5]);
        assert_eq!(partition(&[2, 2], 4), [0..1, 1..2, 2..2, 2..2]);
        assert_eq!(partition(&[], 2), [0..0, 0..0]);
        assert_eq!(partition(&[5, 5, 5], 1), std::slice::from_ref(&(0..3)));
    }

    /// Every replica has samples of each group, or complete ghost groups; together they have all of it, and none
    /// more than was planned.
    #[test]
    fn replicas_split_what_batch_norms_see_at_a_time() {
        let batch = |norm_group| BatchSizes {
            samples: 24,
            replicas: 4,
            micro_batches: 1,
            micro_batch: 6,
            norm: Default::default(),
            norm_group,
        };
        for (norm_group, norms, count, together) in [
            (None, true, 24, true),
            (None, true, 3, true),
            (Some(3), true, 24, false),
            (Some(3), true, 13, true),
        ] {
            let scored = ScoredBatch::of(None, &batch(norm_group), norms);
            assert_eq!((scored.samples, scored.replicas, scored.most()), (24, 4, 6));
            let slices: Vec<_> = (0..4).map(|replica| scored.replica_slice(count, replica)).collect();
            assert!(slices.iter().all(|(slice, is)| slice.len() <= 6 && *is == together), "{slices:?}");
            let all: Vec<usize> = slices.into_iter().flat_map(|(slice, _)| slice).collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
        assert_eq!(ScoredBatch::of(None, &batch(None), false), ScoredBatch::of_each(6));
    }

    #[test]
    fn growth_is_chosen_a_quarter_at_a_time() {
        assert_eq!(growth_chunks(&[4, 4, 4, 4]), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(growth_chunks(&[9, 1, 1, 1, 1, 1]), [0..1, 1..5, 5..6, 6..6]);
        assert_eq!(growth_chunks(&[1, 1, 1, 1, 9, 9]), [0..4, 4..5, 5..6, 6..6]);
        assert_eq!(growth_chunks(&[]), [0..0, 0..0, 0..0, 0..0]);
    }

    /// 13 billion weights in bf16 take 26 GB and their gradients in f32 51 GB: one pass on a GPU of 141 GB,
    /// more on one of 80.
    #[test]
    fn snip_scores_13_billion_weights_on_one_gpu() {
        let plan = plan("gpt3-13b", "snip", "bf16");
        let one = plan.scoring(Some(150_000_000_000)).unwrap().unwrap();
        assert_eq!(one.passes, 1);
        assert!((50.0..52.0).contains(&(one.bytes as f64 / 1e9)), "{}", one.bytes);
        assert_eq!(plan.memory.scoring, one.bytes);
        let more = plan.scoring(Some(80_000_000_000)).unwrap().unwrap();
        assert!(more.passes > 1 && more.bytes + plan.memory.weights < 80_000_000_000, "{more:?}");
        assert_eq!(plan.scoring(None).unwrap().unwrap(), one);
    }

    #[test]
    fn what_does_not_fit_is_said_beforehand() {
        let grasp = plan("gpt3-13b", "grasp", "bf16");
        let error = grasp.scoring(Some(80_000_000_000)).unwrap_err().to_string();
        assert!(error.starts_with("`prune.method` is \"grasp\", which needs 1"), "{error}");
        assert!(error.contains("and the device has 80.00 GB"), "{error}");
        assert!(plan("gpt3-13b", "snip", "bf16").scoring(Some(20_000_000_000)).is_err());
        // What needs no gradients is not held to it.
        assert_eq!(plan("gpt3-13b", "magnitude", "bf16").scoring(Some(1)).unwrap(), None);
    }
}

//! Keys at the threshold of a tensor that several ranks hold in shards: those that are earliest in the full
//! tensor stay, so that a mask does not depend on how the tensor is split.
//!
//! The index of the first that goes is found as a key is: by counting the ties in 65,536 ranges of indices and
//! again within one of them, all-reduced over the ranks that hold the shards. It takes two rounds up to 2^32
//! weights, and only for a tensor that is split and keeps some of its ties but not all: at most one under a
//! threshold.

use espalier_plan::Shard;
use espalier_tensor::Tensor;
use espalier_tensor::mask::ones;
use espalier_tensor::ops::select::{DIGITS, at_least_before};

use super::MaskBits;
use crate::Result;

/// All-reduce (sum) over the ranks that choose together, each of which must call it in the same order.
pub type AllReduceCounts<'a> = dyn Fn(Vec<u64>) -> crate::Result<Vec<u64>> + 'a;

/// A shard of a tensor with ties, on the host.
pub(super) struct ThresholdTies {
    /// What is above the threshold.
    above: MaskBits,
    /// What is at it.
    tied: MaskBits,
}

impl ThresholdTies {
    pub(super) fn of(keys: &Tensor, threshold: u32) -> Result<ThresholdTies> {
        let (above, mut tied) =
            (at_least_before(keys, threshold, 0)?, at_least_before(keys, threshold, keys.len())?);
        tied.iter_mut().zip(&above).for_each(|(tied, above)| *tied &= !above);
        Ok(ThresholdTies { above, tied })
    }

    /// The indices of ties in the full tensor, ascending.
    fn positions<'a>(&'a self, shard: &'a Shard) -> impl Iterator<Item = usize> + 'a {
        let mut runs = shard.runs();
        let mut run = runs.next();
        ones(&self.tied).map(move |at| {
            while run.is_some_and(|run| run.at + run.length <= at) {
                run = runs.next();
            }
            let run = run.expect("an index of the shard");
            run.in_full + at - run.at
        })
    }

    /// All above the threshold, and the ties before an index of the full tensor.
    pub(super) fn keep_before(self, end: usize, shard: &Shard) -> MaskBits {
        let before = self.positions(shard).take_while(|position| *position < end).count();
        let mut bits = self.above;
        ones(&self.tied).take(before).for_each(|at| bits[at / 32] |= 1 << (at % 32));
        bits
    }
}

/// The index in the full tensor of the first tie that goes, if `stay` of them stay and others do not. `local`
/// are those that this rank counts, if any; all ranks must call it.
pub(super) fn first_to_go(
    local: Option<&ThresholdTies>,
    shard: &Shard,
    stay: usize,
    all_reduce: &AllReduceCounts<'_>,
) -> Result<usize> {
    let (mut within, mut stay) = (0..shard.full_shape().iter().product::<usize>(), stay as u64);
    while within.len() > 1 {
        let width = within.len().div_ceil(DIGITS);
        let mut counts = vec![0u64; DIGITS];
        for position in
            local.iter().flat_map(|ties| ties.positions(shard)).filter(|position| within.contains(position))
        {
            counts[(position - within.start) / width] += 1;
        }
        let counts = all_reduce(counts)?;
        let holder = counts.iter().position(|count| {
            let holds = stay < *count;
            stay -= if holds { 0 } else { *count };
            holds
        });
        let start = within.start + width * holder.expect("more ties than stay");
        within = start..(start + width).min(within.end);
    }
    Ok(within.start)
}

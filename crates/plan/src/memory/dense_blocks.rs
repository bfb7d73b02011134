//! The blocks whose weights are dense at once, where they rest compressed or in shards, and what is on its way for
//! the next.

use std::ops::Range;

use super::Prediction;
use crate::packets::{SharedVector, gather_messages};

/// How many ranks share a parameter.
#[derive(Clone, Copy)]
pub(super) struct ParamSharers {
    /// Those that have partial sums of its gradient,
    pub ranks: u64,
    /// and those that have shards of its weight: one where each has all of it.
    pub of_weight: u64,
}

impl Prediction<'_> {
    /// Bytes of the blocks of some stages that are dense at once, where weights rest compressed or in shards.
    pub(super) fn expanded(
        &self,
        stage_blocks: &[Range<usize>],
        sharers: &[ParamSharers],
        compressed: bool,
    ) -> u64 {
        let size = self.storage.precision.size();
        let bytes = |id: usize| self.parameters[id].elements().saturating_mul(size);
        let sum = |numbers: &mut dyn Iterator<Item = u64>| numbers.fold(0, u64::saturating_add);
        let of_block = |block: usize| -> [u64; 2] {
            let ids = self.inputs.tensors.blocks.parameters(block..block + 1);
            let (sharded, full): (Vec<usize>, Vec<usize>) =
                ids.into_iter().partition(|id| sharers[*id].of_weight > 1);
            let gathered = |id: &usize| match self.kept.as_ref().and_then(|kept| kept[*id]) {
                // Products read what was gathered of it.
                Some(kept) if compressed && self.is_multiplied_sparsely(*id, kept) => {
                    kept.saturating_mul(size)
                }
                _ => bytes(*id),
            };
            let expanded = full.into_iter().filter(|id| self.is_expanded(*id)).map(bytes);
            [sum(&mut expanded.into_iter()), sum(&mut sharded.iter().map(gathered))]
        };
        let of_stage = |virtual_stage: &Range<usize>| {
            let each: Vec<[u64; 2]> = virtual_stage.clone().map(of_block).collect();
            // What is gathered ahead is still a message.
            let pairs = each
                .windows(2)
                .map(|pair| pair[0][0].saturating_add(pair[1][0]).saturating_add(pair[0][1].max(pair[1][1])));
            let pairs = pairs.filter(|_| self.model_parallel.expands_ahead);
            each.iter()
                .map(|[expanded, gathered]| expanded.saturating_add(*gathered))
                .chain(pairs)
                .max()
                .unwrap_or(0)
        };
        stage_blocks.iter().map(of_stage).max().unwrap_or(0)
    }

    /// Bytes of the messages in which the sharded weights of a block arrive while the one before runs: those
    /// of the largest block.
    pub(super) fn gathered_ahead(
        &self,
        stage_blocks: &[Range<usize>],
        sharers: &[ParamSharers],
        compressed: bool,
    ) -> u64 {
        let of_block = |block: usize| -> u64 {
            let ids = self.inputs.tensors.blocks.parameters(block..block + 1);
            let vector = |id: usize| {
                let kept = self.kept.as_ref().and_then(|kept| kept[id]).filter(|_| compressed);
                let elements = kept.unwrap_or(self.parameters[id].elements());
                SharedVector { elements, ranks: sharers[id].of_weight }
            };
            let vectors = ids.into_iter().map(vector).filter(|vector| vector.ranks > 1);
            gather_messages(vectors, self.storage.precision.size())
        };
        stage_blocks.iter().cloned().flatten().map(of_block).max().unwrap_or(0)
    }

    /// Whether a parameter that rests compressed is dense while it works: some of it is gone, and products
    /// read its zeros.
    fn is_expanded(&self, id: usize) -> bool {
        let elements = self.parameters[id].elements();
        let Some(kept) = self.kept.as_ref().and_then(|kept| kept[id]) else { return false };
        kept < elements && !self.is_multiplied_sparsely(id, kept)
    }
}

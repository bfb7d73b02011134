//! Weights that are gathered when their block runs (ZeRO-3), pass by pass of a rank's list.
//!
//! A pass enters one block after the other. A block's weights are gathered when it is entered, or while the one
//! before runs, and let go when it is left, unless it is entered again at once: from the last block's forward to
//! the loss and to its backward, and from the first block's backward to the forward of the next micro-batch.
//! Recomputation is within the backward of its block, with the same weights.

use std::collections::BTreeMap;

use super::TrafficRank;
use super::layers::MessageTotals;
use crate::packets::packets;
use crate::schedule::{Action, Pass};

/// What the forwards and backwards of a list gather, by these, micro-batch and chunk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct PassGathers(BTreeMap<(bool, usize, usize), MessageTotals>);

impl PassGathers {
    /// What an action gathers.
    pub fn of(&self, action: &Action) -> MessageTotals {
        let Some((pass, work)) = action.compute() else { return MessageTotals::default() };
        match pass {
            Pass::BackwardWeight => MessageTotals::default(),
            _ => {
                let key = (pass == Pass::Forward, work.micro_batch, work.chunk);
                self.0.get(&key).copied().unwrap_or_default()
            }
        }
    }
}

impl TrafficRank<'_> {
    /// What the passes of a list of this rank gather.
    pub(super) fn gathers(&self, list: &[Action]) -> PassGathers {
        let mut gathers = PassGathers::default();
        if !self.params.params.iter().any(|param| param.shards_weight) {
            return gathers;
        }
        let of_block: Vec<MessageTotals> =
            (0..self.local.model.blocks.len()).map(|block| self.gather_of(block)).collect();
        // The block whose weights are still there.
        let mut ready = None;
        for action in list {
            let Some((pass, work)) = action.compute().filter(|(pass, _)| *pass != Pass::BackwardWeight)
            else {
                continue;
            };
            let blocks = self.plan.stage_blocks[self.chunks()[work.chunk].virtual_stage].clone();
            let ends = blocks.end == of_block.len();
            let entered: Vec<usize> = match pass {
                Pass::Forward => blocks.collect(),
                // The loss comes first.
                _ if ends => blocks.clone().next_back().into_iter().chain(blocks.rev()).collect(),
                _ => blocks.rev().collect(),
            };
            let sum = gathers.0.entry((pass == Pass::Forward, work.micro_batch, work.chunk)).or_default();
            for block in entered.into_iter().filter(|block| of_block[*block].count > 0) {
                if ready != Some(block) {
                    sum.count += of_block[block].count;
                    sum.bytes = sum.bytes.saturating_add(of_block[block].bytes);
                }
                ready = Some(block);
            }
        }
        gathers
    }

    /// What one gather of a block's weights sends.
    fn gather_of(&self, block: usize) -> MessageTotals {
        let mut groups: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for id in self.tensors.parameters(block..block + 1) {
            let param = &self.params.params[id];
            if param.shards_weight {
                groups.entry(param.group).or_default().push(self.lengths[id]);
            }
        }
        let mut sum = MessageTotals::default();
        for (group, lengths) in groups {
            let bytes: Vec<u64> = lengths.iter().map(|length| length.saturating_mul(self.size)).collect();
            sum.count += packets(&bytes).len() as u64;
            let sent = super::scatter(self.member(group), lengths.into_iter(), self.size);
            sum.bytes = sum.bytes.saturating_add(sent);
        }
        sum
    }
}

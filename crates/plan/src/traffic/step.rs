//! All that a rank sends in a step, by what it is for: for a person who plans a layout.

use serde::Serialize;

use super::layers::{LayerTraffic, MessageTotals};
use crate::data_parallel::{DataParallelMode, ZeroStage};
use crate::error::Error;
use crate::plan::Plan;
use crate::schedule::Action;

/// What a rank sends in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct StepTraffic {
    /// Activations for the next stage and gradients for the one before.
    pub stages: MessageTotals,
    /// What layers send within forward and backward passes.
    #[serde(flatten)]
    pub layers: LayerTraffic,
    /// Reductions of weight gradients, and all-gathers of weights after the step where state is sharded; where
    /// replicas step by themselves, a step's fraction of their average.
    pub gradients: MessageTotals,
    /// All-gathers of the weights of blocks that are about to run, where weights are sharded.
    pub weights: MessageTotals,
    /// Losses and norms, and running statistics.
    pub numbers: MessageTotals,
}

impl StepTraffic {
    /// All kinds, with what a person calls them where replicas communicate updates in this way.
    pub fn kinds(&self, data_parallel: DataParallelMode) -> [(&'static str, MessageTotals); 10] {
        let LayerTraffic { all_reduces, all_gathers, reduce_scatters, all_to_alls, halos, norms } =
            self.layers;
        let gradients = match data_parallel {
            DataParallelMode::Replicated => "gradient all-reduce",
            DataParallelMode::Sharded(ZeroStage::Weights) => "gradient reduce-scatter",
            DataParallelMode::Sharded(_) => "gradient reduce-scatter + all-gather",
            DataParallelMode::Local { .. } => "weight averaging (local SGD)",
        };
        [
            ("pipeline send/recv", self.stages),
            ("activation all-reduce", all_reduces),
            ("activation all-gather", all_gathers),
            ("activation reduce-scatter", reduce_scatters),
            ("activation all-to-all", all_to_alls),
            ("halo exchange", halos),
            ("SyncBN all-reduce", norms),
            (gradients, self.gradients),
            ("weight all-gather", self.weights),
            ("loss, grad norm, BN running stats", self.numbers),
        ]
    }

    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        let kinds = self.kinds(DataParallelMode::Replicated);
        kinds.iter().fold(0, |sum, (_, sent)| sum.saturating_add(sent.bytes))
    }
}

impl Plan {
    /// What a rank sends in a step, as far as can be known before pruning. A pipeline that never flushes is
    /// counted for a step by itself.
    pub fn step_traffic(&self, rank: usize) -> Result<StepTraffic, Error> {
        let schedule = self.schedule(1)?;
        let traffic = self.traffic(rank, &self.gradient_lengths(rank))?;
        let layers = self.layer_traffic(rank, &schedule)?;
        let mut sent = StepTraffic { layers, ..StepTraffic::default() };
        if let DataParallelMode::Local { every, .. } = self.data_parallel {
            sent.gradients.add(1, traffic.bytes(&Action::Average) / every);
            return Ok(sent);
        }
        for action in &schedule.ranks[self.mesh.coordinates(rank).pipeline] {
            let (kind, count) = match action {
                Action::Send(_) => (&mut sent.stages, 1),
                Action::AllReduce { chunk } => (&mut sent.gradients, traffic.reductions_of(Some(*chunk))),
                Action::WaitReduce => (&mut sent.gradients, traffic.reductions_of(None)),
                Action::Gather => (&mut sent.gradients, 1),
                Action::Forward(_) | Action::Backward(_) | Action::BackwardInput(_) => {
                    (&mut sent.weights, traffic.passes.of(action).count)
                }
                Action::Agree | Action::SendControl(_) | Action::Step | Action::Commit | Action::Settle => {
                    (&mut sent.numbers, 1)
                }
                _ => continue,
            };
            let bytes = traffic.bytes(action);
            if bytes > 0 {
                kind.count += count;
                kind.bytes = kind.bytes.saturating_add(bytes);
            }
        }
        Ok(sent)
    }
}

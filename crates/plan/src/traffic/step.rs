//! All that a rank sends in a step, by what it is for: for a person who plans a layout.

use serde::Serialize;

use super::exchanges::{Exchanges, Sent};
use crate::error::Error;
use crate::plan::Plan;
use crate::schedule::Action;
use crate::sharing::Sharing;

/// What a rank sends in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct StepTraffic {
    /// Activations for the next stage and gradients for the one before.
    pub stages: Sent,
    /// What layers send within forward and backward passes.
    #[serde(flatten)]
    pub exchanges: Exchanges,
    /// Sums of weight gradients, and weights that come back where state is shared out; where replicas go apart, a step's part of
    /// their average.
    pub gradients: Sent,
    /// Losses and norms, and running statistics.
    pub numbers: Sent,
}

impl StepTraffic {
    /// All kinds, with what a person calls them where replicas share updates in this way.
    pub fn kinds(&self, sharing: Sharing) -> [(&'static str, Sent); 9] {
        let Exchanges { sums, gathers, scatters, dealt, halos, norms } = self.exchanges;
        let gradients = match sharing {
            Sharing::Replicated => "gradient all-reduce",
            Sharing::Sharded { .. } => "gradient reduce-scatter + all-gather",
            Sharing::Local { .. } => "weight averaging (local SGD)",
        };
        [
            ("pipeline send/recv", self.stages),
            ("activation all-reduce", sums),
            ("activation all-gather", gathers),
            ("activation reduce-scatter", scatters),
            ("activation all-to-all", dealt),
            ("halo exchange", halos),
            ("SyncBN all-reduce", norms),
            (gradients, self.gradients),
            ("loss, grad norm, BN running stats", self.numbers),
        ]
    }

    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        let kinds = self.kinds(Sharing::Replicated);
        kinds.iter().fold(0, |sum, (_, sent)| sum.saturating_add(sent.bytes))
    }
}

impl Plan {
    /// What a rank sends in a step, as far as can be known before pruning. A pipeline that never flushes is counted for a step by
    /// itself.
    pub fn step_traffic(&self, rank: usize) -> Result<StepTraffic, Error> {
        let schedule = self.schedule(1)?;
        let traffic = self.traffic(rank, &self.gradient_lengths(rank))?;
        let exchanges = self.exchanges(rank, &schedule)?;
        let mut sent = StepTraffic { exchanges, ..StepTraffic::default() };
        if let Sharing::Local { every, .. } = self.sharing {
            sent.gradients.add(1, traffic.bytes(&Action::Average) / every);
            return Ok(sent);
        }
        for action in &schedule.ranks[self.mesh.coordinates(rank).pipeline] {
            let (kind, count) = match action {
                Action::Send(_) => (&mut sent.stages, 1),
                Action::AllReduce { chunk } => (&mut sent.gradients, traffic.sums_of(Some(*chunk))),
                Action::WaitReduce => (&mut sent.gradients, traffic.sums_of(None)),
                Action::Gather => (&mut sent.gradients, 1),
                Action::Agree | Action::Tell(_) | Action::Step | Action::Commit | Action::Settle => {
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

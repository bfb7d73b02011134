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
    /// All kinds, with what a person calls them.
    pub fn kinds(&self) -> [(&'static str, Sent); 9] {
        let Exchanges { sums, gathers, scatters, dealt, halos, norms } = self.exchanges;
        [
            ("activations between stages", self.stages),
            ("sums of activations", sums),
            ("gathers of activations", gathers),
            ("scattered sums of activations", scatters),
            ("activations dealt out anew", dealt),
            ("halos of images", halos),
            ("sums of batch norms", norms),
            ("sums of gradients", self.gradients),
            ("losses, norms, statistics", self.numbers),
        ]
    }

    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        self.kinds().iter().fold(0, |sum, (_, sent)| sum.saturating_add(sent.bytes))
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

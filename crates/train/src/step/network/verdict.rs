//! Whether an update is taken, where stages do not wait for each other: pipelines that never flush.

use espalier_comm::Reduce;
use espalier_plan::schedule::Updates;

use super::{Agreed, NetworkWorker, Waiting};
use crate::Result;
use crate::state::Gradients;
use crate::step::{TOTALS, Totals};

/// Tags of verdicts on an update: from the stage behind, and from the first one to all; above that of totals.
const VERDICT: u32 = TOTALS + 1;
const DECIDED: u32 = TOTALS + 2;

impl NetworkWorker<'_> {
    /// Whether the loss of an update is finite on all replicas of the stage that has it.
    pub(super) fn is_finite_everywhere(&self, own: Totals) -> Result<bool> {
        let ranks = &self.scene.context.ranks;
        if ranks.relay().rank() + 1 < ranks.relay().size() {
            return Ok(true);
        }
        let sums = ranks.data().all_reduce(own.to_numbers(), Reduce::Sum)?;
        Ok(Totals::from_numbers(&sums).loss().is_finite())
    }

    /// Whether an update is taken, where stages do not wait for each other: by none of them if a number is not finite on
    /// one. The verdict comes with the gradients from the stage behind and goes on to the one before; of 2BW, whose new
    /// weights nobody needs for a batch, the first stage tells all ([`NetworkWorker::commit`]).
    pub(super) fn pass_verdict(&self, own: bool) -> Result<bool> {
        let (stages, mut finite) = (self.scene.context.ranks.relay(), own);
        if stages.rank() + 1 < stages.size() {
            finite &= stages.receive(vec![0u64], stages.rank() + 1, VERDICT)?[0] > 0;
        }
        let verdict = || vec![u64::from(finite)];
        if stages.rank() > 0 {
            drop(stages.start_send(verdict(), stages.rank() - 1, VERDICT)?);
        } else if self.scene.updates == Updates::DoubleBuffered {
            for stage in 1..stages.size() {
                drop(stages.start_send(verdict(), stage, DECIDED)?);
            }
        }
        Ok(finite)
    }

    /// Takes the update that waits for its verdict, if there is one, or skips it: before its weights are needed, and where
    /// a list ends.
    pub fn commit(&mut self) -> Result<()> {
        let Some(waiting) = self.scene.flights.waiting.take() else { return Ok(()) };
        let Waiting { sums, grad_norm, lr, statistics } = waiting;
        let stages = self.scene.context.ranks.relay();
        let finite = stages.receive(vec![0u64], 0, DECIDED)?[0] > 0;
        let mut gradients = Gradients::new(self.scene.masks);
        sums.into_iter().for_each(|(id, sum)| gradients.put(id, sum));
        self.update(Agreed { gradients, grad_norm, finite }, lr, statistics)
    }
}

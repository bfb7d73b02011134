//! What a model itself takes before and after pruning. A method that prunes after the first step holds dense
//! state until then, so that its peak is that of dense training, however little is left in the end.

use serde::Serialize;

use super::MemoryPlan;

/// The most that weights, gradients, optimizer state and masks take together, on the rank where that is most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StatePhases {
    /// Until all is pruned that is to go.
    pub before: u64,
    /// From then on; the same where that is before the first step.
    pub after: u64,
    /// What is held while weights are scored by gradients, in one pass: scores and whatever of these is there
    /// by then. None for methods that do not.
    pub scoring: Option<u64>,
}

impl StatePhases {
    /// From what ranks have at the peaks of a run, and once pruned, for the first time and to the end.
    pub(crate) fn of(ranks: &[MemoryPlan], first: &[MemoryPlan], last: &[MemoryPlan]) -> StatePhases {
        let most = |of: &mut dyn Iterator<Item = u64>| of.max().unwrap_or(0);
        // State is dense while the first masks are drawn, and let go one parameter after the other.
        let shrinking = |(dense, first): (&MemoryPlan, &MemoryPlan)| {
            let weights_at_rest = dense.weights_at_rest.max(first.weights_at_rest);
            MemoryPlan { weights_at_rest, optimizer: dense.optimizer.max(first.optimizer), ..*first }.state()
        };
        let dense = most(&mut ranks.iter().map(|rank| rank.state() - rank.mask));
        let after = most(&mut last.iter().map(MemoryPlan::state));
        let scoring = most(&mut ranks.iter().filter(|rank| rank.scoring > 0).map(MemoryPlan::while_scoring));
        StatePhases {
            before: dense.max(most(&mut ranks.iter().zip(first).map(shrinking))).max(after),
            after,
            scoring: (scoring > 0).then_some(scoring),
        }
    }
}

impl MemoryPlan {
    /// Weights, gradients, optimizer state and masks, while it trains.
    pub fn state(&self) -> u64 {
        let all = [self.weights_at_rest, self.gradients, self.optimizer, self.mask];
        all.into_iter().fold(0, u64::saturating_add)
    }

    /// What of these is there while weights are scored, and the scores.
    fn while_scoring(&self) -> u64 {
        let state = if self.scores_beside_state { self.optimizer.saturating_add(self.mask) } else { 0 };
        self.weights.saturating_add(state).saturating_add(self.scoring)
    }
}

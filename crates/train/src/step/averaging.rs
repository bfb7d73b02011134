//! What the one action of a list that averages does: ranks that have gone apart come together.

use espalier_plan::Traffic;
use espalier_plan::schedule::Action;

use super::Worker;
use crate::Result;
use crate::checkpoint::Progress;
use crate::context::Context;
use crate::parallel::data::local::average;
use crate::state::ParamStore;

/// Runs [`Action::Average`].
pub(crate) struct Averaging<'a> {
    pub context: &'a Context,
    pub traffic: &'a Traffic,
    pub params: &'a mut ParamStore,
    /// Whether there is state: a step was taken.
    pub has_state: bool,
    pub progress: &'a mut Progress,
    /// Whether this rank is asked to stop, and then whether any is.
    pub stop: &'a mut bool,
}

impl Worker for Averaging<'_> {
    fn bytes(&self, action: &Action) -> u64 {
        self.traffic.bytes(action)
    }

    fn act(&mut self, action: Action) -> Result<()> {
        debug_assert_eq!(action, Action::Average);
        let Context { ranks, groups, .. } = self.context;
        if self.has_state {
            average(self.params, ranks.data())?;
        }
        groups.average_statistics(self.params)?;
        // One that skipped a step has counted it alone.
        let Progress { updates, bad_steps, .. } = *self.progress;
        let all = ranks.largest(vec![updates, bad_steps, u64::from(*self.stop)])?;
        (self.progress.updates, self.progress.bad_steps, *self.stop) = (all[0], all[1], all[2] > 0);
        Ok(())
    }
}

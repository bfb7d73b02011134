//! What the one action of a list that averages does: ranks that have gone apart come together.

use espalier_plan::RankTraffic;
use espalier_plan::schedule::Action;

use super::ActionWorker;
use crate::Result;
use crate::checkpoint::RunProgress;
use crate::context::TrainContext;
use crate::parallel::data::local::average;
use crate::state::ParamStore;

/// Runs [`Action::Average`].
pub(crate) struct AveragingWorker<'a> {
    pub context: &'a TrainContext,
    pub traffic: &'a RankTraffic,
    pub params: &'a mut ParamStore,
    /// Whether there is state: a step was taken.
    pub has_state: bool,
    pub progress: &'a mut RunProgress,
    /// Whether this rank is asked to stop, and then whether any is.
    pub stop: &'a mut bool,
}

impl ActionWorker for AveragingWorker<'_> {
    fn bytes(&self, action: &Action) -> u64 {
        self.traffic.bytes(action)
    }

    fn act(&mut self, action: Action) -> Result<()> {
        debug_assert_eq!(action, Action::Average);
        let TrainContext { ranks, groups, .. } = self.context;
        if self.has_state {
            average(self.params, ranks.data())?;
        }
        groups.average_statistics(self.params)?;
        // One that skipped a step has counted it alone.
        let RunProgress { updates, bad_steps, .. } = *self.progress;
        let all = ranks.all_reduce_max(vec![updates, bad_steps, u64::from(*self.stop)])?;
        (self.progress.updates, self.progress.bad_steps, *self.stop) = (all[0], all[1], all[2] > 0);
        Ok(())
    }
}

//! What a person should know of a run that does what it was asked to, and perhaps not what was meant.

use espalier_plan::Plan;
use espalier_plan::pruning::PruneMethod;

use super::Run;

impl Run {
    /// Where evaluating or saving is part of what is trained, since a pipeline that never flushes runs empty
    /// for it.
    pub(super) fn drains_change_training(&self) -> Option<String> {
        let Plan { pipeline, intervals, .. } = &self.plan;
        if !pipeline.is_asynchronous() {
            return None;
        }
        let every =
            [("train.eval_every", intervals.eval_every), ("checkpoint.every", intervals.save_every())];
        let every = every.into_iter().filter_map(|(field, every)| Some((field, every?)));
        let within = every.filter(|(_, every)| *every < self.trainer.steps());
        let fields: Vec<String> = within.map(|(field, every)| format!("`{field}` = {every}")).collect();
        (!fields.is_empty()).then(|| {
            format!(
                "with \"{}\" the pipeline is drained wherever the run is evaluated or saved, and the next batches start on \
                 newer weights: {} changes the result",
                pipeline.order.name(),
                fields.join(" or ")
            )
        })
    }

    /// Where the run ended before its method had pruned as much as it should.
    pub(super) fn short_of_its_sparsity(&self) -> Option<String> {
        let prune = self.plan.pruning.as_ref().filter(|prune| prune.sparsity > 0.0)?;
        let ((kept, all), steps) = (self.trainer.kept(), self.trainer.steps());
        if kept == all {
            return Some(format!(
                "nothing was pruned: {steps} steps are too few for {}",
                prune.method.name()
            ));
        }
        // The others prune once, and then all of it.
        let is_gradual = matches!(prune.method, PruneMethod::Gradual { .. });
        let (reached, wanted) = (self.trainer.sparsity(), prune.sparsity);
        // Of each row so many stay as its length is rounded to.
        let by_row: u64 = prune.kept_by_parameter(&self.plan.model.parameters()).into_iter().flatten().sum();
        let enough = 1.0 - by_row as f64 / all as f64;
        (is_gradual && reached + 0.5 / all as f64 + 1e-3 < wanted.min(enough)).then(|| {
            format!("{steps} steps were too few: pruned to {reached:.4}, and `prune.sparsity` is {wanted}")
        })
    }
}

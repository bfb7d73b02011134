//! A trial under way: a run without a folder that can be paused at any step, saved and resumed.
//!
//! It is [`Trainer`]'s run on one rank and nothing else: the same steps as `espalier train` takes of the same
//! file, to the bit. What a search adds is when it pauses to validate. Between two calls a trial is its weights
//! and the optimizer's state on the device.

mod saved;
#[cfg(test)]
mod tests;

use espalier_plan::Error;
use espalier_train::Result;
use espalier_train::trainer::{GoalCheck, Trainer};

use crate::trial::TrialCheck;
use crate::workload::{TrialSettings, Workload};

/// A trial between its first step and its last.
#[derive(Debug)]
pub struct RunningTrial {
    trainer: Trainer,
    /// What its checkpoints are of: model and precision.
    model: String,
    precision: &'static str,
    /// The most wrong predictions of a check that reaches the goal, and who asks whether there are more; of other
    /// goals, and samples without classes, nobody does.
    max_wrong: Option<usize>,
    goal_check: Option<GoalCheck>,
    /// What it came to, where it has diverged.
    end: Option<TrialCheck>,
}

impl RunningTrial {
    /// A trial before its first step. Nothing is scored or pruned yet: the first step does that.
    pub fn begin(workload: &Workload, settings: &TrialSettings) -> Result<RunningTrial> {
        let plan = workload.plan(settings)?;
        let max_wrong = workload.max_wrong(&plan);
        let (dataset, device) = (workload.dataset().clone(), workload.device());
        let (model, precision) = (plan.model.name.clone(), plan.storage.precision.name());
        let scores = workload.scores(settings, &plan);
        let mut trainer = device.enter(|| Trainer::new(plan, dataset, device))?;
        trainer.enable_graphed_step();
        trainer.share_scores(scores);
        let goal_check = max_wrong.and_then(|wrong| GoalCheck::new(&trainer, wrong));
        Ok(RunningTrial { trainer, model, precision, max_wrong, goal_check, end: None })
    }

    /// Steps of the complete run, `train.steps`: no trial goes further, since its learning rate is not said
    /// beyond.
    pub fn steps(&self) -> u64 {
        self.trainer.steps()
    }

    /// Takes steps until `step` of them are taken, and evaluates on the full validation split (or as much of
    /// it as [`Workload::with_goal`] asks for). A trial that diverges on the way stops at the step that did, and
    /// stays there.
    pub fn advance(&mut self, step: u64) -> Result<TrialCheck> {
        let device = self.trainer.device().clone();
        device.enter(|| match self.train_to(step)? {
            Some(end) => Ok(end),
            None => self.check(),
        })
    }

    /// The same for one who only asks whether the goal is reached by a network that is pruned, or the trial has
    /// diverged: none where it is neither, which is known before all samples are seen.
    pub fn advance_to_goal(&mut self, step: u64) -> Result<Option<TrialCheck>> {
        let device = self.trainer.device().clone();
        device.enter(|| {
            let end = self.train_to(step)?;
            if end.is_some() {
                return Ok(end);
            }
            let is_pruned = self.is_pruned();
            let may_be_reached = match &mut self.goal_check {
                Some(goal_check) => is_pruned && goal_check.is_reached(&self.trainer)?,
                None => true,
            };
            may_be_reached.then(|| self.check()).transpose()
        })
    }

    /// The model, its masks and where it stands.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Takes steps until `step` of them are taken; what the trial came to, where it has diverged.
    fn train_to(&mut self, step: u64) -> Result<Option<TrialCheck>> {
        if self.end.is_some() {
            return Ok(self.end);
        }
        let (taken, steps) = (self.trainer.progress().step, self.steps());
        if step < taken || step > steps {
            let problem =
                format!("is {steps}, and {taken} steps are taken: it cannot go back to step {step}");
            return Err(Error::Conflict { field: "train.steps".into(), problem }.into());
        }
        while self.trainer.progress().step < step {
            let report = self.trainer.step_queued()?;
            if !report.taken {
                let (step, loss) = (report.step, report.loss);
                self.end = Some(TrialCheck { step, loss, error: 1.0, diverged: true, pruned: true });
                break;
            }
        }
        Ok(self.end)
    }

    fn check(&mut self) -> Result<TrialCheck> {
        let step = self.trainer.progress().step;
        let evaluation = match self.max_wrong {
            Some(wrong) => self.trainer.evaluate_up_to(wrong)?,
            None => self.trainer.evaluate()?,
        };
        let evaluation = evaluation.expect("a workload holds samples out");
        let diverged = !evaluation.loss.is_finite();
        let error = if diverged { 1.0 } else { evaluation.error() };
        let check = TrialCheck { step, loss: evaluation.loss, error, diverged, pruned: self.is_pruned() };
        if diverged {
            self.end = Some(check);
        }
        Ok(check)
    }

    /// Whether the network is as sparse as it will be. A method prunes before a step, so the last of it is seen
    /// one step later.
    fn is_pruned(&self) -> bool {
        let prune = self.trainer.context().plan.pruning.as_ref();
        prune.is_none_or(|prune| self.trainer.progress().step > prune.method.pruned_after(self.steps()))
    }
}

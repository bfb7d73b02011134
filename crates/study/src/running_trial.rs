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
use espalier_train::trainer::Trainer;

use crate::trial::TrialCheck;
use crate::workload::{TrialSettings, Workload};

/// A trial between its first step and its last.
#[derive(Debug)]
pub struct RunningTrial {
    trainer: Trainer,
    /// What its checkpoints are of: model and precision.
    model: String,
    precision: &'static str,
    max_wrong: Option<usize>,
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
        Ok(RunningTrial { trainer, model, precision, max_wrong, end: None })
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
        if let Some(end) = self.end {
            return Ok(end);
        }
        let (taken, steps) = (self.trainer.progress().step, self.steps());
        if step < taken || step > steps {
            let problem =
                format!("is {steps}, and {taken} steps are taken: it cannot go back to step {step}");
            return Err(Error::Conflict { field: "train.steps".into(), problem }.into());
        }
        let device = self.trainer.device().clone();
        let check = device.enter(|| self.train_to(step))?;
        if check.diverged {
            self.end = Some(check);
        }
        Ok(check)
    }

    /// The model, its masks and where it stands.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    fn train_to(&mut self, step: u64) -> Result<TrialCheck> {
        while self.trainer.progress().step < step {
            let report = self.trainer.step_queued()?;
            if !report.taken {
                let (step, loss) = (report.step, report.loss);
                return Ok(TrialCheck { step, loss, error: 1.0, diverged: true, pruned: true });
            }
        }
        let evaluation = match self.max_wrong {
            Some(wrong) => self.trainer.evaluate_up_to(wrong)?,
            None => self.trainer.evaluate()?,
        };
        let evaluation = evaluation.expect("a workload holds samples out");
        let diverged = !evaluation.loss.is_finite();
        let error = if diverged { 1.0 } else { evaluation.error() };
        let prune = self.trainer.context().plan.pruning.as_ref();
        // A method prunes before a step, so the last of it is seen one step later.
        let pruned = prune.is_none_or(|prune| step > prune.method.pruned_after(self.steps()));
        Ok(TrialCheck { step, loss: evaluation.loss, error, diverged, pruned })
    }
}

//! A run in its course: over the steps, with their evaluations, prunings and checkpoints. `start` is what is before the first, `end` what is
//! behind the last.

mod cautions;
mod end;
mod start;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use espalier_plan::{Plan, Scoring};
use tracing::info;

use super::held::HeldFolder;
use super::line::Line;
use super::metrics::Metrics;
use super::pace::Pace;
use super::sample::sample;
use super::{Claim, Observer, Outcome, announce};
use crate::checkpoint::Checkpoints;
use crate::prune::{Observation, Pruned};
use crate::summary::{Predicted, Rates, Validation};
use crate::trainer::{Evaluation, Trainer};
use crate::{Error, Result};

/// What happens before the first step where a method scores by gradients.
fn scoring_note(candidates: u64, scoring: Scoring) -> String {
    let passes = match scoring.passes {
        1 => "1 pass".into(),
        // The best are found by looking three times.
        passes => format!("{passes} passes, each run 3 times"),
    };
    format!("scoring {:.2} M weights by gradient ({passes})", candidates as f64 / 1e6)
}

/// A run between its start and its end.
pub(super) struct Run {
    /// Rank 0's, until the run has ended.
    _claim: Option<Claim>,
    pub(super) plan: Plan,
    pub(super) trainer: Trainer,
    stop: Arc<AtomicBool>,
    checkpoints: Checkpoints,
    metrics: Metrics,
    folder: PathBuf,
    /// Rank 0's, to see whether it is still there.
    held: Option<HeldFolder>,
    tokens_per_sample: Option<usize>,
    pace: Pace,
    /// Why the last checkpoint that was tried is not there.
    unsaved: Option<Error>,
    last_loss: Option<f64>,
    validation: Option<Evaluation>,
    /// What was evaluated at the last step by a process that was killed behind it.
    past_validation: Option<Validation>,
    trace: Option<PathBuf>,
    predicted: Option<Predicted>,
    begin: Instant,
    /// The tokens that it is asked to go on from; none where nobody asks.
    pub(super) prompt: Vec<u32>,
    /// The layers of which it was said that little is left.
    warned: HashSet<String>,
}

impl Run {
    pub(super) fn go(mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let timetable = self.plan.timetable;
        let steps = self.trainer.steps();
        observer.started(self.trainer.progress().step, steps);
        if let Some(text) = self.changed_by_looking() {
            observer.warning(&text);
        }
        observer.begins();
        if self.trainer.progress().evaluation_due {
            self.evaluate(observer)?;
            let interrupted = self.trainer.progress().evaluation_due;
            // Of a run that goes on the next checkpoint says that it was done.
            let over = self.trainer.progress().step >= steps;
            sample(&self.trainer, &self.plan, &self.prompt, over, observer)?;
            if over && !interrupted && self.plan.timetable.checkpoint.last {
                self.save(observer)?;
            }
            if interrupted {
                return self.end(true, observer);
            }
        }
        while self.trainer.progress().step < steps {
            if let Some(scoring) = self.trainer.scores_next()? {
                observer.note(&scoring_note(self.trainer.kept().1, scoring));
            }
            let report = self.trainer.step()?;
            let step = report.step;
            match (&report.seen, &report.pruned) {
                (None, None) => self.pace.add(report.seconds),
                // Its time is not that of a step.
                (Some(seen), _) => self.looked(step, seen, observer),
                (_, Some(pruned)) => self.pruned(step, pruned, observer),
            }
            if report.taken {
                self.last_loss = Some(report.loss);
            } else {
                observer.warning(&format!(
                    "step {step} was skipped: loss {}, gradient norm {}",
                    report.loss, report.grad_norm
                ));
            }
            // What one rank alone has counted, the others hear of when they are together, or the pipeline is empty: then all
            // of them end.
            let bad_steps = self.trainer.progress().bad_steps;
            let all_know = self.trainer.is_together() && self.trainer.is_at_rest();
            if bad_steps >= self.plan.optimization.max_bad_steps && all_know {
                return Err(Error::Diverged { step, bad_steps, loss: report.loss });
            }
            let peak = self.trainer.device().ledger().total_peak();
            observer.step(&report, self.recent_rates(), peak);
            let last = step == steps;
            if step.is_multiple_of(timetable.log_every) || last || !report.taken {
                self.check_folder()?;
                let line = Line::of_step(&report, self.recent_rates(), self.begin.elapsed().as_secs_f64());
                self.metrics.line(&line, observer);
            }
            // An asynchronous pipeline that is not empty goes on: it will be, before anything is due.
            if !self.trainer.is_at_rest() {
                continue;
            }
            if last || timetable.evaluates(step) {
                self.evaluate(observer)?;
                sample(&self.trainer, &self.plan, &self.prompt, last, observer)?;
            }
            // Ranks that have gone apart stop when they are together again: so the run goes on as if it had not stopped.
            let interrupted = (self.trainer.is_to_stop() && !last) || self.trainer.progress().evaluation_due;
            // While steps are being skipped a checkpoint would say nothing new, and push out one from before.
            let due = timetable.saves(step) && !self.any(self.trainer.progress().bad_steps > 0)?;
            if interrupted || due || (last && self.plan.timetable.checkpoint.last) {
                self.save(observer)?;
            }
            if interrupted {
                return self.end(true, observer);
            }
        }
        if let Some(text) = self.short_of_its_sparsity() {
            observer.warning(&text);
        }
        if !self.plan.timetable.checkpoint.last || self.unsaved.is_some() {
            self.refuse_not_finite()?;
        }
        self.end(false, observer)
    }

    /// Evaluates, unless the run is to stop: then the evaluation stays due, and is done when the run goes on.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let step = self.trainer.progress().step;
        info!("evaluates after step {step}");
        self.validation = self.trainer.evaluate_unless(&|| self.stop.load(Ordering::Relaxed))?;
        let Some(evaluation) = self.validation else { return Ok(()) };
        observer.evaluated(step, evaluation);
        let time = self.begin.elapsed().as_secs_f64();
        let line = Line::of_evaluation(step, self.validation(), time);
        self.metrics.line(&line, observer);
        match evaluation.loss.is_finite() {
            true => Ok(()),
            false => Err(Error::NotFinite { step, what: "the validation loss".into() }),
        }
    }

    /// Saves, and removes what is too old. A disk that is full is told and no reason to stop: it may have room the next time.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        info!("begins the checkpoint after step {}", self.trainer.progress().step);
        self.check_folder()?;
        self.metrics.sync(observer);
        match self.trainer.save(&self.checkpoints) {
            Ok(path) => {
                self.unsaved = None;
                observer.saved(&path);
                let progress = self.trainer.progress();
                // Those from before the bad steps may be needed.
                if self.leads() && progress.bad_steps == 0 {
                    self.checkpoints.remove_old(progress.step, |problem| observer.warning(problem));
                }
            }
            Err(error @ Error::Disk { .. }) => {
                observer
                    .warning(&format!("{error}; the run continues without it, and earlier checkpoints stay"));
                self.unsaved = Some(error);
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Where lines go, if anywhere.
    pub(super) fn metrics_path(&self) -> Option<PathBuf> {
        self.metrics.is_open().then(|| self.folder.join("metrics.jsonl"))
    }

    /// An error where the run folder is not the one that the run began in.
    fn check_folder(&self) -> Result<()> {
        self.held.as_ref().map_or(Ok(()), HeldFolder::check)
    }

    fn leads(&self) -> bool {
        self.trainer.ranks().leads()
    }

    /// Whether any rank says so: all must do the same after the same step.
    fn any(&self, flag: bool) -> Result<bool> {
        self.trainer.ranks().any(flag)
    }

    fn looked(&mut self, step: u64, seen: &Observation, observer: &mut dyn Observer) {
        observer.looked(step, seen);
        self.metrics.line(&Line::of_look(step, seen), observer);
    }

    fn pruned(&mut self, step: u64, pruned: &Pruned, observer: &mut dyn Observer) {
        announce(observer, step, pruned, &mut self.warned);
        self.metrics.line(&Line::of_pruned(step, pruned), observer);
    }

    fn recent_rates(&self) -> Rates {
        Rates::from_steps(self.pace.last(20), self.plan.batch.samples, self.tokens_per_sample)
    }
}

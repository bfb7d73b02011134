//! A run in its course: over the steps, with their evaluations, prunings and checkpoints. `start` is what is
//! before the first, `end` what is behind the last.

mod end;
mod start;
mod warnings;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use espalier_plan::{Plan, Scoring};
use tracing::info;

use super::folder_handle::FolderHandle;
use super::metric_record::{EvaluationRecord, MetricRecord, ObservationRecord, PruneRecord};
use super::metrics::MetricsFile;
use super::sample::sample;
use super::step_timer::StepTimer;
use super::{FolderLock, Observer, RunOutcome, announce};
use crate::checkpoint::Checkpoints;
use crate::prune::{Observation, PruneReport};
use crate::summary::{PredictedStep, Throughput, Validation};
use crate::trainer::{Evaluation, Trainer};
use crate::{Error, Result};

/// What happens before the first step where a method scores by gradients.
fn scoring_note(candidates: u64, scoring: Scoring) -> String {
    let passes = match scoring.passes {
        1 => "1 pass".into(),
        // The best are found in three passes over the scores.
        passes => format!("{passes} passes, each run 3 times"),
    };
    format!("scoring {:.2} M weights by gradient ({passes})", candidates as f64 / 1e6)
}

/// A run between its start and its end.
pub(super) struct Run {
    /// Rank 0's, until the run has ended.
    _folder_lock: Option<FolderLock>,
    pub(super) plan: Plan,
    pub(super) trainer: Trainer,
    stop: Arc<AtomicBool>,
    checkpoints: Checkpoints,
    metrics: MetricsFile,
    folder: PathBuf,
    /// Rank 0's, to see whether it is still there.
    folder_handle: Option<FolderHandle>,
    tokens_per_sample: Option<usize>,
    step_timer: StepTimer,
    /// Why the last checkpoint that was tried is not there.
    unsaved: Option<Error>,
    last_loss: Option<f64>,
    validation: Option<Evaluation>,
    /// What was evaluated at the last step by a process that was killed behind it.
    past_validation: Option<Validation>,
    trace: Option<PathBuf>,
    predicted: Option<PredictedStep>,
    /// When its weights began to be initialized.
    begin: Instant,
    /// Seconds until the first step of this process was over.
    first_step_end: Option<f64>,
    /// The tokens of the prompt of its samples; none where it generates none.
    pub(super) prompt: Vec<u32>,
    /// The layers of which a warning said that little is left.
    warned: HashSet<String>,
}

impl Run {
    pub(super) fn run_to_end(mut self, observer: &mut dyn Observer) -> Result<RunOutcome> {
        let intervals = self.plan.intervals;
        let steps = self.trainer.steps();
        observer.started(self.trainer.progress().step, steps);
        if let Some(text) = self.drains_change_training() {
            observer.warning(&text);
        }
        observer.begins();
        if self.trainer.progress().evaluation_due {
            self.evaluate(observer)?;
            let interrupted = self.trainer.progress().evaluation_due;
            // Of a run that goes on the next checkpoint says that it was done.
            let over = self.trainer.progress().step >= steps;
            sample(&self.trainer, &self.plan, &self.prompt, over, observer)?;
            if over && !interrupted && self.plan.intervals.checkpoint.last {
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
            self.first_step_end.get_or_insert_with(|| self.begin.elapsed().as_secs_f64());
            let step = report.step;
            match (&report.observation, &report.pruned) {
                (None, None) => self.step_timer.add(report.seconds),
                // Its time is not that of a step.
                (Some(observation), _) => self.observed(step, observation, observer),
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
            // What one rank alone has counted, the others learn when they are together, or the pipeline is
            // empty: then all of them end.
            let bad_steps = self.trainer.progress().bad_steps;
            let all_know = self.trainer.is_in_sync() && self.trainer.is_idle();
            if bad_steps >= self.plan.optimization.max_bad_steps && all_know {
                return Err(Error::Diverged { step, bad_steps, loss: report.loss });
            }
            let peak = self.trainer.device().ledger().total_peak();
            observer.step(&report, self.recent_rates(), peak);
            let last = step == steps;
            if step.is_multiple_of(intervals.log_every) || last || !report.taken {
                self.check_folder()?;
                let line =
                    MetricRecord::of_step(&report, self.recent_rates(), self.begin.elapsed().as_secs_f64());
                self.metrics.write(&line, observer);
            }
            // An asynchronous pipeline that is not empty goes on: it will be, before anything is due.
            if !self.trainer.is_idle() {
                continue;
            }
            if last || intervals.evaluates(step) {
                self.evaluate(observer)?;
                sample(&self.trainer, &self.plan, &self.prompt, last, observer)?;
            }
            // Ranks that have gone apart stop when they are together again: so the run goes on as if it had
            // not stopped.
            let interrupted = (self.trainer.should_stop() && !last) || self.trainer.progress().evaluation_due;
            // While steps are being skipped a checkpoint would say nothing new, and push out one from before.
            let due = intervals.saves(step) && !self.any(self.trainer.progress().bad_steps > 0)?;
            if interrupted || due || (last && self.plan.intervals.checkpoint.last) {
                self.save(observer)?;
            }
            if interrupted {
                return self.end(true, observer);
            }
        }
        if let Some(text) = self.short_of_its_sparsity() {
            observer.warning(&text);
        }
        if !self.plan.intervals.checkpoint.last || self.unsaved.is_some() {
            self.refuse_not_finite()?;
        }
        self.end(false, observer)
    }

    /// Evaluates, unless the run is to stop: then the evaluation stays due, and is done when the run goes on.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let step = self.trainer.progress().step;
        info!("evaluates after step {step}");
        self.validation = self.trainer.evaluate_unless_stopped(&|| self.stop.load(Ordering::Relaxed))?;
        let Some(evaluation) = self.validation else { return Ok(()) };
        observer.evaluated(step, evaluation);
        let time = self.begin.elapsed().as_secs_f64();
        let validation = self.validation();
        let line = MetricRecord::Evaluation(EvaluationRecord { step, validation, time });
        self.metrics.write(&line, observer);
        match evaluation.loss.is_finite() {
            true => Ok(()),
            false => Err(Error::NotFinite { step, what: "the validation loss".into() }),
        }
    }

    /// Saves, and removes what is too old. A full disk is reported and no reason to stop: it may have
    /// space the next time.
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
                if self.is_rank0() && progress.bad_steps == 0 {
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
        self.folder_handle.as_ref().map_or(Ok(()), FolderHandle::check)
    }

    fn is_rank0(&self) -> bool {
        self.trainer.ranks().is_rank0()
    }

    /// Whether any rank says so: all must do the same after the same step.
    fn any(&self, flag: bool) -> Result<bool> {
        self.trainer.ranks().any_rank(flag)
    }

    fn observed(&mut self, step: u64, observation: &Observation, observer: &mut dyn Observer) {
        observer.observed(step, observation);
        let line = ObservationRecord { step, pruner: observation.clone() };
        self.metrics.write(&MetricRecord::Observed(line), observer);
    }

    fn pruned(&mut self, step: u64, pruned: &PruneReport, observer: &mut dyn Observer) {
        announce(observer, step, pruned, &mut self.warned);
        let line = PruneRecord { step, pruned: pruned.clone() };
        self.metrics.write(&MetricRecord::Pruned(line), observer);
    }

    fn recent_rates(&self) -> Throughput {
        Throughput::from_steps(self.step_timer.last(20), self.plan.batch.samples, self.tokens_per_sample)
    }
}

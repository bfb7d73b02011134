//! A run in its course: from the folder and the fresh or restored weights, over the steps with their evaluations, prunings and
//! checkpoints, to the summary.

mod cautions;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use espalier_comm::Traffic;
use espalier_data::{Dataset, Fingerprint, Split};
use espalier_nn::weights::hash_of;
use espalier_plan::pruning::Pruning;
use espalier_plan::spec::Input;
use espalier_plan::{Plan, Scoring};
use espalier_tensor::{Category, Device};
use tracing::info;

use super::back::{resume, set_aside};
use super::held::HeldFolder;
use super::line::Line;
use super::metrics::{Metrics, Past};
use super::pace::Pace;
use super::sample;
use super::start_point::{START_FILE, StartPoint};
use super::trace::{Event, TraceFile, may_replace};
use super::unlikely::unlikely;
use super::{
    Claim, Observer, Outcome, Resumed, RunDir, SUMMARY_FILE, announce, checkpoints_of, nothing_to_do, write,
};
use crate::checkpoint::{Checkpoints, first_not_finite};
use crate::parallel::{Ranks, exchange, together};
use crate::prune::{Observation, Pruned};
use crate::resolved::DATA_FILE;
use crate::resolved::write_resolved;
use crate::summary::{Predicted, Rates, Summary, Validation};
use crate::trainer::{Evaluation, Trainer};
use crate::{Error, Result, durable, hub};

/// From so many weights on, making them takes long enough that a person should know.
const MANY: u64 = 1_000_000_000;

/// What happens before the first step where a method scores by gradients.
fn scoring_note(candidates: u64, scoring: Scoring) -> String {
    let passes = match scoring.passes {
        1 => "at once".into(),
        // The best are found by looking three times.
        passes => format!("in {passes} parts, each made three times"),
    };
    format!("scoring {:.3} million weights by their gradients, {passes}", candidates as f64 / 1e6)
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
    pub(super) fn start(
        plan: Plan,
        dataset: Arc<Dataset>,
        device: &Device,
        place: &RunDir,
        ranks: Ranks,
        stop: &Arc<AtomicBool>,
        observer: &mut dyn Observer,
    ) -> Result<Run> {
        let leads = ranks.leads();
        let claim = (leads && !place.claimed).then(|| place.claim()).transpose()?;
        let mut folder = claim.as_ref().map_or(place.folder.clone(), |claim| claim.folder().to_owned());
        if !ranks.is_alone() {
            // It is rank 0 that knows where a numbered one is, or one that its supervisor has claimed.
            let said = exchange(ranks.world(), folder.as_os_str().as_bytes())?;
            folder = OsStr::from_bytes(&said[0]).into();
        }
        let held = leads.then(|| HeldFolder::open(&folder)).transpose();
        let held = held.map_err(|why| Error::unread(&folder, why))?;
        if claim.as_ref().is_some_and(|claim| claim.lock().is_none()) {
            observer.warning(&format!(
                "the file system of {} has no locks: nothing keeps another process out of this run",
                folder.display()
            ));
        }
        if let Some(path) = place.trace.as_ref().filter(|_| leads) {
            // Not after hours of training.
            may_replace(path).map_err(|why| Error::file(path, why))?;
            File::options()
                .append(true)
                .create(true)
                .open(path)
                .map_err(|why| Error::of_io(path, &why, format!("the trace cannot be written: {why}")))?;
        }
        let data = if leads { Fingerprint::of(&plan.data)? } else { None };
        let resumed = match leads && place.resume && !place.fresh {
            true => Some(Resumed::compare(&folder, plan.record(), data.as_ref(), &place.allow, observer)?),
            false => None,
        };
        let samples = dataset.len(Split::Train);
        unlikely(&plan, samples).iter().for_each(|text| observer.warning(text));
        let prompt = sample::prompt(&plan, &dataset)?.unwrap_or_default();
        let mut checkpoints = checkpoints_of(&plan, &folder);
        if plan.parameters >= MANY {
            observer.note(&format!("making {:.1} billion weights", plan.parameters as f64 / 1e9));
        }
        info!("makes its weights, of {} in all", plan.parameters);
        let mut trainer = Trainer::among(plan.clone(), dataset.clone(), device, ranks)?;
        trainer.listen_to(stop.clone());
        info!("its weights are made");
        let mut goes_on = false;
        if place.resume && !place.fresh {
            goes_on = resume(&mut trainer, &checkpoints, &folder, observer)?;
            if let Some(wanted) = plan.pruning.as_ref().and_then(Pruning::share_of_weights)
                && trainer.is_pruned_beyond(wanted)
            {
                observer.warning(&format!(
                    "the checkpoint is pruned to {:.4} already, and `prune.sparsity` = {wanted} brings nothing back",
                    trainer.sparsity()
                ));
            }
        }
        let start = StartPoint::start(&mut trainer, &plan, place, &folder, goes_on, observer)?;
        if leads {
            let before = start.as_ref().map(|(path, _)| path.clone()).or(checkpoints.list()?.pop());
            checkpoints = checkpoints.beside(hub::companions(&plan, &dataset, before.as_deref())?);
        }
        if !trainer.ranks().is_alone() {
            let (step, weights) = (trainer.progress().step, trainer.params().hash()?);
            let ranks = trainer.ranks();
            ranks.agree(
                "weights at the start",
                &format!("{step} {weights} {}", trainer.params().mask_hash()?),
            )?;
        }
        if place.trace.is_some() {
            // The clocks of all ranks begin when the last has come.
            trainer.ranks().world().barrier()?;
            trainer.trace_since(Instant::now());
        }
        let (mut metrics, mut past) = (Metrics::default(), Past::default());
        let (done, steps) = (trainer.progress().step, trainer.steps());
        if steps == 0 && !goes_on {
            // What a run of no steps is for: to say how well that does which it starts from.
            trainer.evaluate_first();
        }
        let is_over = place.resume && done >= steps && !trainer.progress().evaluation_due;
        // A process that was killed behind the last checkpoint has left the rest of its end to this one.
        let began = if leads { StartPoint::read(&folder)?.map_or(0, |start| start.step()) } else { 0 };
        // One that only pruned has neither lines nor an end to write down.
        let has_trained = done > began && folder.join("metrics.jsonl").exists();
        let finishes =
            is_over && leads && done == steps && has_trained && !folder.join(SUMMARY_FILE).exists();
        let nothing_left = is_over && !finishes;
        if nothing_left {
            observer.note(&nothing_to_do(&plan, done, steps));
        }
        // A run of which nothing is left to do stays what it was.
        if leads && !nothing_left {
            info!("writes into {}", folder.display());
            held.as_ref().map_or(Ok(()), HeldFolder::check)?;
            if place.fresh {
                set_aside(&folder, observer)?;
            }
            match &start {
                Some((_, start)) => start.write(&folder)?,
                // Of somebody who did not come as far as a run.
                None if !place.resume => drop(fs::remove_file(folder.join(START_FILE))),
                None => {}
            }
            let text = plan.record().to_toml()?;
            let data = data.map(|data| data.to_json());
            if let Some(resumed) = &resumed {
                resumed.note_length(plan.record(), done, samples, observer);
                resumed.keep(&folder, done, &text, data.as_deref())?;
            }
            // What it came to is known again at its end.
            let _ = fs::remove_file(folder.join(SUMMARY_FILE));
            write_resolved(&folder, &text)?;
            if let Some(data) = &data {
                write(&folder, DATA_FILE, data)?;
            }
            write(&folder, "plan.json", &serde_json::to_string_pretty(&plan).expect("a plan is plain data"))?;
            let path = folder.join("metrics.jsonl");
            (metrics, past) = Metrics::open(&path, done)?;
            let every = resumed.as_ref().map_or(1, Resumed::log_every).max(plan.timetable.log_every);
            past.tell(&path, [began, done], every, observer);
        }
        if finishes {
            observer.note(&format!(
                "all {steps} steps are done, and the run was stopped before its end was written down: that is done now"
            ));
            checkpoints.remove_old(done, |problem| observer.warning(problem));
        }
        if is_over && leads {
            // As a disk leaves it that failed for a moment. What cannot be removed is not in the way.
            let _ = checkpoints.remove_leftovers();
        }
        let tokens_per_sample = match plan.model.input {
            Input::Tokens { seq, .. } => Some(seq),
            Input::Image { .. } => None,
        };
        Ok(Run {
            _claim: claim,
            plan,
            trainer,
            stop: stop.clone(),
            checkpoints,
            metrics,
            folder,
            held,
            tokens_per_sample,
            pace: Pace::default(),
            unsaved: None,
            last_loss: past.loss.filter(|_| finishes),
            validation: None,
            past_validation: past
                .validation
                .filter(|(step, _)| finishes && *step == done)
                .map(|(_, found)| found),
            trace: place.trace.clone(),
            predicted: place.predicted.clone(),
            begin: Instant::now(),
            prompt,
            warned: HashSet::new(),
        })
    }

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
            self.sample(over, observer)?;
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
                self.sample(last, observer)?;
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
                observer.warning(&format!("{error}; the run goes on without it, and those before it stay"));
                self.unsaved = Some(error);
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// The end of a run, at its last step or before.
    fn end(mut self, interrupted: bool, observer: &mut dyn Observer) -> Result<Outcome> {
        self.write_trace()?;
        // A rank that does not lead has no file, and a run of which nothing was left to do has none either.
        let writes = self.metrics.is_open();
        self.check_folder()?;
        self.metrics.sync(observer);
        self.metrics.close(observer);
        if let Some(error) = self.unsaved.take() {
            return Err(error);
        }
        let summary = self.summary()?;
        if writes {
            let text = serde_json::to_string_pretty(&summary).expect("a summary is plain data");
            if let Err(error) = write(&self.folder, SUMMARY_FILE, &text) {
                observer.warning(&error.to_string());
            }
        }
        Ok(Outcome { summary, interrupted })
    }

    /// An error where a weight is not finite: what is saved was looked at when it was.
    fn refuse_not_finite(&self) -> Result<()> {
        let find = || first_not_finite(self.trainer.params()).map_err(|why| why.to_string());
        let found = together(self.trainer.ranks(), find)?;
        let found = found.map_err(|why| Error::RankEnded { rank: 0, how: "failed", why })?;
        match found.into_iter().flatten().next() {
            Some(what) => Err(Error::NotFinite { step: self.trainer.progress().step, what }),
            None => Ok(()),
        }
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

    /// Writes what all ranks did when, where that is wanted.
    fn write_trace(&self) -> Result<()> {
        let (Some(path), Some(trace)) = (&self.trace, self.trainer.trace()) else { return Ok(()) };
        let ranks = self.trainer.ranks();
        let events = |(number, span)| Event::of(ranks.rank(), number, span);
        let own = || Ok(trace.spans.iter().enumerate().flat_map(events).collect());
        let file = TraceFile::new(together(ranks, own)?.expect("no rank can fail at it"));
        if self.leads() {
            let text = serde_json::to_string(&file).expect("a trace is plain data");
            durable::replace(path, text.as_bytes()).map_err(|why| Error::unwritten(path, why))?;
        }
        Ok(())
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

    fn validation(&self) -> Validation {
        if let Some(past) = self.past_validation.as_ref().filter(|_| self.validation.is_none()) {
            return past.clone();
        }
        Validation::new(
            self.validation,
            self.trainer.progress().best_validation,
            self.tokens_per_sample.is_some(),
        )
    }

    fn recent_rates(&self) -> Rates {
        Rates::from_steps(self.pace.last(20), self.plan.batch.samples, self.tokens_per_sample)
    }

    /// What the run came to; bytes are the largest over ranks.
    fn summary(&self) -> Result<Summary> {
        let device = self.trainer.device();
        let ledger = device.ledger();
        let sent = Traffic::ALL.map(|traffic| self.trainer.sent().of(traffic));
        let peaks = Category::ALL.map(|category| ledger.peak(category) as u64);
        let totals = [ledger, device.host_ledger()].map(|ledger| ledger.total_peak() as u64);
        let bytes = [&totals[..], &sent[..], &peaks[..]].concat();
        let (ranks, peers) = (self.trainer.ranks(), self.trainer.peers());
        let digests = self.trainer.params().digests(|param| peers.digest(param.id(), param.weight()))?;
        ranks.agree("weights at the end", &hash_of(&digests))?;
        let bytes = ranks.largest(bytes)?;
        let hash = hash_of(&ranks.of_replica(digests)?);
        let (sent, peaks) = bytes[totals.len()..].split_at(sent.len());
        let rates =
            Rates::from_steps(self.pace.last(usize::MAX), self.plan.batch.samples, self.tokens_per_sample);
        let mut summary = Summary::planned(&self.plan, device.name());
        summary.scored(self.trainer.scoring());
        summary.steps = self.trainer.progress().step;
        summary.loss = self.last_loss;
        summary.validation = self.validation();
        summary.rate(rates);
        summary.predicted = self.predicted.clone();
        summary.pruned(&self.trainer, self.trainer.state_bytes()?);
        for (category, peak) in Category::ALL.into_iter().zip(peaks) {
            summary.measured(category, *peak as usize);
        }
        summary.peak_bytes = Some(bytes[0] as usize);
        summary.host_peak_bytes = matches!(device, Device::Cuda(_)).then_some(bytes[1] as usize);
        let names = Traffic::ALL.map(|traffic| traffic.name().to_owned());
        summary.bytes_sent = names.into_iter().zip(sent.iter().copied()).collect();
        summary.seconds = Some(self.begin.elapsed().as_secs_f64());
        summary.weights_hash = Some(hash);
        summary.run = Some(self.folder.display().to_string());
        Ok(summary)
    }
}

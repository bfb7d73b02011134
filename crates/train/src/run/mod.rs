//! A whole run: the folder it leaves, the loop over steps, and the summary at its end.
//!
//! ```text
//! run.toml  plan.json  metrics.jsonl  checkpoints/  .lock
//! ```
//!
//! The loop talks to an [`Observer`], so that the binary can draw a progress bar and a test can listen. Of several ranks
//! all go through the same loop; rank 0 alone writes and talks.

mod check;
mod claim;
mod metrics;
mod pace;
mod prune;
mod resumed;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use espalier_comm::Traffic;
use espalier_plan::Plan;
use espalier_plan::config::{Length, Method, Prune};
use espalier_plan::mesh::Mesh;
use espalier_plan::spec::Input;
use espalier_tensor::{Category, Device};
use serde_json::json;

use crate::checkpoint::{self, Checkpoints, Whole};
use crate::data::{Dataset, Split};
use crate::parallel::launched::Join;
use crate::parallel::{GiveUp, Ranks, exchange, on_threads_within, together};
use crate::prune::Observation;
use crate::step::{Trace, chrome, may_replace};
use crate::summary::{Rates, Summary, Validation};
use crate::trainer::{Evaluation, Pruned, StepReport, Trainer};
use crate::weights::hash_of;
use crate::{Error, Result, durable};
pub use check::check;
pub use claim::Claim;
use metrics::Metrics;
use pace::Pace;
pub use prune::prune;
pub use resumed::Resumed;

/// The resolved run file in a run folder; where it is, a run is.
const RUN_FILE: &str = "run.toml";

/// Hears what happens; every method may be left out.
pub trait Observer {
    /// The run begins (or goes on) after `done` of `steps` steps.
    fn started(&mut self, _done: u64, _steps: u64) {}
    /// A step was tried. `rates` are those of the last few steps, `memory` the bytes in use at their peak.
    fn step(&mut self, _report: &StepReport, _rates: Rates, _memory: usize) {}
    /// The model was evaluated after `step` steps.
    fn evaluated(&mut self, _step: u64, _evaluation: Evaluation) {}
    /// The pruning method looked before step `step` and pruned nothing yet.
    fn looked(&mut self, _step: u64, _seen: &Observation) {}
    /// Weights were pruned before step `step`.
    fn pruned(&mut self, _step: u64, _pruned: &Pruned) {}
    /// A checkpoint was written.
    fn saved(&mut self, _path: &Path) {}
    /// The first step is about to be taken: until then nothing is lost where the process ends. Also heard on ranks that are
    /// processes and not the first.
    fn begins(&mut self) {}
    /// Something that is as it should be, and that one might overlook.
    fn note(&mut self, _text: &str) {}
    /// Something a person should know: a broken checkpoint that was passed over, a skipped step.
    fn warning(&mut self, _text: &str) {}
}

/// An observer that hears nothing.
impl Observer for () {}

/// What a process hears whose rank is not the first.
struct Quiet<'a>(&'a mut dyn Observer);

impl Observer for Quiet<'_> {
    fn begins(&mut self) {
        self.0.begins();
    }
}

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// What to print and to hand to programs.
    pub summary: Summary,
    /// Whether it was stopped before its last step; it has saved and can be resumed.
    pub interrupted: bool,
}

/// Where a run lives, and whether it goes on from a checkpoint there.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// The run folder.
    pub folder: PathBuf,
    /// Whether the folder is the first of `FOLDER`, `FOLDER-2`, ... that is free or, to resume, the last that is not.
    pub numbered: bool,
    /// Whether the process that started this one has claimed the folder.
    pub claimed: bool,
    /// Continue what is there; otherwise the folder must not hold a run.
    pub resume: bool,
    /// Start over in a folder that holds a run, whose checkpoints and metrics are put aside.
    pub fresh: bool,
    /// Fields, or sections, of the run file that may differ from what the run was, although that makes another run of it.
    pub allow: Vec<String>,
    /// A checkpoint whose weights and masks a new run starts from.
    pub from: Option<PathBuf>,
    /// Where to write what every rank did when.
    pub trace: Option<PathBuf>,
}

impl Place {
    /// A new run in a folder.
    pub fn at(folder: impl Into<PathBuf>) -> Place {
        Place { folder: folder.into(), ..Place::default() }
    }

    /// The run folder as far as it is known before the run begins; a new numbered one is known by its claim.
    pub fn find(&self) -> PathBuf {
        if self.numbered { Claim::last(&self.folder) } else { self.folder.clone() }
    }

    /// Claims the folder for a run that begins or goes on there.
    pub fn claim(&self) -> Result<Claim> {
        if self.numbered && !self.resume {
            return Claim::next(&self.folder);
        }
        let folder = self.find();
        if self.resume && !folder.join(RUN_FILE).exists() {
            return Err(Error::file(&folder, "there is no run here to resume (no run.toml)"));
        }
        let claim = Claim::on(&folder)?;
        if !self.resume && folder.join(RUN_FILE).exists() {
            return Err(Error::file(
                &folder,
                "a run is here already: add --resume to go on, or choose another --out",
            ));
        }
        Ok(claim)
    }
}

/// Trains to the end, or until `stop` is set: on as many ranks as the plan says, which share the threads of the device.
pub fn run(
    plan: Plan,
    dataset: Dataset,
    device: &Device,
    place: &Place,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
) -> Result<Outcome> {
    run_or_give_up(None, plan, dataset, device, place, stop, observer)
}

/// The same for a program that `give_up` ends where a rank hangs: its thread borrows all this, so there is no way back.
/// Without it, what hangs is waited for.
pub fn run_or_give_up(
    give_up: Option<GiveUp>,
    plan: Plan,
    dataset: Dataset,
    device: &Device,
    place: &Place,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
) -> Result<Outcome> {
    let dataset = Arc::new(dataset);
    if mesh_of(&plan).size() == 1 {
        return device.enter(|| Run::start(plan, dataset, device, place, None, observer)?.go(stop, observer));
    }
    let (mesh, limit) = (mesh_of(&plan), limit_of(&plan));
    // Rank 0 takes it; the others find nothing.
    let observer = Mutex::new(Some(observer));
    let outcomes = on_threads_within(limit, give_up, &mesh, device, |ranks, device| {
        let (mut quiet, mut taken) = ((), None);
        if ranks.leads() {
            taken = observer.lock().expect("only taken from").take();
        }
        let observer: &mut dyn Observer = match &mut taken {
            Some(observer) => &mut **observer,
            None => &mut quiet,
        };
        Run::start(plan.clone(), dataset.clone(), device, place, Some(ranks), observer)?.go(stop, observer)
    })?;
    Ok(outcomes.into_iter().next().expect("there is a rank 0"))
}

/// Trains as the rank that a launcher made this process, with the others that it started. Only rank 0 is heard.
pub fn run_launched(
    join: &Join,
    plan: Plan,
    dataset: Dataset,
    device: &Device,
    place: &Place,
    stop: &AtomicBool,
    observer: &mut (dyn Observer + Send),
) -> Result<Outcome> {
    let (mesh, limit) = (mesh_of(&plan), limit_of(&plan));
    device.enter(|| {
        join.run(limit, &mesh, device, |ranks| {
            let mut quiet;
            let observer: &mut dyn Observer = match ranks.leads() {
                true => observer,
                false => {
                    quiet = Quiet(observer);
                    &mut quiet
                }
            };
            Run::start(plan, Arc::new(dataset), device, place, Some(ranks), observer)?.go(stop, observer)
        })
    })
}

fn mesh_of(plan: &Plan) -> Mesh {
    Mesh::new(plan.run.parallel.extents()).expect("every axis has at least one rank")
}

/// How long a rank waits for another.
fn limit_of(plan: &Plan) -> Duration {
    Duration::from_secs(plan.run.parallel.timeout_s as u64)
}

/// Why a run that was resumed ends at once.
fn nothing_to_do(plan: &Plan, done: u64, steps: u64) -> String {
    let length = match plan.run.train.length {
        Length::Steps(_) => "train.steps",
        Length::Epochs(_) => "train.epochs",
    };
    format!(
        "there is nothing to do: {done} steps are done, and the run has {steps}; a larger `{length}` makes it go on"
    )
}

/// Tells what was pruned, and of what nothing or next to nothing is left: of each parameter once in a run.
fn announce(observer: &mut dyn Observer, step: u64, pruned: &Pruned, warned: &mut HashSet<String>) {
    observer.pruned(step, pruned);
    for name in pruned.emptied.iter().filter(|name| warned.insert(format!("nothing of {name}"))) {
        observer.warning(&format!("nothing is left of {name}: every weight was pruned"));
    }
    for layer in pruned.thin.iter().filter(|layer| warned.insert(layer.name.clone())) {
        observer.warning(&format!(
            "only {} of {} weights are left of {} ({:.2} %)",
            layer.kept,
            layer.of,
            layer.name,
            100.0 * layer.share()
        ));
    }
}

fn checkpoints_of(plan: &Plan, folder: &Path) -> Checkpoints {
    let run = &plan.run;
    let folder = folder.join("checkpoints");
    Checkpoints::new(folder, run.checkpoint.keep, &plan.model.name, run.train.precision.name())
}

struct Run {
    /// Rank 0's, until the run has ended.
    _claim: Option<Claim>,
    plan: Plan,
    trainer: Trainer,
    checkpoints: Checkpoints,
    metrics: Metrics,
    folder: PathBuf,
    tokens_per_sample: Option<usize>,
    pace: Pace,
    /// Why the last checkpoint that was tried is not there.
    unsaved: Option<Error>,
    last_loss: Option<f64>,
    validation: Option<Evaluation>,
    trace: Option<PathBuf>,
    begin: Instant,
    /// The layers of which it was said that little is left.
    warned: HashSet<String>,
}

impl Run {
    fn start(
        plan: Plan,
        dataset: Arc<Dataset>,
        device: &Device,
        place: &Place,
        ranks: Option<Ranks>,
        observer: &mut dyn Observer,
    ) -> Result<Run> {
        let leads = ranks.as_ref().is_none_or(Ranks::leads);
        let claim = (leads && !place.claimed).then(|| place.claim()).transpose()?;
        let mut folder = claim.as_ref().map_or(place.folder.clone(), |claim| claim.folder().to_owned());
        if let Some(ranks) = ranks.as_ref().filter(|_| place.numbered) {
            // It is rank 0 that knows the number.
            let said = exchange(ranks.world(), folder.as_os_str().as_bytes())?;
            folder = OsStr::from_bytes(&said[0]).into();
        }
        if claim.as_ref().is_some_and(|claim| claim.lock().is_none()) {
            observer.warning(&format!(
                "the file system of {} has no locks: nothing keeps another process out of this run",
                folder.display()
            ));
        }
        if let Some(path) = place.trace.as_ref().filter(|_| leads) {
            // Not after hours of training.
            may_replace(path).map_err(|why| Error::file(path, why))?;
            File::create(path)
                .map_err(|why| Error::file(path, format!("the trace cannot be written: {why}")))?;
        }
        let resumed = match leads && place.resume && !place.fresh {
            true => Some(Resumed::compare(&folder, &plan.run, &place.allow, observer)?),
            false => None,
        };
        let samples = dataset.len(Split::Train);
        let checkpoints = checkpoints_of(&plan, &folder);
        let mut trainer = Trainer::among(plan.clone(), dataset, device, ranks)?;
        if place.resume && !place.fresh {
            resume(&mut trainer, &checkpoints, &folder, observer)?;
            if let Some(wanted) = plan.run.prune.as_ref().and_then(Prune::share_of_weights)
                && trainer.is_pruned_beyond(wanted)
            {
                observer.warning(&format!(
                    "the checkpoint is pruned to {:.4} already, and `prune.sparsity` = {wanted} brings nothing back",
                    trainer.sparsity()
                ));
            }
        }
        if let Some(from) = place.from.as_ref().filter(|_| !place.resume) {
            let passed_over =
                |broken: &Error| observer.warning(&format!("{broken}; the one before it is used"));
            trainer.start_from(&Whole::find(from, trainer.ranks(), passed_over)?)?;
        }
        if let Some(ranks) = trainer.ranks() {
            let (step, weights) = (trainer.progress().step, trainer.weights().hash()?);
            ranks.agree("weights at the start", &format!("{step} {weights} {}", trainer.masks().hash()?))?;
        }
        if place.trace.is_some() {
            // The clocks of all ranks begin when the last has come.
            trainer.ranks().map_or(Ok(()), |ranks| ranks.world().barrier())?;
            trainer.trace_since(Instant::now());
        }
        let mut metrics = Metrics::default();
        let (done, steps) = (trainer.progress().step, trainer.steps());
        let nothing_left = place.resume && done >= steps;
        if nothing_left {
            observer.note(&nothing_to_do(&plan, done, steps));
        }
        // A run of which nothing is left to do stays what it was.
        if leads && !nothing_left {
            if place.fresh {
                set_aside(&folder, observer)?;
            }
            let text = plan.run.to_toml()?;
            if let Some(resumed) = &resumed {
                resumed.note_length(&plan.run, done, samples, observer);
                resumed.keep(&folder, done, &text)?;
            }
            write(&folder, RUN_FILE, &text)?;
            write(&folder, "plan.json", &serde_json::to_string_pretty(&plan).expect("a plan is plain data"))?;
            metrics = Metrics::open(&folder.join("metrics.jsonl"), trainer.progress().step)?;
        }
        let tokens_per_sample = match plan.model.input {
            Input::Tokens { seq, .. } => Some(seq),
            Input::Image { .. } => None,
        };
        Ok(Run {
            _claim: claim,
            plan,
            trainer,
            checkpoints,
            metrics,
            folder,
            tokens_per_sample,
            pace: Pace::default(),
            unsaved: None,
            last_loss: None,
            validation: None,
            trace: place.trace.clone(),
            begin: Instant::now(),
            warned: HashSet::new(),
        })
    }

    fn go(mut self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Outcome> {
        let train = self.plan.run.train.clone();
        let every = self.plan.run.checkpoint.every;
        let steps = self.trainer.steps();
        observer.started(self.trainer.progress().step, steps);
        if let Some(text) = self.changed_by_looking() {
            observer.warning(&text);
        }
        observer.begins();
        while self.trainer.progress().step < steps {
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
            if bad_steps >= train.max_bad_steps as u64 && all_know {
                return Err(Error::Diverged { step, bad_steps, loss: report.loss });
            }
            let peak = self.trainer.device().ledger().total_peak();
            observer.step(&report, self.recent_rates(), peak);
            let last = step == steps;
            if step.is_multiple_of(train.log_every as u64) || last || !report.taken {
                let line = metrics::of_step(&report, self.recent_rates(), self.begin.elapsed().as_secs_f64());
                self.metrics.line(line, observer);
            }
            // An asynchronous pipeline that is not empty goes on: it will be, before anything is due.
            if !self.trainer.is_at_rest() {
                continue;
            }
            if last || (train.eval_every > 0 && step.is_multiple_of(train.eval_every as u64)) {
                self.validation = self.trainer.evaluate()?;
                if let Some(evaluation) = self.validation {
                    observer.evaluated(step, evaluation);
                    let time = self.begin.elapsed().as_secs_f64();
                    self.metrics.line(metrics::of_evaluation(step, &self.validation(), time), observer);
                    if !evaluation.loss.is_finite() {
                        return Err(Error::NotFinite { step, what: "the validation loss".into() });
                    }
                }
            }
            // Ranks that have gone apart stop when they are together again: so the run goes on as if it had not stopped.
            // Until then nobody asks the others: a local step sends nothing.
            let stopped = self.trainer.is_together() && self.any(stop.load(Ordering::Relaxed))?;
            let interrupted = stopped && !last;
            // While steps are being skipped a checkpoint would say nothing new, and push out one from before.
            let due = every > 0
                && step.is_multiple_of(every as u64)
                && !self.any(self.trainer.progress().bad_steps > 0)?;
            if interrupted || due || (last && self.plan.run.checkpoint.last) {
                self.save(observer)?;
            }
            if interrupted {
                return self.end(true, observer);
            }
        }
        if let Some(text) = self.short_of_its_sparsity() {
            observer.warning(&text);
        }
        if !self.plan.run.checkpoint.last || self.unsaved.is_some() {
            self.refuse_not_finite()?;
        }
        self.end(false, observer)
    }

    /// Saves, and removes what is too old. A disk that is full is told and no reason to stop: it may have room the next time.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
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
        self.metrics.close(observer);
        match self.unsaved.take() {
            Some(error) => Err(error),
            None => Ok(Outcome { summary: self.summary()?, interrupted }),
        }
    }

    /// An error where a weight is not finite: what is saved was looked at when it was.
    fn refuse_not_finite(&self) -> Result<()> {
        let find = || self.trainer.weights().first_not_finite().map_err(|why| why.to_string());
        let found = together(self.trainer.ranks(), find)?;
        let found = found.map_err(|why| Error::RankEnded { rank: 0, how: "failed", why })?;
        match found.into_iter().flatten().next() {
            Some(what) => Err(Error::NotFinite { step: self.trainer.progress().step, what }),
            None => Ok(()),
        }
    }

    fn leads(&self) -> bool {
        self.trainer.ranks().is_none_or(Ranks::leads)
    }

    /// Where evaluating or saving is part of what is trained, since a pipeline that never flushes runs empty for it.
    fn changed_by_looking(&self) -> Option<String> {
        let (run, steps) = (&self.plan.run, self.trainer.steps());
        let pipeline = run.parallel.pipeline.as_ref().filter(|pipeline| pipeline.is_asynchronous())?;
        let every = [("train.eval_every", run.train.eval_every), ("checkpoint.every", run.checkpoint.every)];
        let within = every.into_iter().filter(|(_, every)| (1..steps).contains(&(*every as u64)));
        let fields: Vec<String> = within.map(|(field, every)| format!("`{field}` = {every}")).collect();
        (!fields.is_empty()).then(|| {
            format!(
                "with \"{}\" the pipeline runs empty wherever the run is evaluated or saved, and the batches behind start on \
                 newer weights: {} changes what is trained",
                pipeline.name(),
                fields.join(" or ")
            )
        })
    }

    /// Where the run ended before its method had pruned as much as it should.
    fn short_of_its_sparsity(&self) -> Option<String> {
        let prune = self.plan.run.prune.as_ref().filter(|prune| prune.sparsity > 0.0)?;
        let ((kept, all), steps) = (self.trainer.kept(), self.trainer.steps());
        if kept == all {
            return Some(format!("nothing was pruned: {steps} steps are too few for {}", prune.name()));
        }
        // The others draw once, and then all of it.
        let is_gradual = matches!(prune.method, Method::Gradual { .. });
        let (reached, wanted) = (self.trainer.sparsity(), prune.sparsity);
        (is_gradual && reached + 0.5 / all as f64 + 1e-3 < wanted).then(|| {
            format!("{steps} steps were too few: pruned to {reached:.4}, and `prune.sparsity` is {wanted}")
        })
    }

    /// Writes what all ranks did when, where that is wanted.
    fn write_trace(&self) -> Result<()> {
        let (Some(path), Some(trace)) = (&self.trace, self.trainer.trace()) else { return Ok(()) };
        let ranks = match self.trainer.ranks() {
            None => vec![trace.spans.clone()],
            Some(ranks) => {
                let numbers: Vec<u8> = trace.to_numbers().into_iter().flat_map(f64::to_le_bytes).collect();
                let read = |bytes: Vec<u8>| -> Vec<f64> {
                    bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
                };
                exchange(ranks.world(), &numbers)?
                    .into_iter()
                    .map(|bytes| Trace::from_numbers(&read(bytes)))
                    .collect()
            }
        };
        if self.leads() {
            fs::write(path, chrome(&ranks).to_string()).map_err(|why| Error::unwritten(path, why))?;
        }
        Ok(())
    }

    /// Whether any rank says so: all must do the same after the same step.
    fn any(&self, flag: bool) -> Result<bool> {
        self.trainer.ranks().map_or(Ok(flag), |ranks| ranks.any(flag))
    }

    fn looked(&mut self, step: u64, seen: &Observation, observer: &mut dyn Observer) {
        observer.looked(step, seen);
        let seen = json!({ "note": seen.note, "mask_distances": seen.distances });
        self.metrics.line(json!({ "step": step, "pruner": seen }), observer);
    }

    fn pruned(&mut self, step: u64, pruned: &Pruned, observer: &mut dyn Observer) {
        announce(observer, step, pruned, &mut self.warned);
        let (kept, all) = pruned.kept;
        let mut line = json!({ "step": step, "pruned": { "kept": kept, "of": all, "note": pruned.note } });
        if !pruned.distances.is_empty() {
            line["pruned"]["mask_distances"] = json!(pruned.distances);
        }
        self.metrics.line(line, observer);
    }

    fn validation(&self) -> Validation {
        Validation::new(
            self.validation,
            self.trainer.progress().best_validation,
            self.tokens_per_sample.is_some(),
        )
    }

    fn recent_rates(&self) -> Rates {
        Rates::from_steps(self.pace.last(20), self.plan.run.train.batch, self.tokens_per_sample)
    }

    /// What the run came to; bytes are the largest over ranks.
    fn summary(&self) -> Result<Summary> {
        let ledger = self.trainer.device().ledger();
        let mut hash = self.trainer.weights().hash()?;
        let sent = Traffic::ALL.map(|traffic| self.trainer.sent().of(traffic));
        let peaks = Category::ALL.map(|category| ledger.peak(category) as u64);
        let mut bytes = [&[ledger.total_peak() as u64], &sent[..], &peaks[..]].concat();
        if let Some(ranks) = self.trainer.ranks() {
            ranks.agree("weights at the end", &hash)?;
            bytes = ranks.largest(bytes)?;
            hash = hash_of(&ranks.of_all_stages(self.trainer.weights().digests()?)?);
        }
        let (sent, peaks) = bytes[1..].split_at(sent.len());
        let rates =
            Rates::from_steps(self.pace.last(usize::MAX), self.plan.run.train.batch, self.tokens_per_sample);
        let mut summary = Summary::planned(&self.plan, self.trainer.device().name());
        summary.scored(self.trainer.scoring());
        summary.steps = self.trainer.progress().step;
        summary.loss = self.last_loss;
        summary.validation = self.validation();
        summary.rate(rates);
        summary.pruned(&self.trainer, self.trainer.state_bytes()?);
        for (category, peak) in Category::ALL.into_iter().zip(peaks) {
            summary.measured(category, *peak as usize);
        }
        summary.peak_bytes = Some(bytes[0] as usize);
        summary.bytes_sent = Traffic::ALL.map(Traffic::name).into_iter().zip(sent.iter().copied()).collect();
        summary.seconds = Some(self.begin.elapsed().as_secs_f64());
        summary.weights_hash = Some(hash);
        summary.run = Some(self.folder.display().to_string());
        Ok(summary)
    }
}

/// Goes back to the newest whole checkpoint. Damaged ones are put aside; where there are no others, that is refused.
fn resume(
    trainer: &mut Trainer,
    checkpoints: &Checkpoints,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<()> {
    let mut damaged = Vec::new();
    let report = |broken: &Error| {
        if let Error::Checkpoint { path, .. } = broken {
            damaged.push((path.clone(), broken.to_string()));
        }
    };
    let loaded = trainer.load(checkpoints, report)?;
    match (loaded, damaged.first()) {
        (None, None) => observer.warning("there is no checkpoint yet: the run starts from its beginning"),
        (None, Some((_, newest))) => return Err(no_whole_checkpoint(folder, newest)),
        (Some(_), _) if trainer.ranks().is_none_or(Ranks::leads) => {
            for (path, problem) in &damaged {
                let moved = match checkpoint::set_aside(path) {
                    Ok(to) => format!("it is {} now", to.display()),
                    Err(why) => format!("it cannot be put aside: {why}"),
                };
                observer.warning(&format!("{problem}; {moved}, and the one before it is used"));
            }
        }
        (Some(_), _) => {}
    }
    Ok(())
}

/// That a run cannot be resumed, though there is something that might be rescued; `newest` is what is wrong with the newest.
fn no_whole_checkpoint(folder: &Path, newest: &str) -> Error {
    let verify = format!("`espalier verify {}`", folder.display());
    Error::file(
        folder,
        format!(
            "no whole checkpoint is left to resume from ({newest}), and nothing was changed: {verify} looks at all of them, \
             and --resume --fresh starts over and puts them aside"
        ),
    )
}

/// Puts checkpoints and metrics of a run that starts over, and a copy of its resolved file, into a folder beside them.
fn set_aside(folder: &Path, observer: &mut dyn Observer) -> Result<()> {
    let there = |name: &str| folder.join(name).symlink_metadata().is_ok();
    let parts: Vec<&str> = ["checkpoints", "metrics.jsonl"].into_iter().filter(|name| there(name)).collect();
    if parts.is_empty() {
        return Ok(());
    }
    let names = (1..).map(|n| format!("set-aside-{n}"));
    let aside = folder.join(names.into_iter().find(|name| !there(name)).expect("some name is free"));
    let attempt = || -> std::io::Result<()> {
        durable::create_folder(&aside)?;
        for part in parts {
            fs::rename(folder.join(part), aside.join(part))?;
        }
        durable::replace(&aside.join(RUN_FILE), &fs::read(folder.join(RUN_FILE))?)?;
        durable::sync_folder(folder)
    };
    attempt().map_err(|why| Error::unwritten(&aside, why))?;
    observer.warning(&format!("the run starts over: what was there is in {}", aside.display()));
    Ok(())
}

/// Writes a file of the run folder whole or not at all.
fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    let written = durable::create_folder(folder).and_then(|()| durable::replace(&path, text.as_bytes()));
    written.map_err(|why| Error::unwritten(&path, why))
}

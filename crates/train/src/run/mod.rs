//! A run: the folder it leaves, the loop over steps, and the summary at its end.
//!
//! ```text
//! run.toml  start.json  plan.json  metrics.jsonl  summary.json  checkpoints/  .lock
//! ```
//!
//! The loop talks to an [`Observer`], so that the binary can draw a progress bar and a test can listen. Of
//! several ranks all go through the same loop; rank 0 alone writes and reports.

mod check;
mod folder_handle;
mod folder_lock;
mod lifecycle;
pub mod metric_record;
mod metrics;
mod missing_steps;
mod previous_run;
mod progress_log;
mod prune;
mod resume;
mod sample;
mod start_point;
mod step_timer;
mod suspicious;
#[cfg(test)]
mod tests;
pub mod trace;

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use espalier_data::Dataset;
use espalier_plan::Plan;
use espalier_plan::intervals::RunLength;
use espalier_plan::pruning::{PruneMethod, Pruning};
use espalier_tensor::Device;
use tracing::{error, info};

use crate::checkpoint::{Checkpoints, retry};
use crate::parallel::launched::ProcessGroup;
use crate::parallel::{AbortFn, Ranks, on_threads_with_timeout};
use crate::prune::{Observation, PruneReport};
use crate::resolved::RUN_FILE;
pub use crate::resolved::read_resolved;
use crate::summary::{PredictedStep, RunSummary, Throughput};
use crate::trainer::{Evaluation, StepReport};
use crate::{Error, Result, durable, memory_check};
pub use check::check;
pub use folder_lock::FolderLock;
use lifecycle::Run;
use metrics::note_divergence;
pub use missing_steps::missing_steps;
pub use previous_run::PreviousRun;
use progress_log::ProgressLog;
pub use prune::prune;
pub use start_point::StartPoint;

/// What a run came to: there from its end on, until it is resumed.
const SUMMARY_FILE: &str = "summary.json";

/// Is called with what happens; every method may be left out.
pub trait Observer {
    /// The run begins (or goes on) after `done` of `steps` steps.
    fn started(&mut self, _done: u64, _steps: u64) {}
    /// A step was tried. `rates` are those of the last few steps, `memory` the bytes in use at their peak.
    fn step(&mut self, _report: &StepReport, _rates: Throughput, _memory: usize) {}
    /// The model was evaluated after `step` steps.
    fn evaluated(&mut self, _step: u64, _evaluation: Evaluation) {}
    /// The model has generated a text behind a prompt, after `step` steps.
    fn sampled(&mut self, _step: u64, _prompt: &str, _text: &str) {}
    /// The pruning method compared masks before step `step` and pruned nothing yet.
    fn observed(&mut self, _step: u64, _observation: &Observation) {}
    /// Weights were pruned before step `step`.
    fn pruned(&mut self, _step: u64, _pruned: &PruneReport) {}
    /// A checkpoint was written.
    fn saved(&mut self, _path: &Path) {}
    /// The first step is about to be taken: until then nothing is lost where the process ends. Also called on
    /// ranks that are processes and not the first.
    fn begins(&mut self) {}
    /// Something that is as it should be, and that one might overlook.
    fn note(&mut self, _text: &str) {}
    /// Something a person should know: a broken checkpoint that was passed over, a skipped step.
    fn warning(&mut self, _text: &str) {}
}

/// An observer that ignores everything.
impl Observer for () {}

/// The observer of a process whose rank is not 0.
struct QuietObserver<'a>(&'a mut dyn Observer);

impl Observer for QuietObserver<'_> {
    fn begins(&mut self) {
        self.0.begins();
    }
}

/// How a run ended.
#[derive(Debug)]
pub struct RunOutcome {
    /// What to print and to hand to programs.
    pub summary: RunSummary,
    /// Whether it was stopped before its last step; it has saved and can be resumed.
    pub interrupted: bool,
}

/// Where a run lives, and whether it goes on from a checkpoint there.
#[derive(Debug, Clone, Default)]
pub struct RunDir {
    pub folder: PathBuf,
    /// Whether the folder is the first of `FOLDER`, `FOLDER-2`, ... that is free or, to resume, the last that
    /// is not.
    pub numbered: bool,
    /// Whether the process that started this one has locked the folder.
    pub locked_by_parent: bool,
    /// Continue what is there; otherwise the folder must not hold a run.
    pub resume: bool,
    /// Start over in a folder that holds a run, whose checkpoints and metrics are put aside.
    pub fresh: bool,
    /// Fields, or sections, of the run file that may differ from what the run was, although that makes
    /// another run of it.
    pub allow: Vec<String>,
    /// A checkpoint whose weights and masks a new run starts from; one that goes on, where that is by now.
    pub from: Option<PathBuf>,
    /// Where to write what every rank did when.
    pub trace: Option<PathBuf>,
    /// What the planner says of the run's steps, for its summary.
    pub predicted: Option<PredictedStep>,
}

impl RunDir {
    /// A new run in a folder.
    pub fn at(folder: impl Into<PathBuf>) -> RunDir {
        RunDir { folder: folder.into(), ..RunDir::default() }
    }

    /// The run folder as far as it is known before the run begins; a new numbered one is known by its lock.
    pub fn find(&self) -> PathBuf {
        if self.numbered { FolderLock::last_used(&self.folder) } else { self.folder.clone() }
    }

    /// Locks the folder for a run that begins or goes on there.
    pub fn lock(&self) -> Result<FolderLock> {
        if self.numbered && !self.resume {
            return FolderLock::acquire_next(&self.folder);
        }
        let folder = self.find();
        if self.resume && !holds_run(&folder)? {
            return Err(Error::file(&folder, "there is no run here to resume (no run.toml)"));
        }
        let folder_lock = FolderLock::acquire(&folder)?;
        if !self.resume && holds_run(&folder)? {
            return Err(Error::file(
                &folder,
                "there is a run here already: add --resume to continue it, or choose another --out",
            ));
        }
        Ok(folder_lock)
    }
}

/// Whether a folder holds a run. That it cannot be read does not mean that there is none.
pub fn holds_run(folder: &Path) -> Result<bool> {
    let path = folder.join(RUN_FILE);
    match retry(|| path.try_exists()) {
        // What is no folder holds none.
        Err(why) if why.kind() == ErrorKind::NotADirectory => Ok(false),
        found => found.map_err(|why| Error::unread(path, why)),
    }
}

/// How the ranks of a run are started, and what ends it before its last step. By default nothing does, and
/// ranks are threads of this process, which share the threads of the device.
#[derive(Debug, Clone, Default)]
pub struct Launch<'a> {
    /// Once it is set, the run saves and stops.
    pub stop: Arc<AtomicBool>,
    /// The launcher that made this process one of the ranks, with the others that it started.
    pub process_group: Option<&'a ProcessGroup>,
    /// Ends this process where a rank that is a thread hangs: its thread borrows all this, so it cannot
    /// return. Without it, what hangs is waited for.
    pub abort: Option<AbortFn>,
}

/// Trains to the end, or until it is to stop: on as many ranks as the plan says, of which rank 0 alone
/// reports.
pub fn run(
    mut plan: Plan,
    dataset: impl Into<Arc<Dataset>>,
    device: &Device,
    run_dir: &RunDir,
    launch: &Launch<'_>,
    observer: &mut (dyn Observer + Send),
) -> Result<RunOutcome> {
    let dataset = dataset.into();
    memory_check::keep_data(&mut plan, &dataset, device, launch.process_group)?;
    let (mesh, limit) = (plan.mesh, plan.timeout);
    // The first rank of this process takes it; the others find nothing.
    let observer = Mutex::new(Some(observer));
    let rank = |ranks: Ranks, device: &Device| {
        let (mut nobody, mut taken, mut quiet) = ((), None, None);
        if ranks.is_rank0() || launch.process_group.is_some() {
            taken = observer.lock().expect("only taken from").take();
        }
        let observer: &mut dyn Observer = match &mut taken {
            Some(observer) if ranks.is_rank0() => &mut **observer,
            Some(observer) => quiet.insert(QuietObserver(&mut **observer)),
            None => &mut nobody,
        };
        from_start_to_end(plan.clone(), dataset.clone(), device, run_dir, ranks, &launch.stop, observer)
    };
    match launch.process_group {
        Some(process_group) => {
            device.enter(|| process_group.run(limit, &mesh, device, |ranks| rank(ranks, device)))
        }
        None if mesh.size() == 1 => device.enter(|| rank(Ranks::single(), device)),
        None => {
            let outcomes = on_threads_with_timeout(limit, launch.abort, &mesh, device, rank)?;
            Ok(outcomes.into_iter().next().expect("there is a rank 0"))
        }
    }
}

/// A run as one rank goes through it.
fn from_start_to_end(
    plan: Plan,
    dataset: Arc<Dataset>,
    device: &Device,
    run_dir: &RunDir,
    ranks: Ranks,
    stop: &Arc<AtomicBool>,
    observer: &mut dyn Observer,
) -> Result<RunOutcome> {
    let mut observer = ProgressLog(observer);
    let run = Run::start(plan, dataset, device, run_dir, ranks, stop, &mut observer);
    let outcome = run.and_then(|run| {
        let metrics = run.metrics_path();
        run.run_to_end(&mut observer).inspect_err(|error| note_divergence(metrics.as_deref(), error))
    });
    match &outcome {
        Ok(RunOutcome { interrupted: false, .. }) => info!("the run has ended"),
        Ok(RunOutcome { interrupted: true, .. }) => info!("the run was interrupted and has saved"),
        // Of several ranks only one prints it.
        Err(error) => error!("the run ends here: {error}"),
    }
    outcome
}

/// Why a run that was resumed ends at once.
fn nothing_to_do(plan: &Plan, done: u64, steps: u64) -> String {
    let length = match plan.intervals.length {
        RunLength::Steps(_) => "train.steps",
        RunLength::Epochs(_) => "train.epochs",
    };
    format!(
        "there is nothing to do: {done} steps are done, and the run has {steps}; a larger `{length}` continues it"
    )
}

/// Zeros can be kept only of something that a run starts from.
fn refuse_zeros_of_nothing(plan: &Plan) -> Result<()> {
    let keeps = matches!(&plan.pruning, Some(Pruning { method: PruneMethod::Keep, .. }));
    let field = match plan.keep_zeros {
        true => "train.keep_zeros",
        false if keeps => "prune.method",
        false => return Ok(()),
    };
    let why = "without --from: newly initialized weights have no zeros to keep".into();
    Err(espalier_plan::Error::NoEffect { field: field.into(), why }.into())
}

/// Reports what was pruned, and of what nothing or next to nothing is left: of each parameter once in a run.
fn announce(observer: &mut dyn Observer, step: u64, pruned: &PruneReport, warned: &mut HashSet<String>) {
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
            100.0 * layer.density()
        ));
    }
}

fn checkpoints_of(plan: &Plan, folder: &Path) -> Checkpoints {
    let (folder, keep) = (folder.join("checkpoints"), plan.intervals.checkpoint.keep);
    Checkpoints::new(folder, keep, &plan.model.name, plan.storage.precision.name())
}

/// Writes a file of the run folder completely or not at all.
fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    let written = durable::create_folder(folder).and_then(|()| durable::replace(&path, text.as_bytes()));
    written.map_err(|why| Error::unwritten(&path, why))
}

//! What is before the first step: the folder and whose it is, weights that are fresh, restored or somebody
//! else's, and what is written down of the run.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use espalier_data::{DataSplit, Dataset, Fingerprint};
use espalier_plan::Plan;
use espalier_plan::pruning::Pruning;
use espalier_plan::spec::Input;
use espalier_tensor::Device;
use tracing::info;

use super::Run;
use crate::parallel::{Ranks, all_gather_bytes};
use crate::resolved::{DATA_FILE, write_resolved};
use crate::run::folder_handle::FolderHandle;
use crate::run::metrics::{MetricsFile, PastMetrics};
use crate::run::resume::{resume, set_aside};
use crate::run::sample;
use crate::run::start_point::{START_FILE, StartPoint};
use crate::run::step_timer::StepTimer;
use crate::run::suspicious::suspicious_settings;
use crate::run::trace::open_trace;
use crate::run::{
    FolderLock, Observer, PreviousRun, RunDir, SUMMARY_FILE, checkpoints_of, nothing_to_do, write,
};
use crate::trainer::Trainer;
use crate::{Error, Result, hub};

/// From so many weights on, making them takes long enough that a person should know.
const MANY: u64 = 1_000_000_000;

impl Run {
    pub(in crate::run) fn start(
        plan: Plan,
        dataset: Arc<Dataset>,
        device: &Device,
        run_dir: &RunDir,
        ranks: Ranks,
        stop: &Arc<AtomicBool>,
        observer: &mut dyn Observer,
    ) -> Result<Run> {
        let is_rank0 = ranks.is_rank0();
        let (folder_lock, folder) = lock_folder(run_dir, &ranks, observer)?;
        let folder_handle = is_rank0.then(|| FolderHandle::open(&folder)).transpose();
        let folder_handle = folder_handle.map_err(|why| Error::unread(&folder, why))?;
        // Not after hours of training.
        run_dir.trace.as_deref().filter(|_| is_rank0).map_or(Ok(()), open_trace)?;
        let data = if is_rank0 { Fingerprint::of(&plan.data)? } else { None };
        let previous = match is_rank0 && run_dir.resume && !run_dir.fresh {
            true => {
                Some(PreviousRun::compare(&folder, plan.record(), data.as_ref(), &run_dir.allow, observer)?)
            }
            false => None,
        };
        let samples = dataset.len(DataSplit::Train);
        suspicious_settings(&plan, samples).iter().for_each(|text| observer.warning(text));
        let prompt = sample::prompt(&plan, &dataset)?.unwrap_or_default();
        let mut checkpoints = checkpoints_of(&plan, &folder);
        if plan.parameters >= MANY {
            observer.note(&format!("initializing {:.1} B weights", plan.parameters as f64 / 1e9));
        }
        info!("initializes its weights, of {} in all", plan.parameters);
        let begin = Instant::now();
        let mut trainer = Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?;
        trainer.set_stop_flag(stop.clone());
        trainer.enable_graphed_step();
        info!("its weights are initialized");
        let mut resumes = false;
        if run_dir.resume && !run_dir.fresh {
            resumes = resume(&mut trainer, &checkpoints, &folder, observer)?;
            if let Some(wanted) = plan.pruning.as_ref().and_then(Pruning::share_of_weights)
                && trainer.is_pruned_beyond(wanted)
            {
                observer.warning(&format!(
                    "the checkpoint is pruned to {:.4} already, and `prune.sparsity` = {wanted} does not restore weights",
                    trainer.sparsity()
                ));
            }
        }
        let start = StartPoint::start(&mut trainer, &plan, run_dir, &folder, resumes, observer)?;
        if is_rank0 {
            let before = start.as_ref().map(|(path, _)| path.clone()).or(checkpoints.list()?.pop());
            checkpoints =
                checkpoints.with_sidecar_files(hub::sidecar_files(&plan, &dataset, before.as_deref())?);
        }
        if !trainer.ranks().is_single() {
            let (step, weights) = (trainer.progress().step, trainer.params().hash()?);
            let masks = trainer.params().mask_hash()?;
            trainer
                .ranks()
                .check_replicas_agree("weights at the start", &format!("{step} {weights} {masks}"))?;
        }
        if run_dir.trace.is_some() {
            // The clocks of all ranks begin when the last has arrived.
            trainer.ranks().world().barrier()?;
            trainer.trace_since(Instant::now());
        }
        let (mut metrics, mut past) = (MetricsFile::default(), PastMetrics::default());
        let (done, steps) = (trainer.progress().step, trainer.steps());
        if steps == 0 && !resumes {
            // What a run of no steps is for: to evaluate what it starts from.
            trainer.evaluate_first();
        }
        let is_over = run_dir.resume && done >= steps && !trainer.progress().evaluation_due;
        // A process that was killed behind the last checkpoint has left the rest of its end to this one.
        let began = if is_rank0 { StartPoint::read(&folder)?.map_or(0, |start| start.step()) } else { 0 };
        // One that only pruned has neither lines nor an end to write down.
        let has_trained = done > began && folder.join("metrics.jsonl").exists();
        let finishes =
            is_over && is_rank0 && done == steps && has_trained && !folder.join(SUMMARY_FILE).exists();
        let nothing_left = is_over && !finishes;
        if nothing_left {
            observer.note(&nothing_to_do(&plan, done, steps));
        }
        // A run of which nothing is left to do stays what it was.
        if is_rank0 && !nothing_left {
            info!("writes into {}", folder.display());
            folder_handle.as_ref().map_or(Ok(()), FolderHandle::check)?;
            if run_dir.fresh {
                set_aside(&folder, observer)?;
            }
            match &start {
                Some((_, start)) => start.write(&folder)?,
                // Of somebody who did not come as far as a run.
                None if !run_dir.resume => drop(fs::remove_file(folder.join(START_FILE))),
                None => {}
            }
            let text = plan.record().to_toml()?;
            let data = data.map(|data| data.to_json());
            if let Some(previous) = &previous {
                previous.note_length(plan.record(), done, samples, observer);
                previous.keep(&folder, done, &text, data.as_deref())?;
            }
            // What it came to is known again at its end.
            let _ = fs::remove_file(folder.join(SUMMARY_FILE));
            write_resolved(&folder, &text)?;
            if let Some(data) = &data {
                write(&folder, DATA_FILE, data)?;
            }
            write(&folder, "plan.json", &serde_json::to_string_pretty(&plan).expect("a plan is plain data"))?;
            let path = folder.join("metrics.jsonl");
            (metrics, past) = MetricsFile::open(&path, done)?;
            let every = previous.as_ref().map_or(1, PreviousRun::log_every).max(plan.intervals.log_every);
            past.warn_of_gaps(&path, [began, done], every, observer);
        }
        if finishes {
            observer.note(&format!(
                "all {steps} steps are done, and the run was stopped before its summary was written: it is written now"
            ));
            checkpoints.remove_old(done, |problem| observer.warning(problem));
        }
        if is_over && is_rank0 {
            // As a disk leaves it that failed for a moment. What cannot be removed is not in the way.
            let _ = checkpoints.remove_leftovers();
        }
        let tokens_per_sample = match plan.model.input {
            Input::Tokens { seq, .. } => Some(seq),
            Input::Image { .. } => None,
        };
        Ok(Run {
            _folder_lock: folder_lock,
            plan,
            trainer,
            stop: stop.clone(),
            checkpoints,
            metrics,
            folder,
            folder_handle,
            tokens_per_sample,
            step_timer: StepTimer::default(),
            unsaved: None,
            last_loss: past.loss.filter(|_| finishes),
            validation: None,
            past_validation: past
                .validation
                .filter(|(step, _)| finishes && *step == done)
                .map(|(_, found)| found),
            trace: run_dir.trace.clone(),
            predicted: run_dir.predicted.clone(),
            begin,
            first_step_end: None,
            prompt,
            warned: HashSet::new(),
        })
    }
}

/// The run folder, which rank 0 locks unless its supervisor has.
fn lock_folder(
    run_dir: &RunDir,
    ranks: &Ranks,
    observer: &mut dyn Observer,
) -> Result<(Option<FolderLock>, PathBuf)> {
    let folder_lock = (ranks.is_rank0() && !run_dir.locked_by_parent).then(|| run_dir.lock()).transpose()?;
    let mut folder =
        folder_lock.as_ref().map_or(run_dir.folder.clone(), |folder_lock| folder_lock.folder().to_owned());
    if !ranks.is_single() {
        // It is rank 0 that knows where a numbered one is, or one that its supervisor has locked.
        let gathered = all_gather_bytes(ranks.world(), folder.as_os_str().as_bytes())?;
        folder = OsStr::from_bytes(&gathered[0]).into();
    }
    if folder_lock.as_ref().is_some_and(|folder_lock| folder_lock.lock().is_none()) {
        observer.warning(&format!(
            "the file system of {} has no locks: nothing keeps another process out of this run",
            folder.display()
        ));
    }
    Ok((folder_lock, folder))
}

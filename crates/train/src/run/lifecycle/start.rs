//! What is before the first step: the folder and whose it is, weights that are fresh, restored or somebody else's, and what is written down
//! of the run.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use espalier_data::{Dataset, Fingerprint, Split};
use espalier_plan::Plan;
use espalier_plan::pruning::Pruning;
use espalier_plan::spec::Input;
use espalier_tensor::Device;
use tracing::info;

use super::Run;
use crate::parallel::{Ranks, exchange};
use crate::resolved::{DATA_FILE, write_resolved};
use crate::run::back::{resume, set_aside};
use crate::run::held::HeldFolder;
use crate::run::metrics::{Metrics, Past};
use crate::run::pace::Pace;
use crate::run::sample;
use crate::run::start_point::{START_FILE, StartPoint};
use crate::run::trace::open_trace;
use crate::run::unlikely::unlikely;
use crate::run::{Claim, Observer, Resumed, RunDir, SUMMARY_FILE, checkpoints_of, nothing_to_do, write};
use crate::trainer::Trainer;
use crate::{Error, Result, hub};

/// From so many weights on, making them takes long enough that a person should know.
const MANY: u64 = 1_000_000_000;

impl Run {
    pub(in crate::run) fn start(
        plan: Plan,
        dataset: Arc<Dataset>,
        device: &Device,
        place: &RunDir,
        ranks: Ranks,
        stop: &Arc<AtomicBool>,
        observer: &mut dyn Observer,
    ) -> Result<Run> {
        let leads = ranks.leads();
        let (claim, folder) = claim(place, &ranks, observer)?;
        let held = leads.then(|| HeldFolder::open(&folder)).transpose();
        let held = held.map_err(|why| Error::unread(&folder, why))?;
        // Not after hours of training.
        place.trace.as_deref().filter(|_| leads).map_or(Ok(()), open_trace)?;
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
            observer.note(&format!("initializing {:.1} B weights", plan.parameters as f64 / 1e9));
        }
        info!("initializes its weights, of {} in all", plan.parameters);
        let mut trainer = Trainer::among(plan.clone(), dataset.clone(), device, ranks)?;
        trainer.listen_to(stop.clone());
        info!("its weights are initialized");
        let mut goes_on = false;
        if place.resume && !place.fresh {
            goes_on = resume(&mut trainer, &checkpoints, &folder, observer)?;
            if let Some(wanted) = plan.pruning.as_ref().and_then(Pruning::share_of_weights)
                && trainer.is_pruned_beyond(wanted)
            {
                observer.warning(&format!(
                    "the checkpoint is pruned to {:.4} already, and `prune.sparsity` = {wanted} does not restore weights",
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
            let masks = trainer.params().mask_hash()?;
            trainer.ranks().agree("weights at the start", &format!("{step} {weights} {masks}"))?;
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
                "all {steps} steps are done, and the run was stopped before its summary was written: it is written now"
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
}

/// The run folder, which rank 0 claims unless its supervisor has.
fn claim(place: &RunDir, ranks: &Ranks, observer: &mut dyn Observer) -> Result<(Option<Claim>, PathBuf)> {
    let claim = (ranks.leads() && !place.claimed).then(|| place.claim()).transpose()?;
    let mut folder = claim.as_ref().map_or(place.folder.clone(), |claim| claim.folder().to_owned());
    if !ranks.is_alone() {
        // It is rank 0 that knows where a numbered one is, or one that its supervisor has claimed.
        let said = exchange(ranks.world(), folder.as_os_str().as_bytes())?;
        folder = OsStr::from_bytes(&said[0]).into();
    }
    if claim.as_ref().is_some_and(|claim| claim.lock().is_none()) {
        observer.warning(&format!(
            "the file system of {} has no locks: nothing keeps another process out of this run",
            folder.display()
        ));
    }
    Ok((claim, folder))
}

//! A run folder made by pruning a checkpoint, with no step taken.

use std::collections::HashSet;
use std::path::Path;

use espalier_data::{Dataset, Fingerprint};
use espalier_plan::Plan;
use espalier_plan::memory::StateBytes;
use espalier_tensor::Device;

use super::progress_log::ProgressLog;
use super::{FolderLock, Observer, StartPoint, announce, checkpoints_of, holds_run, write};
use crate::checkpoint::Checkpoint;
use crate::resolved::DATA_FILE;
use crate::resolved::write_resolved;
use crate::summary::RunSummary;
use crate::trainer::Trainer;
use crate::{Error, Result, hub, memory_check};

/// Prunes a checkpoint, optimizer state included, by the method of a plan, into a new run folder that can be
/// resumed. One rank does it, however many the run has.
pub fn prune(
    plan: Plan,
    dataset: Dataset,
    device: &Device,
    checkpoint: &Checkpoint,
    folder: &Path,
    observer: &mut dyn Observer,
) -> Result<RunSummary> {
    let observer = &mut ProgressLog(observer);
    let _folder_lock = FolderLock::acquire(folder)?;
    if holds_run(folder)? {
        return Err(Error::file(folder, "there is a run here already: choose another folder"));
    }
    hub::check_tokens(checkpoint, &plan)?;
    let sidecar_files = hub::sidecar_files(&plan, &dataset, Some(checkpoint.path()))?;
    let checkpoints = checkpoints_of(&plan, folder).with_sidecar_files(sidecar_files);
    let single = plan.single_rank().map_err(Error::Plan)?;
    memory_check::check(&single, device, None)?;
    let mut trainer = Trainer::new(single, dataset, device)?;
    if hub::is_foreign(checkpoint.path()) {
        // Weights alone, without the state of an optimizer.
        trainer.start_from(checkpoint)?;
    } else {
        trainer.restore(checkpoint)?;
        trainer.refuse_more_pruned(checkpoint)?;
    }
    let pruned = trainer.prune()?.expect("a method that prunes before the first step");
    // It is another model from here on: what the dense one reached is not its own.
    trainer.forget_best();
    announce(observer, trainer.progress().step + 1, &pruned, &mut HashSet::new());
    observer.saved(&trainer.save(&checkpoints)?);
    StartPoint::of(checkpoint, trainer.progress().step)?.write(folder)?;
    write_resolved(folder, &plan.record().to_toml()?)?;
    if let Some(data) = Fingerprint::of(&plan.data)? {
        write(folder, DATA_FILE, &data.to_json())?;
    }
    write(folder, "plan.json", &serde_json::to_string_pretty(&plan).expect("a plan is plain data"))?;
    let mut summary = RunSummary::planned(&plan, device.name());
    summary.steps = trainer.progress().step;
    // No step was taken, so there was no gradient yet.
    let state = StateBytes { gradients: plan.state_bytes().gradients, ..trainer.state_bytes()? };
    summary.pruned(&trainer, state);
    summary.weights_hash = Some(trainer.params().hash()?);
    summary.run = Some(folder.display().to_string());
    Ok(summary)
}

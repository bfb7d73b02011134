//! What `--dry-run` can know of a run without training: whether its folder can be had, what it would go on or
//! start from is there and fits, and its trace could be written. Nothing is left behind.

use std::fs;
use std::path::Path;

use espalier_data::Fingerprint;
use espalier_plan::Plan;
use espalier_plan::rounds::Rounds;

use super::resume::no_intact_checkpoint;
use super::suspicious::suspicious_settings;
use super::trace::open_trace;
use super::{
    Observer, PreviousRun, RunDir, StartPoint, checkpoints_of, nothing_to_do, refuse_zeros_of_nothing,
};
use crate::parallel::Ranks;
use crate::{Error, Result, hub};

/// The error with which the run would end before its first step, as far as that takes no device; `samples` is
/// what the data has to train on.
pub fn check(plan: &Plan, samples: usize, run_dir: &RunDir, observer: &mut dyn Observer) -> Result<()> {
    let steps = plan.total_steps(samples);
    if let Some(prune) = &plan.pruning {
        prune.method.check_length(steps)?;
        Rounds::of(&plan.model, prune)
            .map(|rounds| rounds.trainings(plan.intervals.length, steps))
            .transpose()?;
    }
    suspicious_settings(plan, samples).iter().for_each(|text| observer.warning(text));
    let folder_lock = run_dir.lock()?;
    if run_dir.resume && !run_dir.fresh {
        let data = Fingerprint::of(&plan.data)?;
        let previous = PreviousRun::compare(
            folder_lock.folder(),
            plan.record(),
            data.as_ref(),
            &run_dir.allow,
            observer,
        )?;
        let mut damaged = Vec::new();
        let report = |broken: &Error| damaged.push(broken.to_string());
        let newest = checkpoints_of(plan, folder_lock.folder()).latest(&Ranks::single(), report)?;
        if let Some(first) = damaged.first().filter(|_| newest.is_none()) {
            return Err(no_intact_checkpoint(folder_lock.folder(), first));
        }
        for broken in damaged {
            observer.warning(&format!("{broken}; the one before it would be used"));
        }
        let resumes = newest.is_some();
        if let Some((start, _)) =
            StartPoint::find(run_dir, folder_lock.folder(), resumes, &Ranks::single(), observer)?
        {
            start.check_fits(&plan.model)?;
        }
        match newest {
            None => observer.warning("there is no checkpoint yet: the run would start from step 0"),
            Some(checkpoint) => {
                checkpoint.check_fits(&plan.model)?;
                let done = checkpoint.progress().step;
                observer.note(&format!("it would resume after step {done}"));
                match done >= steps as u64 {
                    true => observer.note(&nothing_to_do(plan, done, steps as u64)),
                    false => previous.note_length(plan.record(), done, samples, observer),
                }
            }
        }
    } else {
        let start = StartPoint::find(run_dir, folder_lock.folder(), false, &Ranks::single(), observer)?;
        match start {
            Some((start, _)) => {
                hub::check_tokens(&start, plan)?;
                start.check_fits(&plan.model)?;
            }
            None => refuse_zeros_of_nothing(plan)?,
        }
    }
    run_dir.trace.as_deref().map_or(Ok(()), can_be_written)
}

fn can_be_written(trace: &Path) -> Result<()> {
    let was_there = trace.exists();
    open_trace(trace)?;
    if !was_there {
        fs::remove_file(trace).map_err(|why| Error::file(trace, why))?;
    }
    Ok(())
}

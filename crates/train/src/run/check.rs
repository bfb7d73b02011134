//! What `--dry-run` can know of a run without training: whether its folder can be had, what it would go on or start from is
//! there and fits, and its trace could be written. Nothing is left behind.

use std::fs;
use std::path::Path;

use espalier_data::Fingerprint;
use espalier_plan::Plan;
use espalier_plan::rounds::Rounds;

use super::back::no_whole_checkpoint;
use super::trace::open_trace;
use super::unlikely::unlikely;
use super::{Observer, Resumed, RunDir, StartPoint, checkpoints_of, nothing_to_do, refuse_zeros_of_nothing};
use crate::parallel::Ranks;
use crate::{Error, Result, hub};

/// The error with which the run would end before its first step, as far as that takes no device; `samples` is what the data
/// has to train on.
pub fn check(plan: &Plan, samples: usize, place: &RunDir, observer: &mut dyn Observer) -> Result<()> {
    let steps = plan.total_steps(samples);
    if let Some(prune) = &plan.pruning {
        prune.method.check_length(steps)?;
        Rounds::of(&plan.model, prune)
            .map(|rounds| rounds.trainings(plan.timetable.length, steps))
            .transpose()?;
    }
    unlikely(plan, samples).iter().for_each(|text| observer.warning(text));
    let claim = place.claim()?;
    if place.resume && !place.fresh {
        let data = Fingerprint::of(&plan.data)?;
        let resumed = Resumed::compare(claim.folder(), plan.record(), data.as_ref(), &place.allow, observer)?;
        let mut damaged = Vec::new();
        let report = |broken: &Error| damaged.push(broken.to_string());
        let newest = checkpoints_of(plan, claim.folder()).latest(&Ranks::alone(), report)?;
        if let Some(first) = damaged.first().filter(|_| newest.is_none()) {
            return Err(no_whole_checkpoint(claim.folder(), first));
        }
        for broken in damaged {
            observer.warning(&format!("{broken}; the one before it would be used"));
        }
        let goes_on = newest.is_some();
        if let Some((start, _)) = StartPoint::find(place, claim.folder(), goes_on, &Ranks::alone(), observer)?
        {
            start.check_fits(&plan.model)?;
        }
        match newest {
            None => observer.warning("there is no checkpoint yet: the run would start from step 0"),
            Some(whole) => {
                whole.check_fits(&plan.model)?;
                let done = whole.progress().step;
                observer.note(&format!("it would resume after step {done}"));
                match done >= steps as u64 {
                    true => observer.note(&nothing_to_do(plan, done, steps as u64)),
                    false => resumed.note_length(plan.record(), done, samples, observer),
                }
            }
        }
    }
    if !place.resume || place.fresh {
        let start = StartPoint::find(place, claim.folder(), false, &Ranks::alone(), observer)?;
        match start {
            Some((start, _)) => {
                hub::check_tokens(&start, plan)?;
                start.check_fits(&plan.model)?;
            }
            None => refuse_zeros_of_nothing(plan)?,
        }
    }
    place.trace.as_deref().map_or(Ok(()), can_be_written)
}

fn can_be_written(trace: &Path) -> Result<()> {
    let was_there = trace.exists();
    open_trace(trace)?;
    if !was_there {
        fs::remove_file(trace).map_err(|why| Error::file(trace, why))?;
    }
    Ok(())
}

//! A trial on its way to the next comparison: validated as it goes, and left as soon as it is known what
//! becomes of it.

use std::sync::atomic::{AtomicBool, Ordering};

use espalier_train::Error;

use crate::bracket::StepsBound;
use crate::file::Study;
use crate::trial::{Trial, TrialCheck, TrialRecord, TrialStatus, ValidationPoint};
use crate::workload::TrialSettings;

/// Steps grow at least by this factor from one kept check to the next: forty-odd of them describe any run.
const CURVE_SPACING: f64 = 1.25;

/// Runs a trial until it has taken so many steps in all, or has come to its end. `known` is what is known of
/// its earlier steps; `bound` is given where a trial that has passed the best one is to be left. None where
/// `stop` was set on the way.
pub(crate) fn advance_trial(
    study: &Study,
    settings: &TrialSettings,
    trial: &mut dyn Trial,
    known: Option<TrialRecord>,
    until: u64,
    bound: Option<&StepsBound>,
    stop: &AtomicBool,
) -> Result<Option<TrialRecord>, Error> {
    let (goal, search) = (study.goal, &study.search);
    let mut record = known.unwrap_or_else(|| TrialRecord {
        batch: settings.batch,
        sparsity: settings.sparsity,
        trial: u32::try_from(settings.seed).expect("a trial's number"),
        status: TrialStatus::Paused,
        steps: 0,
        best: None,
        fields: settings.fields.clone(),
        curve: Vec::new(),
    });
    while record.steps < until {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let target = (record.steps + search.eval_every).min(search.steps);
        let next_point = record.curve.last().map_or(0.0, |last| last.step as f64 * CURVE_SPACING);
        let is_point = target as f64 >= next_point || target >= until;
        let found = if is_point { trial.advance(target).map(Some) } else { trial.advance_to_goal(target) };
        let check = match found {
            Ok(check) => check,
            // That is a result too.
            Err(Error::Diverged { step, .. } | Error::NotFinite { step, .. }) => {
                Some(TrialCheck { step, loss: f64::NAN, error: 1.0, diverged: true, pruned: true })
            }
            Err(error) => return Err(error),
        };
        record.steps = check.map_or(target, |check| check.step);
        let mut reached = false;
        if let Some(check) = check {
            let validation = ValidationPoint { step: check.step, loss: check.loss, error: check.error };
            let measure = validation.measure(goal);
            if check.diverged || !validation.loss.is_finite() || !validation.error.is_finite() {
                record.status = TrialStatus::Infeasible;
                return Ok(Some(record));
            }
            record.best = Some(record.best.map_or(measure, |best| best.min(measure)));
            reached = measure <= goal.value() && check.pruned;
            if reached || is_point {
                record.curve.push(validation);
            }
        }
        let next = (record.steps + search.eval_every).min(search.steps);
        let is_beaten = bound.is_some_and(|bound| !bound.allows(next, record.trial));
        record.status = match () {
            () if reached => TrialStatus::Complete,
            () if record.steps >= search.steps => TrialStatus::Incomplete,
            () if is_beaten => TrialStatus::Cut,
            () => continue,
        };
        return Ok(Some(record));
    }
    Ok(Some(record))
}

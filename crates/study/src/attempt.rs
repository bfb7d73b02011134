//! A trial on its way to the next comparison: validated as it goes, and left as soon as it is known what becomes of it.

use std::sync::atomic::{AtomicBool, Ordering};

use espalier_train::Error;

use crate::file::Study;
use crate::race::Bound;
use crate::trial::{Check, Mark, Record, Status, Trial};
use crate::workload::Settings;

/// Steps grow at least by this factor from one kept check to the next: forty-odd of them describe any run.
const KEPT: f64 = 1.25;

/// Runs a trial until it has taken so many steps in all, or has come to its end. `known` is what is known of its earlier steps; `bound` is given where a trial that has passed the
/// best one is to be left. None where `stop` was set on the way.
pub fn advance(
    study: &Study,
    settings: &Settings,
    trial: &mut dyn Trial,
    known: Option<Record>,
    until: u64,
    bound: Option<&Bound>,
    stop: &AtomicBool,
) -> Result<Option<Record>, Error> {
    let (goal, search) = (study.goal, &study.search);
    let mut record = known.unwrap_or_else(|| Record {
        batch: settings.batch,
        sparsity: settings.sparsity,
        trial: u32::try_from(settings.seed).expect("a trial's number"),
        status: Status::Paused,
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
        let check = match trial.advance(target) {
            Ok(check) => check,
            // That is a result too.
            Err(Error::Diverged { step, .. } | Error::NotFinite { step, .. }) => {
                Check { step, loss: f64::NAN, error: 1.0, diverged: true }
            }
            Err(error) => return Err(error),
        };
        record.steps = check.step;
        let mark = Mark { step: check.step, loss: check.loss, error: check.error };
        let measure = mark.measure(goal);
        if check.diverged || !mark.loss.is_finite() || !mark.error.is_finite() {
            record.status = Status::Infeasible;
            return Ok(Some(record));
        }
        record.best = Some(record.best.map_or(measure, |best| best.min(measure)));
        let kept = record.curve.last().map_or(0.0, |last| last.step as f64 * KEPT);
        let reached = measure <= goal.value();
        if reached || check.step as f64 >= kept || check.step >= until {
            record.curve.push(mark);
        }
        let passed = bound.and_then(Bound::get).is_some_and(|best| check.step >= best);
        record.status = match () {
            () if reached => Status::Complete,
            () if passed => Status::Cut,
            () if check.step >= search.steps => Status::Incomplete,
            () => continue,
        };
        return Ok(Some(record));
    }
    Ok(Some(record))
}

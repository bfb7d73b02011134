//! Smoothness along the best trials of a study of steps-to-result.

use espalier_train::Result;

use super::SparsityCurve;
use crate::file::{Cell, Study};
use crate::measure_schedule::MeasureSchedule;
use crate::outcomes::Outcomes;
use crate::results::Results;
use crate::trial::TrialRecord;
use crate::widen;
use crate::workload::{TrialSettings, Workload};

/// Trains the best trial of each sparsity again, up to its K*, and measures on the way; `report` is called
/// for each. All at one batch, the largest at which every sparsity reached the goal, since smoothness changes
/// with the batch; nothing where there is none.
pub fn of_best(
    study: &Study,
    results: &Results,
    workload: &Workload,
    schedule: MeasureSchedule,
    mut report: impl FnMut(&SparsityCurve),
) -> Result<Vec<SparsityCurve>> {
    let mut outcomes = Outcomes::open(results.folder())?;
    let mut curves = Vec::new();
    for best in best_trials(study, results).unwrap_or_default() {
        let TrialRecord { batch, sparsity, trial, steps, fields, .. } = best;
        let settings = TrialSettings { batch, sparsity, seed: trial.into(), fields };
        let plan = workload.plan(&settings)?;
        let text = plan.record().to_toml()?;
        let curve = outcomes.get_or(&["smoothness", &text, &format!("{schedule} {steps}")], || {
            SparsityCurve::traced(sparsity, plan, workload.dataset(), workload.device(), schedule, steps)
        })?;
        report(&curve);
        curves.push(curve);
    }
    Ok(curves)
}

/// The best trial of every sparsity at the largest batch that has one for each.
fn best_trials(study: &Study, results: &Results) -> Option<Vec<TrialRecord>> {
    let mut batches: Vec<usize> = study.cells.iter().map(|cell| cell.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let best = |batch: usize, sparsity: f64| {
        let best = widen::best(results.of_cell(Cell { batch, sparsity }))?;
        best.result().map(|_| best.clone())
    };
    let all = |batch: &usize| study.sparsities().into_iter().map(|sparsity| best(*batch, sparsity)).collect();
    batches.iter().rev().find_map(all)
}

#[cfg(test)]
mod tests {
    use espalier_plan::RunFile;
    use espalier_tensor::Device;

    use super::*;
    use crate::synthetic::record;
    use crate::trial::TrialStatus;

    const TEXT: &str = r#"
        name = "small"
        [run.model]
        name = "mlp"
        hidden = [16]
        [run.data]
        kind = "shapes"
        count = 300
        size = 16
        [run.optimizer]
        name = "momentum"
        [run.learning_rate]
        schedule = "constant"
        [run.prune]
        method = "snip"
        [cells]
        batches = [8, 32, 64]
        sparsities = [0, 0.9]
        [goal]
        error = 0.5
        [search]
        trials = 2
        steps = 64
        [search.ranges]
        learning_rate.peak = { log = [1e-4, 0.1] }
        [smoothness]
        every = 3
        samples = 90
    "#;

    /// At batch 64 the sparse network did not reach the goal, so 32 it is; there trial 2 was faster.
    #[test]
    fn the_best_trials_of_one_batch_are_trained_again_up_to_their_goal() {
        let study = Study::parse(TEXT, &[]).unwrap();
        let schedule = study.smoothness.unwrap();
        assert_eq!(schedule, MeasureSchedule { from: 1, every: 3, samples: Some(90) });
        let folder = tempfile::tempdir().unwrap();
        let mut results = Results::open(folder.path(), &study).unwrap();
        let (complete, incomplete) = (TrialStatus::Complete, TrialStatus::Incomplete);
        let known = [
            record(8, 0.0, 1, complete, 60),
            record(8, 0.9, 1, complete, 60),
            record(32, 0.0, 1, complete, 9),
            record(32, 0.0, 2, complete, 7),
            record(32, 0.9, 1, complete, 10),
            record(64, 0.0, 1, complete, 5),
            record(64, 0.9, 1, incomplete, 64),
        ];
        results.append(&known).unwrap();
        let run: RunFile = study.common_run().unwrap();
        let workload = Workload::open(&run, &Device::cpu(2).unwrap()).unwrap();
        let mut reported = 0;
        let curves = of_best(&study, &results, &workload, schedule, |_| reported += 1).unwrap();
        let steps =
            |curve: &SparsityCurve| curve.trace.points.iter().map(|point| point.step).collect::<Vec<_>>();
        assert_eq!(curves.iter().map(|curve| curve.sparsity).collect::<Vec<_>>(), [0.0, 0.9]);
        assert_eq!((steps(&curves[0]), steps(&curves[1])), (vec![1, 4, 7], vec![1, 4, 7, 10]));
        assert_eq!(reported, 2);
        assert_eq!(of_best(&study, &results, &workload, schedule, |_| ()).unwrap(), curves, "found again");
    }
}

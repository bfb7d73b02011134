//! Local smoothness along training, by sparsity: why sparse networks need more steps (Lee, Ajanthan, Torr &
//! Jaggi 2021, section 4).
//!
//! As a kind of study of its own it takes one run at several sparsities and measures each on the way. In a
//! study of steps-to-result the same is done with the best trial of each sparsity.

mod best;
mod file;
mod page;
mod trace;

pub use best::of_best;
pub use file::SmoothnessStudy;
pub use page::{figure, page, table};
pub use trace::{SmoothnessPoint, SmoothnessTrace, trace_smoothness};

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::measure_schedule::MeasureSchedule;
use crate::outcomes::{OutcomeKey, Outcomes};

/// What the training of one sparsity was like.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SparsityCurve {
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
    /// Step by step; where there were several seeds, their mean.
    #[serde(flatten)]
    pub trace: SmoothnessTrace,
    /// The mean smoothness with each seed, where there were several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_seed: Vec<f64>,
}

impl SparsityCurve {
    /// Trains for so many steps and measures on the way; an error where nothing can be measured.
    fn traced(
        sparsity: f64,
        plan: Plan,
        dataset: &Arc<Dataset>,
        device: &Device,
        schedule: MeasureSchedule,
        steps: u64,
    ) -> Result<SparsityCurve> {
        let trace = trace_smoothness(plan, dataset.clone(), device, schedule, steps)?;
        let unmeasurable = || Error::Unmeasurable { what: "the local smoothness".into() };
        Ok(SparsityCurve { sparsity, trace: trace.ok_or_else(unmeasurable)?, by_seed: Vec::new() })
    }

    /// Of one sparsity with several seeds.
    fn of_seeds(curves: Vec<SparsityCurve>) -> SparsityCurve {
        let traces: Vec<_> = curves.iter().map(|curve| &curve.trace).collect();
        let sparsity = curves[0].sparsity;
        let by_seed = match traces.len() {
            1 => Vec::new(),
            _ => traces.iter().map(|trace| trace.measured(sparsity).mean).collect(),
        };
        SparsityCurve { sparsity, trace: SmoothnessTrace::mean_of(&traces), by_seed }
    }
}

/// Trains the run at every sparsity with every seed and measures, or takes what is in `folder` already;
/// `report` is called for each sparsity. Paths of the study file are relative to `base_dir`.
pub fn run(
    study: &SmoothnessStudy,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    base_dir: &Path,
    mut report: impl FnMut(&SparsityCurve),
) -> Result<Vec<SparsityCurve>> {
    let mut outcomes = Outcomes::open(folder)?;
    let mut curves = Vec::new();
    for &sparsity in &study.sparsities {
        let mut of_seeds = Vec::new();
        for number in 0..study.seeds {
            let (run_file, key) = run_and_key(study, sparsity, number, base_dir)?;
            let plan = Plan::new(run_file, dataset.facts())?;
            if plan.mesh.size() > 1 {
                let problem =
                    format!("asks for {} ranks, and smoothness is measured on one", plan.mesh.size());
                return Err(espalier_plan::Error::Conflict { field: "run.parallel".into(), problem }.into());
            }
            of_seeds.push(outcomes.get_or(&key, || {
                SparsityCurve::traced(sparsity, plan, dataset, device, study.schedule, u64::MAX)
            })?);
        }
        let curve = SparsityCurve::of_seeds(of_seeds);
        report(&curve);
        curves.push(curve);
    }
    Ok(curves)
}

/// The sparsities that are done by now, with all their seeds.
pub fn known(study: &SmoothnessStudy, folder: &Path, base_dir: &Path) -> Result<Vec<SparsityCurve>> {
    let mut curves = Vec::new();
    for &sparsity in &study.sparsities {
        let key = |number| Ok(run_and_key(study, sparsity, number, base_dir)?.1);
        let keys = (0..study.seeds).map(key).collect::<Result<Vec<_>>>()?;
        let of_seeds: Vec<SparsityCurve> = Outcomes::known(folder, &keys)?;
        if of_seeds.len() == keys.len() {
            curves.push(SparsityCurve::of_seeds(of_seeds));
        }
    }
    Ok(curves)
}

/// The run at a sparsity with one of the seeds, and what its outcome is found by.
fn run_and_key(
    study: &SmoothnessStudy,
    sparsity: f64,
    number: u64,
    base_dir: &Path,
) -> Result<(RunFile, OutcomeKey)> {
    let mut run_file = study.run_file(sparsity, number)?;
    run_file.resolve_paths(base_dir);
    let key = ["smoothness".into(), run_file.to_toml()?, study.schedule.to_string()];
    Ok((run_file, key))
}

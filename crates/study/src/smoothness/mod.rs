//! Local smoothness along training, by sparsity: why sparse networks need more steps (Lee, Ajanthan, Torr & Jaggi 2021, section 4).
//!
//! As a kind of study of its own it takes one run at several sparsities and measures each on the way. In a study of steps-to-result the same is done
//! with the best trial of each sparsity.

mod along;
mod best;
mod file;
mod page;

pub use along::{Along, LOOK, Look, Point, along};
pub use best::of_best;
pub use file::Smoothness;
pub use page::{figure, page, table};

use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::{Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::outcomes::Outcomes;

/// What the training of one sparsity was like.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Course {
    /// The share of the candidates that is pruned.
    pub sparsity: f64,
    /// Step by step.
    #[serde(flatten)]
    pub along: Along,
}

/// Trains the run at every sparsity and measures, or takes what is in `folder` already; `report` hears of each. Paths of the study file are relative to
/// `beside`.
pub fn run(
    study: &Smoothness,
    dataset: &Arc<Dataset>,
    device: &Device,
    folder: &Path,
    beside: &Path,
    mut report: impl FnMut(&Course),
) -> Result<Vec<Course>> {
    let mut outcomes = Outcomes::open(folder)?;
    let mut courses = Vec::new();
    for &sparsity in &study.sparsities {
        let (run_file, of) = of(study, sparsity, beside)?;
        let plan = Plan::new(run_file, dataset.facts())?;
        if plan.mesh.size() > 1 {
            let problem = format!("asks for {} ranks, and smoothness is measured on one", plan.mesh.size());
            return Err(espalier_plan::Error::Conflict { field: "run.parallel".into(), problem }.into());
        }
        let course = outcomes.get_or(&of.each_ref().map(String::as_str), || {
            let found = along(plan, dataset.clone(), device, study.look, u64::MAX)?;
            let along = found.ok_or_else(|| Error::Unmeasurable { what: "the local smoothness".into() })?;
            Ok(Course { sparsity, along })
        })?;
        report(&course);
        courses.push(course);
    }
    Ok(courses)
}

/// What is known of all sparsities by now.
pub fn known(study: &Smoothness, folder: &Path, beside: &Path) -> Result<Vec<Course>> {
    let outcomes = Outcomes::read(folder)?;
    let mut courses = Vec::new();
    for &sparsity in &study.sparsities {
        let (_, of) = of(study, sparsity, beside)?;
        courses.extend(outcomes.get(&of.each_ref().map(String::as_str)).cloned());
    }
    Ok(courses)
}

/// The run at a sparsity, and what its outcome is found by.
fn of(study: &Smoothness, sparsity: f64, beside: &Path) -> Result<(RunFile, [String; 3])> {
    let mut run_file = study.run_file(sparsity)?;
    run_file.resolve_paths(beside);
    let of = ["smoothness".into(), run_file.to_toml()?, study.look.to_string()];
    Ok((run_file, of))
}

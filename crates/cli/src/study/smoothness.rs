//! `espalier study` of smoothness along training: one run at several sparsities, and a line for each.

use std::process::ExitCode;

use anyhow::Result;
use espalier_study::MeasureSchedule;
use espalier_study::smoothness::{self, SmoothnessStudy, SparsityCurve};
use espalier_study::theory::{CoefficientRatios, MeasuredConstants};
use espalier_study::{Results, Study, WorkerPool};
use espalier_tensor::Device;
use espalier_train::Error;
use serde_json::json;

use super::StudyArguments;
use super::single::{self, StudyResources};
use crate::output::{self, print_err, print_out};
use crate::run_file::{folder_of, in_file, read};

pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let study =
        SmoothnessStudy::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let seeds = if study.seeds > 1 { format!(", {} seeds each", study.seeds) } else { String::new() };
    let described = format!(
        "study {}: smoothness along training at {} sparsities{seeds}",
        study.name,
        study.sparsities.len()
    );
    let base_dir = folder_of(path)?;
    let first = || {
        let mut run_file = study.run_file(study.sparsities[0], 0).map_err(Error::Plan)?;
        run_file.resolve_paths(&base_dir);
        Ok(run_file)
    };
    let Some(opened) = single::open(arguments, &study.name, &described, first)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let StudyResources { dataset, device, folder, .. } = &opened;
    let mut dense = None;
    let curves =
        smoothness::run(&study, dataset, device, folder, &base_dir, |curve| report_curve(curve, &mut dense))?;
    let report = single::write_page(folder, &smoothness::page(&study, &curves))?;
    let found = |curve: &SparsityCurve| {
        let measured = curve.trace.measured(curve.sparsity);
        let MeasuredConstants { sparsity, mean, variance, gap, noise_scale } = measured;
        json!({
            "sparsity": sparsity, "mean": mean, "variance": variance, "gap": gap, "noise_scale": noise_scale,
            "by_seed": curve.by_seed, "initial_loss": curve.trace.initial_loss, "points": curve.trace.points,
        })
    };
    let found: Vec<_> = curves.iter().map(found).collect();
    output::answer(
        arguments.json,
        || json!({ "kind": "smoothness", "name": study.name, "smoothness": found, "report": report }),
    )
}

/// Measures the best trials of a study of steps-to-result, one after the other with all threads.
pub fn of_best(
    study: &Study,
    results: &Results,
    workers: &WorkerPool,
    schedule: MeasureSchedule,
) -> Result<Vec<SparsityCurve>> {
    let device = match workers.device() {
        Device::Cpu(_) => Device::cpu(std::thread::available_parallelism()?.get()).map_err(Error::Tensor)?,
        gpu => gpu.clone(),
    };
    print_out!("smoothness along the best trials, every {} steps:", schedule.every);
    let mut dense = None;
    let curves =
        smoothness::of_best(study, results, &workers.first().on_device(&device), schedule, |curve| {
            report_curve(curve, &mut dense);
        })?;
    if curves.is_empty() {
        print_err!(
            "note: no batch size has a trial of every sparsity that reached the goal, so none was measured"
        );
    }
    Ok(curves)
}

/// Says what was found, and remembers the dense network.
fn report_curve(curve: &SparsityCurve, dense: &mut Option<MeasuredConstants>) {
    let measured = curve.trace.measured(curve.sparsity);
    if curve.sparsity == 0.0 {
        *dense = Some(measured);
    }
    line(curve, &measured, dense.as_ref());
}

fn line(curve: &SparsityCurve, measured: &MeasuredConstants, dense: Option<&MeasuredConstants>) {
    let shown = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
    let theory = dense.filter(|_| curve.sparsity > 0.0).map_or(String::new(), |dense| {
        format!(
            "; by theory c1 is {:.2} times that of the dense network",
            CoefficientRatios::predicted(measured, dense).c1
        )
    });
    let by_seed: Vec<String> = curve.by_seed.iter().map(|mean| format!("{mean:.3}")).collect();
    let by_seed =
        if by_seed.is_empty() { String::new() } else { format!(" ({} by seed)", by_seed.join(", ")) };
    print_out!(
        "sparsity {}: mean L {:.3}{by_seed} over {} steps, gradient variance {}, loss falls by {}, critical batch by the gradient noise scale {}{theory}",
        curve.sparsity,
        measured.mean,
        curve.trace.points.len(),
        shown(measured.variance),
        shown(measured.gap),
        measured.noise_scale.map_or("-".into(), |scale| format!("{scale:.0}"))
    );
}

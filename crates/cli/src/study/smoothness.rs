//! `espalier study` of smoothness along training: one run at several sparsities, and a line for each.

use std::process::ExitCode;

use anyhow::Result;
use espalier_study::Look;
use espalier_study::smoothness::{self, Course, Smoothness};
use espalier_study::theory::{Measured, Ratios};
use espalier_study::{Results, Study, Workers};
use espalier_tensor::Device;
use espalier_train::Error;
use serde_json::json;

use super::StudyArguments;
use super::single::{self, Opened};
use crate::run_file::{folder_of, in_file, read};
use crate::say::{self, answer, say};

/// Runs the study.
pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let study =
        Smoothness::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let described =
        format!("study {}: smoothness along training at {} sparsities", study.name, study.sparsities.len());
    let beside = folder_of(path)?;
    let first = || {
        let mut run_file = study.run_file(study.sparsities[0]).map_err(Error::Plan)?;
        run_file.resolve_paths(&beside);
        Ok(run_file)
    };
    let Some(opened) = single::open(arguments, &study.name, &described, first)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let Opened { dataset, device, folder, .. } = &opened;
    let mut whole = None;
    let courses =
        smoothness::run(&study, dataset, device, folder, &beside, |course| heard(course, &mut whole))?;
    let report = single::write_page(folder, &smoothness::page(&study, &courses))?;
    if arguments.json {
        let found: Vec<_> = courses
            .iter()
            .map(|course| {
                let measured = course.along.measured(course.sparsity);
                let Measured { sparsity, mean, variance, gap, noise_scale } = measured;
                json!({
                    "sparsity": sparsity, "mean": mean, "variance": variance, "gap": gap, "noise_scale": noise_scale,
                    "points": course.along.points,
                })
            })
            .collect();
        say::json(
            &json!({ "kind": "smoothness", "name": study.name, "smoothness": found, "report": report }),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures the best trials of a study of steps-to-result, one after the other with all threads.
pub fn of_best(study: &Study, results: &Results, workers: &Workers, look: Look) -> Result<Vec<Course>> {
    let device = match workers.device() {
        Device::Cpu(_) => Device::cpu(std::thread::available_parallelism()?.get()).map_err(Error::Tensor)?,
        card => card.clone(),
    };
    answer!("smoothness along the best trials, every {} steps:", look.every);
    let mut whole = None;
    let courses = smoothness::of_best(study, results, &workers.first().on(&device), look, |course| {
        heard(course, &mut whole);
    })?;
    if courses.is_empty() {
        say!("note: no batch size has a trial of every sparsity that reached the goal, so none was measured");
    }
    Ok(courses)
}

/// Says what was found, and remembers the whole network.
fn heard(course: &Course, whole: &mut Option<Measured>) {
    let measured = course.along.measured(course.sparsity);
    if course.sparsity == 0.0 {
        *whole = Some(measured);
    }
    line(course, &measured, whole.as_ref());
}

fn line(course: &Course, measured: &Measured, whole: Option<&Measured>) {
    let shown = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
    let theory = whole.filter(|_| course.sparsity > 0.0).map_or(String::new(), |whole| {
        format!(
            "; by theory c1 is {:.2} times that of the dense network",
            Ratios::predicted(measured, whole).c1
        )
    });
    answer!(
        "sparsity {}: mean L {:.3} over {} steps, gradient variance {}, loss falls by {}, critical batch by the gradient noise scale {}{theory}",
        course.sparsity,
        measured.mean,
        course.along.points.len(),
        shown(measured.variance),
        shown(measured.gap),
        measured.noise_scale.map_or("-".into(), |scale| format!("{scale:.0}"))
    );
}

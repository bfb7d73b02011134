//! `espalier study` of a critical batch by branches: a base run, and a table for each point where branches
//! leave it.

use std::process::ExitCode;

use anyhow::Result;
use espalier_study::branch::{self, BranchOrigin, BranchPoint, BranchStudy};
use serde_json::json;

use super::StudyArguments;
use super::single::{self, StudyResources};
use crate::output::{self, print_out};
use crate::run_file::{folder_of, in_file, read};

pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let study =
        BranchStudy::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let origin = BranchOrigin::open(&study, &folder_of(path)?)?;
    let run_file = &origin.run_file;
    let described = format!(
        "study {}: {} branches of {} samples each from {}{}",
        study.name,
        study.factors.len(),
        study.samples(run_file.train.batch),
        match (&study.from, study.points()) {
            (Some(from), _) => format!("the checkpoint {}", from.display()),
            (None, 1) => "one point of a training run".into(),
            (None, points) => format!("{points} points of a training run"),
        },
        if study.seeds > 1 { format!(", with {} seeds", study.seeds) } else { String::new() }
    );
    let opened = single::open(arguments, &study.name, &described, || Ok(run_file.clone()))?;
    let Some(StudyResources { dataset, device, folder, .. }) = &opened else { return Ok(ExitCode::SUCCESS) };
    let branch_points = branch::run(&study, &origin, dataset, device, folder, table)?;
    let report = single::write_page(folder, &branch::page(&study, &branch_points))?;
    output::answer(
        arguments.json,
        || json!({ "kind": "critical-batch", "name": study.name, "forks": branch_points, "report": report }),
    )
}

fn table(branch_point: &BranchPoint) {
    let noise = branch_point.noise_scale.map_or("noise dominates the gradient".into(), |scale| {
        format!("{scale:.0} by the gradient noise scale")
    });
    print_out!(
        "after step {}: loss {:.4}; critical batch {}, {noise}",
        branch_point.step,
        branch_point.loss,
        branch_point.critical_in_words()
    );
    for branch in &branch_point.branches {
        let off = branch.uncertainty().map_or(String::new(), |off| format!(" +- {off:.4}"));
        let loss = branch.loss.map_or("diverged".into(), |loss| format!("{loss:.4}{off}"));
        print_out!(
            "  batch {:>6}, {:>5} steps, lr {:<9.3e} loss {loss}",
            branch.batch,
            branch.steps,
            branch.lr
        );
    }
}

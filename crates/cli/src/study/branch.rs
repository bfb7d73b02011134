//! `espalier study` of a critical batch by branches: a trunk, and a table for each point where it forks.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use espalier_study::branch::{self, Branching, Fork};
use espalier_train::Error;
use espalier_train::data::Dataset;
use serde_json::json;

use super::{StudyArguments, single};
use crate::say::{self, say};
use crate::train::{in_file, read};

/// Runs the study.
pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let study = Branching::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    say!(
        "study {}: {} branches of {} samples each from {} points of a training",
        study.name,
        study.factors.len(),
        study.samples,
        study.at.len()
    );
    if arguments.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let beside = single::folder_of(path)?;
    let mut run_file = study.trunk().map_err(Error::Plan)?;
    run_file.resolve_paths(&beside);
    let dataset = Arc::new(Dataset::open(&run_file).map_err(Error::Data)?);
    let device = single::open_device(&run_file)?;
    let folder = arguments.out.clone().unwrap_or_else(|| Path::new("out").join(&study.name));
    let forks = branch::run(&study, &dataset, &device, &folder, &beside, table)?;
    let report = single::write_page(&folder, &branch::page(&study, &forks))?;
    if arguments.json {
        let found = json!({ "kind": "critical-batch", "name": study.name, "forks": forks, "report": report });
        say::json(&found);
    }
    Ok(ExitCode::SUCCESS)
}

fn table(fork: &Fork) {
    let noise = fork
        .noise_scale
        .map_or("noise hides the gradient".into(), |scale| format!("{scale:.0} by the noise scale"));
    say!(
        "after step {}: loss {:.4}; critical batch {}, {noise}",
        fork.step,
        fork.loss,
        fork.critical_in_words()
    );
    for branch in &fork.branches {
        let loss = branch.loss.map_or("diverged".into(), |loss| format!("{loss:.4}"));
        say!("  batch {:>6}, {:>5} steps at {:<9.3e} loss {loss}", branch.batch, branch.steps, branch.lr);
    }
}

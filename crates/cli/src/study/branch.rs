//! `espalier study` of a critical batch by branches: a trunk, and a table for each point where it forks.

use std::process::ExitCode;

use anyhow::Result;
use espalier_study::branch::{self, Branching, Fork, Source};
use serde_json::json;

use super::StudyArguments;
use super::single::{self, Opened};
use crate::run_file::{folder_of, in_file, read};
use crate::say::{self, answer};

/// Runs the study.
pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let study = Branching::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let source = Source::open(&study, &folder_of(path)?)?;
    let run_file = &source.run_file;
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
    let Some(Opened { dataset, device, folder, .. }) = &opened else { return Ok(ExitCode::SUCCESS) };
    let forks = branch::run(&study, &source, dataset, device, folder, table)?;
    let report = single::write_page(folder, &branch::page(&study, &forks))?;
    if arguments.json {
        let found = json!({ "kind": "critical-batch", "name": study.name, "forks": forks, "report": report });
        say::json(&found);
    }
    Ok(ExitCode::SUCCESS)
}

fn table(fork: &Fork) {
    let noise = fork.noise_scale.map_or("noise dominates the gradient".into(), |scale| {
        format!("{scale:.0} by the gradient noise scale")
    });
    answer!(
        "after step {}: loss {:.4}; critical batch {}, {noise}",
        fork.step,
        fork.loss,
        fork.critical_in_words()
    );
    for branch in &fork.branches {
        let off = branch.uncertainty().map_or(String::new(), |off| format!(" +- {off:.4}"));
        let loss = branch.loss.map_or("diverged".into(), |loss| format!("{loss:.4}{off}"));
        answer!("  batch {:>6}, {:>5} steps, lr {:<9.3e} loss {loss}", branch.batch, branch.steps, branch.lr);
    }
}

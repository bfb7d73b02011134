//! `espalier study` of a generalisation gap: arms at batches, and a table of how they ended.

use std::process::ExitCode;

use anyhow::Result;
use espalier_study::gap::{self, GapOutcome, GapStudy};
use espalier_train::Error;
use serde_json::json;

use super::StudyArguments;
use super::single::{self, StudyResources};
use crate::output::{self, print_out};
use crate::run_file::{folder_of, in_file, read};

pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let gap = GapStudy::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let (batches, arms) = (gap.batches.len(), gap.arms.len());
    let described =
        format!("study {}: {batches} batch sizes, {arms} arms, {} runs in all", gap.name, gap.runs());
    let base_dir = folder_of(path)?;
    let first = || {
        let mut run_file = gap.run_file(gap.batches[0], &gap.arms[0], 0).map_err(Error::Plan)?;
        run_file.resolve_paths(&base_dir);
        Ok(run_file)
    };
    let Some(opened) = single::open(arguments, &gap.name, &described, first)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let StudyResources { dataset, device, folder, .. } = &opened;
    print_out!(
        "{:>7} {:<18} {:>5} {:>6} {:>9} {:>9} {:>7} {:>10} {:>10}",
        "batch",
        "arm",
        "seed",
        "steps",
        "loss",
        "val loss",
        "error",
        "eigenvalue",
        "sharpness"
    );
    let outcomes = gap::run(&gap, dataset, device, folder, &base_dir, line)?;
    let report = single::write_page(folder, &gap::page(&gap, &outcomes))?;
    output::answer(
        arguments.json,
        || json!({ "kind": "generalisation-gap", "name": gap.name, "runs": outcomes, "report": report }),
    )
}

fn line(outcome: &GapOutcome) {
    let GapOutcome { batch, arm, seed, steps, reached, ended } = outcome;
    let missed = if *reached == Some(false) { "  (loss not reached)" } else { "" };
    match ended {
        None => print_out!("{batch:>7} {arm:<18} {seed:>5} {steps:>6}  diverged"),
        Some(ended) => print_out!(
            "{batch:>7} {arm:<18} {seed:>5} {steps:>6} {:>9.4} {:>9.4} {:>5.1} % {:>10.3} {:>8.3} %{missed}",
            ended.training_loss,
            ended.validation_loss,
            100.0 * ended.error,
            ended.eigenvalue,
            ended.sharpness
        ),
    }
}

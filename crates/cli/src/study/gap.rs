//! `espalier study` of a generalisation gap: arms at batches, and a table of how they ended.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use espalier_data::Dataset;
use espalier_study::gap::{self, Gap, Outcome};
use espalier_train::Error;
use serde_json::json;

use super::{StudyArguments, live, single};
use crate::run_file::{in_file, read};
use crate::say::{self, answer, say};

/// Runs the study.
pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    let path = &arguments.study_file;
    let gap = Gap::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let (batches, arms) = (gap.batches.len(), gap.arms.len());
    let described =
        format!("study {}: {batches} batch sizes, {arms} arms, {} runs in all", gap.name, gap.runs());
    if arguments.dry_run {
        answer!("{described}");
        return Ok(ExitCode::SUCCESS);
    }
    say!("{described}");
    let beside = single::folder_of(path)?;
    let mut run_file = gap.run_file(gap.batches[0], &gap.arms[0], 0).map_err(Error::Plan)?;
    run_file.resolve_paths(&beside);
    let dataset = Arc::new(Dataset::open(&run_file).map_err(Error::Data)?);
    let device = single::open_device(&run_file)?;
    let folder = arguments.out.clone().unwrap_or_else(|| Path::new("out").join(&gap.name));
    let _claim = single::claim(arguments, &folder)?;
    live::begin(arguments, &folder)?;
    answer!(
        "{:>7} {:<18} {:>5} {:>6} {:>9} {:>9} {:>7} {:>10}",
        "batch",
        "arm",
        "seed",
        "steps",
        "training",
        "held out",
        "wrong",
        "sharpness"
    );
    let outcomes = gap::run(&gap, &dataset, &device, &folder, &beside, line)?;
    let report = single::write_page(&folder, &gap::page(&gap, &outcomes))?;
    if arguments.json {
        say::json(
            &json!({ "kind": "generalisation-gap", "name": gap.name, "runs": outcomes, "report": report }),
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn line(outcome: &Outcome) {
    let Outcome { batch, arm, seed, steps, ended } = outcome;
    match ended {
        None => answer!("{batch:>7} {arm:<18} {seed:>5} {steps:>6}  diverged"),
        Some(ended) => answer!(
            "{batch:>7} {arm:<18} {seed:>5} {steps:>6} {:>9.4} {:>9.4} {:>5.1} % {:>8.3} %",
            ended.training_loss,
            ended.validation_loss,
            100.0 * ended.error,
            ended.sharpness
        ),
    }
}

//! `espalier verify`: which checkpoints of a run folder are complete, and what is wrong with the others. It
//! changes nothing.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_train::Error;
use espalier_train::checkpoint::{Checkpoint, Checkpoints};
use espalier_train::parallel::Ranks;
use serde::Serialize;
use serde_json::json;

use crate::output::{self, print_out};

#[derive(Args)]
#[command(
    after_help = "Compares the hash of every file. Exit code 0: all checkpoints are intact; 2: one is damaged, or there is no such folder.

Examples:
  espalier verify out/hello
  espalier verify out/hello/checkpoints/step-000300
  espalier verify out/hello --json"
)]
pub struct VerifyArguments {
    /// A run folder, or one checkpoint folder.
    run: PathBuf,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// One checkpoint, and what is wrong with it; the fields are promised in the contract of the command line.
#[derive(Serialize)]
struct VerifiedCheckpoint {
    step: u64,
    whole: bool,
    problem: Option<String>,
    path: String,
}

pub fn verify(arguments: &VerifyArguments) -> Result<ExitCode> {
    let mut verified = Vec::new();
    for (step, path) in found(arguments)? {
        let problem = match Checkpoint::read(&path, &Ranks::single()) {
            Ok(_) => None,
            // A run that goes on has removed it meanwhile.
            Err(_) if !path.exists() => continue,
            Err(Error::Checkpoint { why, .. }) => Some(why),
            Err(other) => return Err(other.into()),
        };
        let path = path.display().to_string();
        match &problem {
            None => print_out!("step {step:>6}: intact"),
            Some(why) => print_out!("step {step:>6}: damaged: {path}: {why}"),
        }
        verified.push(VerifiedCheckpoint { step, whole: problem.is_none(), problem, path });
    }
    let newest = verified.iter().filter(|one| one.whole).map(|one| one.step).max();
    match newest {
        Some(step) => print_out!("--resume would continue after step {step}"),
        None if verified.is_empty() => print_out!("there is no checkpoint yet"),
        None => print_out!("no intact checkpoint is left"),
    }
    output::json(arguments.json, || json!({ "checkpoints": verified, "newest_whole": newest }));
    let damaged = verified.iter().any(|one| !one.whole);
    Ok(ExitCode::from(if damaged { 2 } else { 0 }))
}

/// What there is to verify, oldest first.
fn found(arguments: &VerifyArguments) -> Result<Vec<(u64, PathBuf)>> {
    let run = &arguments.run;
    let inside = Checkpoints::of_run(run).numbered()?;
    if !inside.is_empty() {
        return Ok(inside);
    }
    if let Some(step) = Checkpoints::step_of(run).filter(|_| run.is_dir()) {
        return Ok(vec![(step, run.clone())]);
    }
    if run.join("run.toml").exists() || run.join("checkpoints").exists() {
        return Ok(inside);
    }
    if !run.exists() {
        return Err(Error::File { path: run.clone(), why: "there is no such folder".into() }.into());
    }
    let why = "there is no run here (no run.toml and no checkpoints), and it is not a checkpoint folder";
    Err(Error::File { path: run.clone(), why: why.into() }.into())
}

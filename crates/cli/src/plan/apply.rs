//! A run file with the chosen layout in it, which `espalier train` takes as it is.

use std::path::Path;

use anyhow::Result;
use espalier_data::Dataset;
use espalier_plan::simulate::Estimate;
use espalier_train::Error;

use super::{PlanArguments, PlanRequest};
use crate::output::print_err;
use crate::output_file::{OutputFile, may_replace};
use crate::run_file::{conflict, in_file, resolve};

/// Stands in the first line of every run file that is written here.
const MARK: &str = " by `espalier plan`: ";

/// Finds out whether it can be written. The run file that is planned for, and others that were not written
/// here, are not written over unless that is asked for.
pub fn open(arguments: &PlanArguments, file: &Path) -> Result<OutputFile> {
    if arguments.engine != ["espalier"] {
        let problem = format!(
            "writes a run file of this program, but `--engine` is \"{}\"",
            arguments.engine.join(",")
        );
        return Err(conflict("--apply", &problem).into());
    }
    if !arguments.force {
        let [source, target] = [arguments.run_file(), file].map(|path| path.canonicalize().ok());
        if source.is_some() && source == target {
            let why = "it is the run file that is planned for: choose another name, or add --force";
            return Err(Error::File { path: file.into(), why: why.into() }.into());
        }
        may_replace(file, "run file of `espalier plan --apply`", is_ours, "add --force")?;
    }
    OutputFile::open(file, "--apply")
}

fn is_ours(head: &[u8]) -> bool {
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"# ") && line.windows(MARK.len()).any(|bytes| bytes == MARK.as_bytes())
}

/// Writes it; what stands in the run file of other layouts goes.
pub fn write(request: &PlanRequest, best: &Estimate, output: &OutputFile) -> Result<()> {
    let candidate = &best.candidate;
    let (arguments, source) = (request.arguments, request.arguments.run_file());
    let run_file = request.run.read().map_err(|error| in_file(source, error))?;
    let mut laid_out = candidate.applied(&run_file).map_err(Error::Plan)?;
    // What it was planned by is what its steps are predicted by; a file is meant from where we stand.
    laid_out.device.cluster = match Path::new(&request.source) {
        file if file.is_file() => Some(std::path::absolute(file)?),
        name if arguments.cluster.is_some() => Some(name.to_owned()),
        _ => laid_out.device.cluster,
    };
    // What is written is what a run would take: nothing in it may be refused.
    let checked = resolve(laid_out.clone(), source)?;
    let facts = Dataset::facts_of(&checked).map_err(Error::Data)?;
    espalier_plan::Plan::new(checked.clone(), facts).map_err(Error::Plan)?;
    let written = checked.to_toml().map_err(Error::Plan)?;
    output.finish(&format!("# {}{MARK}{candidate}\n\n{written}", laid_out.model.name))?;
    let file = arguments.apply.as_deref().unwrap_or(output.file()).display();
    print_err!("{file} has the first layout: {candidate}; run it with `espalier train {file}`");
    Ok(())
}

//! A run file with the chosen layout in it, which `espalier train` takes as it is.

use std::path::Path;

use anyhow::Result;
use espalier_data::Dataset;
use espalier_plan::config::RunFile;
use espalier_plan::simulate::Estimate;
use espalier_train::Error;

use super::PlanArguments;
use crate::say::say;
use crate::train::{conflict, in_file, resolve};

/// Writes it; what stands in the run file of other layouts goes.
pub fn write(text: &str, arguments: &PlanArguments, best: &Estimate, file: &Path) -> Result<()> {
    let candidate = &best.candidate;
    if arguments.engine != "espalier" {
        let problem = format!("writes a run of ours, but `--engine` is \"{}\"", arguments.engine);
        return Err(conflict("--apply", &problem).into());
    }
    let source = arguments.run_file();
    let run_file = RunFile::parse(text, &arguments.overrides).map_err(|error| in_file(source, error))?;
    let laid_out = candidate.applied(&run_file).map_err(Error::Plan)?;
    // What is written is what a run would take: nothing in it may be refused.
    let checked = resolve(laid_out.clone(), source)?;
    let facts = Dataset::facts_of(&checked).map_err(Error::Data)?;
    espalier_plan::Plan::new(checked.clone(), facts).map_err(Error::Plan)?;
    let written = checked.to_toml().map_err(Error::Plan)?;
    let why =
        |why| Error::File { path: file.to_owned(), why: format!("the run file cannot be written: {why}") };
    std::fs::write(file, format!("# {} by `espalier plan`: {candidate}\n\n{written}", laid_out.model.name))
        .map_err(why)?;
    say!(
        "{} has the first layout: {candidate}; run it with `espalier train {}`",
        file.display(),
        file.display()
    );
    Ok(())
}

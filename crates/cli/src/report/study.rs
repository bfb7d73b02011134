//! The page of a study, from its folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use espalier_study::StudyFolder;
use serde_json::json;

use super::{ReportArguments, ReportFormat};
use crate::output::{self, print_out};
use crate::output_file::OutputFile;
use crate::run_file::conflict;
use crate::study::live;
use crate::watch::watch;

/// Writes or serves it.
pub fn report(arguments: &ReportArguments, folder: &Path) -> Result<ExitCode> {
    refuse_others(arguments, "a study")?;
    let mut study = StudyFolder::open(folder)?;
    let what = format!("study {}", study.name());
    if let Some(address) = &arguments.serve {
        return watch(address, &what, live::page(study));
    }
    let page = match (&arguments.out, &arguments.svg) {
        (Some(out), _) => Some(out.clone()),
        (None, Some(_)) => None,
        (None, None) => Some(folder.join("study.html")),
    };
    let outputs = [open(ReportFormat::Page, &page)?, open(ReportFormat::Picture, &arguments.svg)?];
    let (done, all, of) = study.progress()?;
    print_out!("{what}: {done} of {all} {of}");
    if let [Some(output), _] = &outputs {
        output.finish(&study.page()?.html())?;
        print_out!("page: {}", output.file().display());
    }
    if let [_, Some(output)] = &outputs {
        output.finish(&study.figure()?.svg())?;
        print_out!("picture: {}", output.file().display());
    }
    if arguments.json {
        let (page, svg) = (&page, &arguments.svg);
        let mut value =
            json!({ "study": study.name(), "finished": done, "of": all, "page": page, "svg": svg });
        if let Some((_, summary)) = study.steps_to_result()? {
            (value["cells"], value["fits"]) = (json!(summary.cells), json!(summary.fits));
        }
        output::json(&value);
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds out whether a file can be written, where one is asked for.
pub fn open(form: ReportFormat, file: &Option<PathBuf>) -> Result<Option<OutputFile>> {
    let Some(file) = file else { return Ok(None) };
    form.may_replace(file)?;
    Ok(Some(OutputFile::open(file, form.flag())?))
}

/// A study or a plan stands alone, and is no table over steps.
pub fn refuse_others(arguments: &ReportArguments, what: &str) -> Result<()> {
    if arguments.runs.len() > 1 {
        let problem = format!("is several folders with {what} among them: give {what} by itself");
        return Err(conflict("RUN", &problem).into());
    }
    let given = [
        ("--csv", arguments.csv.is_some()),
        ("--tensorboard", arguments.tensorboard.is_some()),
        ("--trace", arguments.trace.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(conflict(option, &format!("is for runs, and this is {what}")).into()),
        None => Ok(()),
    }
}

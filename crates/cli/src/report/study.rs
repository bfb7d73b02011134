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
    refuse_others(arguments)?;
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
    let open = |form: ReportFormat, file: &Option<PathBuf>| -> Result<Option<OutputFile>> {
        let Some(file) = file else { return Ok(None) };
        form.may_replace(file)?;
        Ok(Some(OutputFile::open(file, form.flag())?))
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
        output::json(
            &json!({ "study": study.name(), "finished": done, "of": all, "page": page, "svg": svg }),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A study stands alone, and is no table over steps.
fn refuse_others(arguments: &ReportArguments) -> Result<()> {
    if arguments.runs.len() > 1 {
        return Err(
            conflict("RUN", "is several folders with a study among them: give a study by itself").into()
        );
    }
    let given = [
        ("--csv", arguments.csv.is_some()),
        ("--tensorboard", arguments.tensorboard.is_some()),
        ("--trace", arguments.trace.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(conflict(option, "is for runs, and this is a study").into()),
        None => Ok(()),
    }
}

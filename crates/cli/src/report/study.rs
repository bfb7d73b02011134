//! The page of a study, or of several beside each other, from their folders.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use espalier_study::StudyFolder;
use serde_json::json;

use super::{ReportArguments, ReportFiles, ReportFormat};
use crate::output::{self, print_out};
use crate::run_file::{conflict, refuse_options};
use crate::study::live;
use crate::watch::watch;

/// Writes several studies beside each other.
pub fn compare(arguments: &ReportArguments) -> Result<ExitCode> {
    let several = "several studies";
    refuse_tables(arguments, several)?;
    refuse_options(
        &[("--serve", arguments.serve.is_some())],
        &format!("is for one study, and these are {several}"),
    )?;
    let mut studies: Vec<StudyFolder> =
        arguments.runs.iter().map(|folder| StudyFolder::open(folder)).collect::<Result<_, _>>()?;
    let outputs = ReportFiles::open(arguments, "report.html".into())?;
    let mut all = Vec::new();
    for study in &mut studies {
        let (finished, of, what) = study.progress()?;
        print_out!("study {}: {finished} of {of} {what}", study.name());
        let mut value = json!({ "study": study.name(), "finished": finished, "of": of });
        if let Some((_, summary)) = study.steps_to_result()? {
            (value["cells"], value["fits"]) = (json!(summary.cells), json!(summary.fits));
        }
        all.push(value);
    }
    outputs.write(|form| {
        Ok(match form {
            ReportFormat::Page => StudyFolder::compare(&mut studies)?.html(),
            _ => StudyFolder::compared_figure(&mut studies)?.svg(),
        })
    })?;
    output::answer(arguments.json, || json!({ "studies": all, "page": outputs.page, "svg": arguments.svg }))
}

/// Writes or serves it.
pub fn report(arguments: &ReportArguments, folder: &Path) -> Result<ExitCode> {
    refuse_others(arguments, "a study")?;
    let mut study = StudyFolder::open(folder)?;
    let what = format!("study {}", study.name());
    if let Some(address) = &arguments.serve {
        return watch(address, &what, live::page(study));
    }
    let outputs = ReportFiles::open(arguments, folder.join("study.html"))?;
    let (done, all, of) = study.progress()?;
    print_out!("{what}: {done} of {all} {of}");
    outputs.write(|form| {
        Ok(match form {
            ReportFormat::Page => study.page()?.html(),
            _ => study.figure()?.svg(),
        })
    })?;
    let steps_to_result = if arguments.json { study.steps_to_result()? } else { None };
    output::answer(arguments.json, || {
        let (page, svg) = (&outputs.page, &arguments.svg);
        let mut value =
            json!({ "study": study.name(), "finished": done, "of": all, "page": page, "svg": svg });
        if let Some((_, summary)) = steps_to_result {
            (value["cells"], value["fits"]) = (json!(summary.cells), json!(summary.fits));
        }
        value
    })
}

/// A study or a plan stands alone, and is no table over steps.
pub fn refuse_others(arguments: &ReportArguments, what: &str) -> Result<()> {
    if arguments.runs.len() > 1 {
        let problem = format!("is several folders with {what} among them: give {what} by itself");
        return Err(conflict("RUN", &problem).into());
    }
    refuse_tables(arguments, what)
}

/// What is over steps is a run's.
fn refuse_tables(arguments: &ReportArguments, what: &str) -> Result<()> {
    let options = [
        ("--csv", arguments.csv.is_some()),
        ("--tensorboard", arguments.tensorboard.is_some()),
        ("--trace", arguments.trace.is_some()),
    ];
    refuse_options(&options, &format!("is for runs, not for {what}"))
}

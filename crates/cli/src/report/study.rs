//! The page of a study, from its folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use espalier_study::StudyFolder;
use serde_json::json;

use super::{Form, ReportArguments};
use crate::draft::Draft;
use crate::run_file::conflict;
use crate::say::{self, answer};
use crate::study::live;
use crate::watch::watch;

/// Writes or serves it.
pub fn report(arguments: &ReportArguments, folder: &Path) -> Result<ExitCode> {
    refuse_others(arguments)?;
    let mut shown = StudyFolder::open(folder)?;
    let what = format!("study {}", shown.name());
    if let Some(address) = &arguments.serve {
        return watch(address, &what, live::page(shown));
    }
    let page = match (&arguments.out, &arguments.svg) {
        (Some(out), _) => Some(out.clone()),
        (None, Some(_)) => None,
        (None, None) => Some(folder.join("study.html")),
    };
    let open = |form: Form, file: &Option<PathBuf>| -> Result<Option<Draft>> {
        let Some(file) = file else { return Ok(None) };
        form.may_replace(file)?;
        Ok(Some(Draft::open(file, form.flag())?))
    };
    let drafts = [open(Form::Page, &page)?, open(Form::Picture, &arguments.svg)?];
    let (done, all, of) = shown.progress()?;
    answer!("{what}: {done} of {all} {of}");
    if let [Some(draft), _] = &drafts {
        draft.finish(&shown.page()?.html())?;
        answer!("page: {}", draft.file().display());
    }
    if let [_, Some(draft)] = &drafts {
        draft.finish(&shown.figure()?.svg())?;
        answer!("picture: {}", draft.file().display());
    }
    if arguments.json {
        let (page, svg) = (&page, &arguments.svg);
        say::json(&json!({ "study": shown.name(), "finished": done, "of": all, "page": page, "svg": svg }));
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

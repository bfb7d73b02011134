//! What a study shows whoever reads its folder: what it is, and, with `--serve`, its page while it runs.

use std::path::Path;

use anyhow::Result;
use espalier_report::Page;
use espalier_study::folder::{self, StudyFolder};
use espalier_train::Error;

use super::StudyArguments;
use crate::run_file::{folder_of, read};
use crate::watch::watch_beside;

/// Writes down what a study is that is about to run in its folder, and serves its page from now on where that
/// was asked for. Its results are read from the folder, as by anybody: what runs does not know of it.
pub fn begin(arguments: &StudyArguments, folder: &Path) -> Result<()> {
    let path = &arguments.study_file;
    folder::write_study_json(folder, &read(path)?, &arguments.overrides, &folder_of(path)?)?;
    if let Some(address) = &arguments.serve {
        let study = StudyFolder::open(folder)?;
        let what = format!("study {}", study.name());
        watch_beside(address, &what, page(study))?;
    }
    Ok(())
}

/// The page of a study as it is at every call; where it cannot be made, why.
pub fn page(mut study: StudyFolder) -> impl FnMut() -> Page + Send + 'static {
    move || study.page().unwrap_or_else(|error| unshown(study.name(), &error))
}

fn unshown(name: &str, error: &Error) -> Page {
    let mut page = Page::new(format!("Study {name}"));
    page.note(format!("cannot be shown now: {error}"));
    page
}

//! The files that a plan writes: whether they can be written is known before the search begins.

use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_report::Figure;
use espalier_train::Error;

use super::{PlanArguments, apply};
use crate::output_file::{OutputFile, may_replace};
use crate::time_to_result;

/// What is to be written, opened before the search begins.
pub struct OutputFiles {
    pub apply: Option<OutputFile>,
    pub trace: Option<OutputFile>,
    pub svg: Option<OutputFile>,
    /// The answer of a time to a result.
    pub save: Option<OutputFile>,
}

impl OutputFiles {
    pub fn open(arguments: &PlanArguments) -> Result<OutputFiles> {
        let open = |file: &Option<PathBuf>, flag: &str, may: &dyn Fn(&Path) -> Result<()>| {
            let Some(file) = file else { return Ok(None) };
            if !arguments.force {
                may(file)?;
            }
            OutputFile::open(file, flag).map(Some)
        };
        let may_draw =
            |file: &Path| may_replace(file, "figure of this program", Figure::is_figure, "add --force");
        let may_trace = |file: &Path| {
            let refused = |why| Error::File { path: file.to_owned(), why };
            Ok(espalier_train::run::trace::may_replace(file).map_err(refused)?)
        };
        let may_save = |file: &Path| may_replace(file, "plan", time_to_result::is_ours, "add --force");
        let save = arguments.result.save.as_deref().map(time_to_result::file_in);
        Ok(OutputFiles {
            apply: arguments.apply.as_ref().map(|file| apply::open(arguments, file)).transpose()?,
            trace: open(&arguments.trace, "--trace", &may_trace)?,
            svg: open(&arguments.svg, "--svg", &may_draw)?,
            save: open(&save, "--save", &may_save)?,
        })
    }
}

//! Run files as every command reads them, and the errors of those who contradict them.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::Axis;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_train::{Error, run};

/// How many replicas of a run file's other axes so many ranks are.
pub fn replicas(run: &RunTable, path: &Path, ranks: usize) -> Result<usize> {
    let axis_sizes = run.replica().map_err(|error| in_file(path, error))?;
    let used = Axis::ALL.into_iter().filter(|axis| axis_sizes[*axis] > 1);
    let each = used.clone().fold(1, |product: usize, axis| product.saturating_mul(axis_sizes[axis]));
    if ranks > 0 && !ranks.is_multiple_of(each) {
        let fields: Vec<String> =
            used.map(|axis| format!("`parallel.{axis}` = {}", axis_sizes[axis])).collect();
        let product = if fields.len() == 1 { String::new() } else { format!(", {each} ranks together") };
        let problem = format!(
            "is {ranks}, but {}{product}: it must be a multiple of {}",
            fields.join(" and "),
            if fields.len() == 1 { "that".into() } else { each.to_string() },
        );
        return Err(conflict("--ranks", &problem).into());
    }
    Ok(ranks / each)
}

/// A run file, with overrides put in.
pub fn open(path: &Path, overrides: &[Override]) -> Result<RunTable> {
    Ok(RunTable::parse(&read(path)?, overrides).map_err(|error| in_file(path, error))?)
}

/// The text of a run file.
pub fn read(path: &Path) -> Result<String> {
    let why = |why: io::Error| Error::of_io(path, &why, format!("the run file cannot be read: {why}"));
    Ok(regular_file::read_text(path, SETTINGS).map_err(why)?)
}

/// The text of the run file in a run folder, which must be as the run wrote it.
pub fn read_run(path: &Path) -> Result<String> {
    let missing = || Error::File { path: path.to_owned(), why: "the run file is not there".into() };
    Ok(run::read_resolved(path)?.ok_or_else(missing)?)
}

/// An error of a run file's text; one that names only a line gets the file's name.
pub fn in_file(path: &Path, error: espalier_plan::Error) -> Error {
    match error {
        espalier_plan::Error::Syntax { .. } => Error::File { path: path.to_owned(), why: error.to_string() },
        error => Error::Plan(error),
    }
}

/// An argument that contradicts another, or the run file.
pub fn conflict(field: &str, problem: &str) -> Error {
    Error::Plan(espalier_plan::Error::Conflict { field: field.into(), problem: problem.into() })
}

/// Refuses options that are given where nothing would come of them.
pub fn refuse_options(options: &[(&str, bool)], problem: &str) -> Result<()> {
    match options.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => Err(conflict(option, problem).into()),
        None => Ok(()),
    }
}

/// A run file with the paths that it means, standing at `path`, and the schedule that it names.
pub fn resolve(mut run_file: RunFile, path: &Path) -> Result<RunFile> {
    run_file.resolve_paths(&folder_of(path)?);
    if let Some(path) = run_file.schedule_file().map(Path::to_owned) {
        let why = |why: io::Error| Error::of_io(&path, &why, format!("the schedule cannot be read: {why}"));
        run_file
            .bring_schedule(&regular_file::read_text(&path, SETTINGS).map_err(why)?)
            .map_err(Error::Plan)?;
    }
    Ok(run_file)
}

/// The folder that a file stands in.
pub fn folder_of(file: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(file)?;
    Ok(absolute.parent().expect("a file that was read stands in a folder").to_owned())
}

//! `espalier runs`: which runs a folder holds, and how far each has come.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Result;
use clap::Args;
use espalier_report::number;
use espalier_train::Error;
use serde_json::json;

use crate::output::{self, print_out};
use crate::records::RunRecord;
use crate::text_table::TextTable;

/// How deep runs are looked for below the folder.
const DEPTH: usize = 3;

#[derive(Args)]
#[command(
    after_help = "The newest run comes last. A run is a folder with a run.toml, at most three levels below the given folder.

Examples:
  espalier runs
  espalier runs out/study --json"
)]
pub struct RunsArguments {
    /// Folder to search.
    #[arg(value_name = "DIR", default_value = "out")]
    folder: PathBuf,
    /// Print the list as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// A run, and when it was last written to.
struct ListedRun {
    run: RunRecord,
    written: Option<SystemTime>,
}

pub fn runs(arguments: &RunsArguments) -> Result<ExitCode> {
    let folder = &arguments.folder;
    let mut folders = Vec::new();
    let refused = |error: io::Error| {
        let why = match error.kind() {
            ErrorKind::NotFound => "there is no such folder".into(),
            _ => format!("the folder cannot be read: {error}"),
        };
        Error::of_io(folder, &error, why)
    };
    fs::read_dir(folder).map_err(refused)?;
    find(folder, DEPTH, &mut folders);
    let mut found = folders.iter().map(|path| open(folder, path)).collect::<Result<Vec<ListedRun>>>()?;
    found.sort_by(|a, b| (a.written, &a.run.name).cmp(&(b.written, &b.run.name)));
    match found.is_empty() {
        true => print_out!("no runs in {}", folder.display()),
        false => output::on_standard_output(table(&found)),
    }
    let of = |found: &ListedRun| {
        let mut json = found.run.json();
        let since = found.written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        json["written"] = json!(since.map(|since| since.as_secs_f64()));
        json
    };
    output::answer(arguments.json, || json!({ "runs": found.iter().map(of).collect::<Vec<_>>() }))
}

/// A run does not lie within another: what was put aside of it is not looked for.
fn find(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if folder.join("run.toml").is_file() {
        found.push(folder.into());
        return;
    }
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    // Links are not followed: they may lead back.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    if depth > 0 {
        folders.for_each(|entry| find(&entry.path(), depth - 1, found));
    }
}

fn open(folder: &Path, path: &Path) -> Result<ListedRun> {
    let mut run = RunRecord::open(path)?;
    if let Ok(below) = path.strip_prefix(folder)
        && !below.as_os_str().is_empty()
    {
        run.name = below.display().to_string();
    }
    let time = |name: &str| fs::metadata(path.join(name)).and_then(|found| found.modified()).ok();
    let written = ["metrics.jsonl", "run.toml"].into_iter().filter_map(time).max();
    Ok(ListedRun { run, written })
}

fn table(found: &[ListedRun]) -> String {
    let head = ["run", "model", "state", "steps", "loss", "validation", "sparsity", "updated"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for ListedRun { run, written } in found {
        let number = |value: Option<f64>| value.map_or("-".into(), number::short);
        let age = written.and_then(|time| time.elapsed().ok()).map(|age| age.as_secs_f64().round());
        rows.push(vec![
            run.name.clone(),
            run.model().unwrap_or("-").into(),
            run.state().into(),
            run.progress(),
            number(run.loss()),
            number(run.validation().and_then(|validation| validation.loss)),
            if run.sparsity() > 0.0 { number::percent(run.sparsity()) } else { "-".into() },
            age.map_or("-".into(), |age| format!("{} ago", number::seconds(age))),
        ]);
    }
    TextTable::new(&rows).render(output::width())
}

//! A run that goes on: whether it still is the run that it was.
//!
//! The run folder's resolved file says what the run was. What differs from it and would change what is learnt
//! must be allowed by name, since a forgotten `--set` would otherwise go unnoticed for the rest of the run;
//! the file that was true until then is kept beside the new one. The same holds for what the data files held,
//! which is in `data.json`: a file that was moved is the same, one that was written anew under its old name
//! is not.

use std::fs;
use std::path::Path;

use espalier_data::Fingerprint;
use espalier_data::regular_file::{self, RECORDS};
use espalier_plan::RunFile;
use espalier_plan::config::{FieldChange, covers};
use espalier_plan::plan::ResolvedRun;

use super::{Observer, write};
use crate::checkpoint::retry;
use crate::resolved::{DATA_FILE, RUN_FILE, read_resolved};
use crate::{Error, Result, checksum, is_failure};

/// What the run in a folder was.
#[derive(Debug)]
pub struct PreviousRun {
    text: String,
    /// None where this program cannot read it.
    run: Option<RunFile>,
    /// What `data.json` was; none where there was none.
    data: Option<String>,
}

impl PreviousRun {
    /// Compares what the run in `folder` was with what it is to be. An error names what would change the
    /// result, unless `allow` has the field or its section. `current` is what the data files hold now.
    pub fn compare(
        folder: &Path,
        run: &ResolvedRun,
        current: Option<&Fingerprint>,
        allow: &[String],
        observer: &mut dyn Observer,
    ) -> Result<PreviousRun> {
        let (path, data_path) = (folder.join(RUN_FILE), folder.join(DATA_FILE));
        let text = read_resolved(&path)?.ok_or_else(|| Error::file(&path, "is not there"))?;
        let was = match RunFile::parse(&text, &[]) {
            Ok(was) => was,
            // It may be of another version, and what it trained need not be lost for that.
            Err(why) => {
                observer.warning(&format!("{}: {why}; so the original settings are unknown", path.display()));
                return Ok(PreviousRun { text, run: None, data: None });
            }
        };
        let data = match retry(|| regular_file::read_text(&data_path, RECORDS)) {
            Err(why) if is_failure(&why) => return Err(Error::unread(data_path, why)),
            read => read.ok(),
        };
        let recorded: Option<Fingerprint> = data.as_deref().and_then(|text| serde_json::from_str(text).ok());
        let data_change =
            current.zip(recorded.as_ref()).and_then(|(current, recorded)| current.change_since(recorded));
        if current.is_some() && recorded.is_none() {
            let why = "the earlier contents of the data files are unknown, so changes cannot be detected";
            observer.note(&format!("{}: {why}", data_path.display()));
        }
        // Data that were moved are the same wherever they are.
        let same_data = current.is_some() && recorded.is_some() && data_change.is_none();
        let changes = run.changes(&was, |a, b| same_data || same_file(a, b)).map_err(Error::Plan)?;
        // Other fields of the data bring other files: that is one change, by the name of the field.
        let other_data = changes.iter().any(|change| change.field.starts_with("data."));
        if let Some(change) = data_change.filter(|_| !other_data) {
            if !allow.iter().any(|name| name == "data") {
                let why = format!(
                    "the data files {change}, which would make it a different run; if you mean it, add --allow data"
                );
                return Err(Error::file(data_path, why));
            }
            observer.note(&format!("the data files {change}, from here on"));
        }
        let (allowed, refused): (Vec<&FieldChange>, Vec<&FieldChange>) = changes
            .iter()
            .filter(|change| change.changes_result)
            .partition(|change| allow.iter().any(|name| covers(name, &change.field)));
        if !refused.is_empty() {
            let clauses: Vec<String> = refused.iter().map(|change| change.to_string()).collect();
            let flags: String = refused.iter().map(|change| format!(" --allow {}", change.field)).collect();
            let why = format!(
                "{}, which would make it a different run; if you mean it, add{flags}",
                clauses.join(", ")
            );
            return Err(Error::file(path, why));
        }
        for change in allowed {
            observer.note(&format!("{change} from here on"));
        }
        Ok(PreviousRun { text, run: Some(was), data })
    }

    /// Says what another length does to a run of which `done` steps are behind.
    pub(crate) fn note_length(
        &self,
        run: &ResolvedRun,
        done: u64,
        samples: usize,
        observer: &mut dyn Observer,
    ) {
        if let Some(note) = self.run.as_ref().and_then(|was| run.new_length(was, done, samples)) {
            observer.note(&note);
        }
    }

    /// How often the run wrote a line of `metrics.jsonl`.
    pub(super) fn log_every(&self) -> u64 {
        self.run.as_ref().map_or(1, |was| was.train.log_every as u64)
    }

    /// Keeps the files that were true until `step`, where others take their place.
    pub(super) fn keep(&self, folder: &Path, step: u64, text: &str, data: Option<&str>) -> Result<()> {
        if self.text != text {
            keep(folder, step, "run", "toml", &checksum::add_to_toml(&self.text))?;
        }
        match &self.data {
            Some(was) if data != Some(was) => keep(folder, step, "data", "json", was),
            _ => Ok(()),
        }
    }
}

/// `run-to-step-000300.toml`, or a name with a number behind it where another file has that name.
fn keep(folder: &Path, step: u64, stem: &str, extension: &str, text: &str) -> Result<()> {
    for number in 1.. {
        let again = if number == 1 { String::new() } else { format!("-{number}") };
        let name = format!("{stem}-to-step-{step:06}{again}.{extension}");
        match regular_file::read_text(&folder.join(&name), RECORDS) {
            Ok(kept) if kept == text => return Ok(()),
            Ok(_) => continue,
            Err(_) => return write(folder, &name, text),
        }
    }
    unreachable!("numbers have no end")
}

/// Whether two paths lead to the same file or folder.
fn same_file(a: &str, b: &str) -> bool {
    fs::canonicalize(a).is_ok_and(|a| fs::canonicalize(b).is_ok_and(|b| a == b))
}

//! A run that goes on: whether it still is the run that it was.
//!
//! The run folder's resolved file says what the run was. What differs from it and would change what is learnt must be allowed
//! by name, since a forgotten `--set` would otherwise go unnoticed for the rest of the run; the file that was true until then
//! is kept beside the new one.

use std::fs;
use std::path::Path;

use espalier_plan::RunFile;
use espalier_plan::config::{Change, covers};

use super::{Observer, RUN_FILE, write};
use crate::{Error, Result};

/// What the run in a folder was.
#[derive(Debug)]
pub struct Resumed {
    text: String,
    /// None where this program cannot read it.
    run: Option<RunFile>,
}

impl Resumed {
    /// Compares what the run in `folder` was with what it is to be. An error names what would change the result, unless
    /// `allow` has the field or its section.
    pub fn compare(
        folder: &Path,
        run: &RunFile,
        allow: &[String],
        observer: &mut dyn Observer,
    ) -> Result<Resumed> {
        let path = folder.join(RUN_FILE);
        let text = fs::read_to_string(&path).map_err(|why| Error::file(&path, why))?;
        let was = match RunFile::parse(&text, &[]) {
            Ok(was) => was,
            // It may be of another version, and what it trained need not be lost for that.
            Err(why) => {
                observer.warning(&format!("{}: {why}; so nobody can say what the run was", path.display()));
                return Ok(Resumed { text, run: None });
            }
        };
        let changes = run.changes(&was, same_file).map_err(Error::Plan)?;
        let (allowed, refused): (Vec<&Change>, Vec<&Change>) = changes
            .iter()
            .filter(|change| change.changes_result)
            .partition(|change| allow.iter().any(|name| covers(name, &change.field)));
        if !refused.is_empty() {
            let clauses: Vec<String> = refused.iter().map(|change| change.to_string()).collect();
            let flags: String = refused.iter().map(|change| format!(" --allow {}", change.field)).collect();
            let why =
                format!("{}, which would be another run; if that is meant, add{flags}", clauses.join(", "));
            return Err(Error::file(path, why));
        }
        for change in allowed {
            observer.note(&format!("{change} from here on"));
        }
        Ok(Resumed { text, run: Some(was) })
    }

    /// Says what another length does to a run of which `done` steps are behind.
    pub fn note_length(&self, run: &RunFile, done: u64, samples: usize, observer: &mut dyn Observer) {
        if let Some(note) = self.run.as_ref().and_then(|was| run.new_length(was, done, samples)) {
            observer.note(&note);
        }
    }

    /// Keeps the file that was true until `step`, where `text` takes its place.
    pub(super) fn keep(&self, folder: &Path, step: u64, text: &str) -> Result<()> {
        if self.text == text {
            return Ok(());
        }
        for number in 1.. {
            let again = if number == 1 { String::new() } else { format!("-{number}") };
            let name = format!("run-to-step-{step:06}{again}.toml");
            match fs::read_to_string(folder.join(&name)) {
                Ok(kept) if kept == self.text => return Ok(()),
                Ok(_) => continue,
                Err(_) => return write(folder, &name, &self.text),
            }
        }
        unreachable!("numbers have no end")
    }
}

/// Whether two paths lead to the same file or folder.
fn same_file(a: &str, b: &str) -> bool {
    fs::canonicalize(a).is_ok_and(|a| fs::canonicalize(b).is_ok_and(|b| a == b))
}

//! What a run writes down as it goes: lines of JSON that programs read, each true of the weights that are there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::Observer;
use super::line::{DivergedLine, Line};
use crate::{Error, Result, durable};

/// metrics.jsonl: a line per logged step and per evaluation. A rank that does not write has an empty one.
#[derive(Default)]
pub(super) struct Metrics {
    file: Option<File>,
    path: PathBuf,
    /// Bytes of whole lines: a full disk may take half of the next one.
    len: u64,
    /// Lines that the disk did not take, and whether the last is one of them.
    lost: u64,
    torn: bool,
}

/// Writes down that a run ended because it had diverged, so that its folder says so; nothing for any other error. What cannot be written is
/// left out: the error itself is told.
pub(super) fn note_divergence(metrics: Option<&Path>, error: &Error) {
    let (Some(path), &(Error::Diverged { step, .. } | Error::NotFinite { step, .. })) = (metrics, error)
    else {
        return;
    };
    let line = Line::Diverged(DivergedLine { step, diverged: error.to_string() });
    let line = serde_json::to_string(&line).expect("a line is plain data");
    let append = || -> io::Result<()> {
        let is_torn = fs::read(path)?.last().is_some_and(|last| *last != b'\n');
        let mut file = OpenOptions::new().append(true).open(path)?;
        file.write_all(format!("{}{line}\n", if is_torn { "\n" } else { "" }).as_bytes())?;
        file.sync_all()
    };
    let _ = append();
}

impl Metrics {
    /// Opens it for a run that has done `step` steps; lines of steps that will be taken again are dropped.
    pub fn open(path: &Path, step: u64) -> Result<Metrics> {
        let still_true = |line: &&[u8]| {
            let parsed: Option<Value> = serde_json::from_slice(line).ok();
            line.ends_with(b"\n") && parsed.and_then(|v| v["step"].as_u64()).is_some_and(|s| s <= step)
        };
        match fs::read(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(Error::file(path, why)),
            Ok(old) => {
                let kept: Vec<u8> = old
                    .split_inclusive(|byte| *byte == b'\n')
                    .filter(still_true)
                    .flatten()
                    .copied()
                    .collect();
                // At once: a kill in the middle would leave the run without its past.
                if kept != old {
                    durable::replace(path, &kept).map_err(|why| Error::unwritten(path, why))?;
                }
            }
        }
        let open = || -> io::Result<(File, u64)> {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            let len = file.metadata()?.len();
            durable::sync_folder(path.parent().unwrap_or(Path::new(".")))?;
            Ok((file, len))
        };
        let (file, len) = open().map_err(|why| Error::unwritten(path, why))?;
        Ok(Metrics { file: Some(file), path: path.into(), len, lost: 0, torn: false })
    }

    /// Whether lines go anywhere.
    pub fn is_open(&self) -> bool {
        self.file.is_some()
    }

    /// Adds a line. A disk that is full is told once and no reason to stop.
    pub fn line(&mut self, line: &impl Serialize, observer: &mut dyn Observer) {
        let Some(file) = &mut self.file else { return };
        let value = serde_json::to_value(line).expect("a line is plain data");
        let text = format!("{value}\n");
        let mut attempt = || -> io::Result<()> {
            if self.torn {
                file.set_len(self.len)?;
            }
            file.write_all(text.as_bytes())
        };
        let outcome = attempt();
        self.torn = outcome.is_err();
        match outcome {
            Ok(()) => self.len += text.len() as u64,
            Err(why) => {
                if self.lost == 0 {
                    observer.warning(&format!("{}: a line cannot be written: {why}", self.path.display()));
                }
                self.lost += 1;
            }
        }
    }

    /// Waits until all lines are on the disk. A checkpoint that outlives a power cut without the lines up to it would be of a
    /// run with a hole in its past.
    pub fn sync(&self, observer: &mut dyn Observer) {
        if let Some(Err(why)) = self.file.as_ref().map(|file| durable::sync(file, &self.path)) {
            observer
                .warning(&format!("{}: what was written may not be on the disk: {why}", self.path.display()));
        }
    }

    /// Says at the end what is missing.
    pub fn close(&mut self, observer: &mut dyn Observer) {
        if let Some(file) = self.file.take().filter(|_| self.torn) {
            // No half line is left; where even that fails, who reads it skips the half.
            let _ = file.set_len(self.len);
        }
        if self.lost > 0 {
            let (path, lost) = (self.path.display(), self.lost);
            observer.warning(&format!("{path}: {lost} lines are missing, which could not be written"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that was there is replaced, never written to: a kill at any moment leaves the old lines or the new ones.
    #[test]
    fn lines_of_steps_that_are_taken_again_go_all_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (path, old) = (folder.path().join("metrics.jsonl"), folder.path().join("old"));
        let lines = "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st";
        fs::write(&path, lines).unwrap();
        fs::hard_link(&path, &old).unwrap();
        let mut metrics = Metrics::open(&path, 2).unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap(), lines, "the file of before is as it was");
        metrics.line(&serde_json::json!({ "step": 3 }), &mut ());
        metrics.close(&mut ());
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    }
}

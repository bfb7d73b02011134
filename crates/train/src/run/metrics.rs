//! What a run writes down as it goes: lines of JSON that programs read, each true of the weights that are there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use espalier_data::regular_file::{self, RECORDS};
use serde::Serialize;
use serde_json::Value;

use super::Observer;
use super::metric_record::{DivergedRecord, MetricRecord};
use super::missing_steps::missing_steps;
use crate::summary::Validation;
use crate::{Error, Result, durable};

/// metrics.jsonl: a line per logged step and per evaluation. A rank that does not write has an empty one.
#[derive(Default)]
pub(super) struct MetricsFile {
    file: Option<File>,
    path: PathBuf,
    /// Bytes of complete lines: a full disk may take half of the next one.
    len: u64,
    /// Lines that the disk did not take, and whether the last is one of them.
    lost: u64,
    torn: bool,
}

/// Writes down that a run ended because it had diverged, so that its folder says so; nothing for any other
/// error. What cannot be written is left out: the error itself is reported.
pub(super) fn note_divergence(metrics: Option<&Path>, error: &Error) {
    let (Some(path), &(Error::Diverged { step, .. } | Error::NotFinite { step, .. })) = (metrics, error)
    else {
        return;
    };
    let line = MetricRecord::Diverged(DivergedRecord { step, diverged: error.to_string() });
    let line = serde_json::to_string(&line).expect("a line is plain data");
    let append = || -> io::Result<()> {
        let is_torn = fs::read(path)?.last().is_some_and(|last| *last != b'\n');
        let mut file = OpenOptions::new().append(true).open(path)?;
        file.write_all(format!("{}{line}\n", if is_torn { "\n" } else { "" }).as_bytes())?;
        file.sync_all()
    };
    let _ = append();
}

impl MetricsFile {
    /// Opens it for a run that has done `step` steps; lines of steps that will be taken again are dropped.
    pub fn open(path: &Path, step: u64) -> Result<(MetricsFile, PastMetrics)> {
        let old = match regular_file::read(path, RECORDS) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|why| Error::unread(path, why))?,
        };
        let (mut kept, mut past) = (Vec::with_capacity(old.len()), PastMetrics::default());
        for line in old.split_inclusive(|byte| *byte == b'\n') {
            let parsed: Option<Value> = serde_json::from_slice(line).ok();
            match parsed.as_ref().and_then(|line| line["step"].as_u64()) {
                Some(of) if of <= step && line.ends_with(b"\n") => {
                    kept.extend_from_slice(line);
                    past.add(parsed.and_then(|line| serde_json::from_value(line).ok()));
                }
                Some(_) => {}
                // What a kill has torn is the end of it.
                None => past.unreadable += usize::from(line.ends_with(b"\n")),
            }
        }
        // At once: a kill in the middle would leave the run without its past.
        if kept != old {
            durable::replace(path, &kept).map_err(|why| Error::unwritten(path, why))?;
        }
        let (file, len) = append_to(path).map_err(|why| Error::unwritten(path, why))?;
        Ok((MetricsFile { file: Some(file), path: path.into(), len, lost: 0, torn: false }, past))
    }

    /// Whether lines go anywhere.
    pub fn is_open(&self) -> bool {
        self.file.is_some()
    }

    /// Adds a line. A full disk is reported once and no reason to stop.
    pub fn write(&mut self, line: &impl Serialize, observer: &mut dyn Observer) {
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

    /// Waits until all lines are on the disk. A checkpoint that outlives a power cut without the lines up to
    /// it would be of a run with a hole in its past.
    pub fn sync(&mut self, observer: &mut dyn Observer) {
        self.reopen_if_removed(observer);
        if let Some(Err(why)) = self.file.as_ref().map(|file| durable::sync(file, &self.path)) {
            observer
                .warning(&format!("{}: what was written may not be on the disk: {why}", self.path.display()));
        }
    }

    /// Begins a new file where somebody has removed or replaced the one that lines go to: they would be
    /// written to nowhere.
    fn reopen_if_removed(&mut self, observer: &mut dyn Observer) {
        let number = |found: io::Result<fs::Metadata>| found.map(|found| (found.dev(), found.ino()));
        let Some(opened) = self.file.as_ref().and_then(|file| number(file.metadata()).ok()) else { return };
        match number(fs::metadata(&self.path)) {
            Ok(found) if found == opened => return,
            Err(why) if why.kind() != io::ErrorKind::NotFound => return,
            _ => {}
        }
        let path = self.path.display();
        match append_to(&self.path) {
            Ok((file, len)) => {
                (self.file, self.len, self.torn) = (Some(file), len, false);
                observer.warning(&format!(
                    "{path}: it was removed or replaced while the run wrote to it: lines up to here are missing from it"
                ));
            }
            Err(why) => observer.warning(&format!("{path}: it was removed, and cannot be made again: {why}")),
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

/// What the lines of before say of a run that goes on.
#[derive(Debug, Default)]
pub(super) struct PastMetrics {
    /// Steps that have a line.
    steps: Vec<u64>,
    /// Lines that are none of a run's, and were left out.
    unreadable: usize,
    /// Of the last step that has one.
    pub loss: Option<f64>,
    /// The last evaluation, and the step after which it was made.
    pub validation: Option<(u64, Validation)>,
}

impl PastMetrics {
    fn add(&mut self, line: Option<MetricRecord>) {
        match line {
            Some(MetricRecord::Step(step)) => {
                self.steps.push(step.step);
                self.loss = step.loss.filter(|_| !step.skipped).or(self.loss);
            }
            Some(MetricRecord::Evaluation(evaluation)) => {
                self.validation = Some((evaluation.step, evaluation.validation));
            }
            Some(MetricRecord::Pruned(_) | MetricRecord::Observed(_) | MetricRecord::Diverged(_)) => {}
            // It stays where it is; that its step has no line of ours is reported as a gap.
            None => {}
        }
    }

    /// Says which lines a run should have and has not, as [`missing_steps`] finds them.
    pub(crate) fn warn_of_gaps(
        &self,
        path: &Path,
        [began, done]: [u64; 2],
        every: u64,
        observer: &mut dyn Observer,
    ) {
        let path = path.display();
        if self.unreadable > 0 {
            observer.warning(&format!(
                "{path}: {} lines were not written by a run, and are ignored",
                self.unreadable
            ));
        }
        let missing = missing_steps(&self.steps, began, done, every);
        if !missing.is_empty() {
            let ranges: Vec<String> = missing.iter().map(ToString::to_string).collect();
            observer.warning(&format!("{path}: there is no line for {}", ranges.join(", ")));
        }
    }
}

/// Opens a file to add to, and its length; its name is on the disk.
fn append_to(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let len = file.metadata()?.len();
    durable::sync_folder(path.parent().unwrap_or(Path::new(".")))?;
    Ok((file, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that was there is replaced, never written to: a kill at any moment leaves the old lines or
    /// the new ones.
    #[test]
    fn lines_of_steps_that_are_taken_again_go_all_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (path, old) = (folder.path().join("metrics.jsonl"), folder.path().join("old"));
        let lines = "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st";
        fs::write(&path, lines).unwrap();
        fs::hard_link(&path, &old).unwrap();
        let (mut metrics, _) = MetricsFile::open(&path, 2).unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap(), lines, "the file of before is as it was");
        metrics.write(&serde_json::json!({ "step": 3 }), &mut ());
        metrics.close(&mut ());
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    }

    #[derive(Default)]
    struct Warned(Vec<String>);

    impl Observer for Warned {
        fn warning(&mut self, text: &str) {
            self.0.push(text.into());
        }
    }

    /// A line that was damaged, lines that were lost: a curve with a hole looks like one without.
    #[test]
    fn lines_that_are_missing_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let line = |step: u64| {
            let fields =
                "\"loss\":1.5,\"lr\":0.1,\"grad_norm\":1.0,\"accuracy\":0.5,\"sparsity\":0.0,\"time\":1.0";
            format!("{{\"step\":{step},{fields}}}\n")
        };
        let complete: String = (1..=9).map(line).collect();
        let warnings = |text: &str, done: u64| {
            fs::write(&path, text).unwrap();
            let (_, past) = MetricsFile::open(&path, done).unwrap();
            let mut observer = Warned::default();
            past.warn_of_gaps(Path::new("metrics.jsonl"), [0, done], 1, &mut observer);
            observer.0
        };
        assert_eq!(warnings(&complete, 9), [""; 0]);
        let holes: String = [1, 2, 3, 6, 7, 8].map(line).concat() + "{\"step";
        assert_eq!(warnings(&holes, 9), ["metrics.jsonl: there is no line for steps 4 to 5, step 9"]);
        let damaged = complete.replacen("\"step\":5,", "\"stfp\":5,", 1);
        let expected = [
            "metrics.jsonl: 1 lines were not written by a run, and are ignored",
            "metrics.jsonl: there is no line for step 5",
        ];
        assert_eq!(warnings(&damaged, 9), expected);
        assert_eq!(warnings("", 2), ["metrics.jsonl: there is no line for steps 1 to 2"]);
    }

    #[test]
    fn a_file_that_is_removed_under_a_run_is_begun_again_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut metrics, _) = MetricsFile::open(&path, 0).unwrap();
        let mut observer = Warned::default();
        metrics.write(&serde_json::json!({ "step": 1 }), &mut observer);
        metrics.sync(&mut observer);
        assert_eq!(observer.0, [""; 0]);
        fs::remove_file(&path).unwrap();
        metrics.write(&serde_json::json!({ "step": 2 }), &mut observer);
        metrics.sync(&mut observer);
        assert!(observer.0.len() == 1 && observer.0[0].contains("removed or replaced"), "{:?}", observer.0);
        metrics.write(&serde_json::json!({ "step": 3 }), &mut observer);
        metrics.sync(&mut observer);
        assert_eq!(observer.0.len(), 1, "{:?}", observer.0);
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":3}\n");
    }
}

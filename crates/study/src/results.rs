//! What trials have come to, on disk: lines of JSON, a file for each process that writes, all in one folder.
//!
//! A file begins with what study it belongs to; a line is written in one call, and nobody adds to another's
//! file. So processes of several machines share a folder without asking each other, whoever is killed leaves
//! at most a torn last line in a file that nobody writes to again, and what is known is what all files say
//! together, read in any order: the line of a trial that has taken more steps counts. Each line carries a
//! checksum: a digit that a disk has changed would be another result.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use espalier_data::regular_file::{self, RECORDS};
use espalier_train::{Error, checksum};
use serde::{Deserialize, Serialize};

use crate::file::{Cell, Study};
use crate::trial::TrialRecord;

/// The form of the lines; files of another one are refused.
const SCHEMA: u32 = 1;

/// One line of a file of results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum ResultLine {
    /// The first one: whose results these are.
    Study(ResultsHeader),
    /// Where a trial stands.
    Trial(TrialRecord),
    /// A range of a cell that has grown.
    Widened(WidenedRange),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ResultsHeader {
    schema: u32,
    name: String,
    fingerprint: String,
}

/// A range that was too narrow for a cell, and the trials beyond its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WidenedRange {
    pub batch: usize,
    pub sparsity: f64,
    /// Whose range it is.
    pub field: String,
    /// Whether its upper end was moved.
    pub upwards: bool,
    /// The number of the first trial there.
    pub first: u32,
    /// How many there are.
    pub trials: u32,
}

impl WidenedRange {
    /// The cell whose range it is.
    pub fn cell(&self) -> Cell {
        Cell { batch: self.batch, sparsity: self.sparsity }
    }
}

/// The results of a study in its folder.
#[derive(Debug)]
pub struct Results {
    folder: PathBuf,
    header: ResultsHeader,
    /// This process's own file, once it has something to write.
    own_file: Option<(PathBuf, File)>,
    /// How far each file was read.
    read: BTreeMap<PathBuf, u64>,
    /// By batch, sparsity (its bits) and number.
    records: BTreeMap<(u64, usize, u32), TrialRecord>,
    widened: Vec<WidenedRange>,
    /// Sentences on what was skipped.
    skipped: Vec<String>,
}

impl Results {
    /// Opens the folder of a study, which need not be there until something is written, and reads what others
    /// have left in it.
    pub fn open(folder: &Path, study: &Study) -> Result<Results, Error> {
        let header =
            ResultsHeader { schema: SCHEMA, name: study.name.clone(), fingerprint: study.fingerprint() };
        let mut results = Results {
            folder: folder.into(),
            header,
            own_file: None,
            read: BTreeMap::new(),
            records: BTreeMap::new(),
            widened: Vec::new(),
            skipped: Vec::new(),
        };
        results.refresh()?;
        for (path, &read) in &results.read {
            let length = fs::metadata(path).map_err(|why| unread(path, why))?.len();
            if length > read {
                let text = format!("{}: the last line is torn, and is skipped", path.display());
                results.skipped.push(text);
            }
        }
        Ok(results)
    }

    /// What was skipped, a sentence each.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All trials that are known, by sparsity, batch and number.
    pub fn records(&self) -> impl Iterator<Item = &TrialRecord> {
        self.records.values()
    }

    /// How many trials have come to their end.
    pub fn finished(&self) -> usize {
        self.records.values().filter(|record| record.status.is_final()).count()
    }

    /// The trials of a cell, without those that repeat its best one.
    pub(crate) fn of_cell(&self, cell: Cell) -> Vec<&TrialRecord> {
        self.records.values().filter(|record| record.cell() == cell && !record.is_repeat()).collect()
    }

    /// A trial of a cell by its number.
    pub(crate) fn trial(&self, cell: Cell, number: u32) -> Option<&TrialRecord> {
        self.records.get(&(cell.sparsity.to_bits(), cell.batch, number))
    }

    /// Ranges of a cell that have grown, in the order in which they did.
    pub fn widened(&self, cell: Cell) -> Vec<&WidenedRange> {
        self.widened.iter().filter(|widened| widened.cell() == cell).collect()
    }

    /// Writes where trials stand, in one call.
    pub fn append(&mut self, records: &[TrialRecord]) -> Result<(), Error> {
        let lines: Vec<ResultLine> = records.iter().cloned().map(ResultLine::Trial).collect();
        self.write(&lines)?;
        for record in records {
            self.insert(record.clone());
        }
        Ok(())
    }

    /// Writes that a range has grown.
    pub fn widen(&mut self, widened: WidenedRange) -> Result<(), Error> {
        self.write(&[ResultLine::Widened(widened.clone())])?;
        self.widened.push(widened);
        Ok(())
    }

    /// Reads what others have written since; returns what was new.
    pub fn refresh(&mut self) -> Result<Vec<TrialRecord>, Error> {
        let mut new = Vec::new();
        for path in self.files()? {
            if self.own_file.as_ref().is_some_and(|(own_file, _)| *own_file == path) {
                continue;
            }
            let from = self.read.get(&path).copied().unwrap_or(0);
            let text = read_lines(&path, from).map_err(|why| unread(&path, why))?;
            let mut at = from;
            for line in text.split_inclusive('\n') {
                let parsed = parse(&path, at, line)?;
                match (parsed, at == 0) {
                    (ResultLine::Study(header), true) => self.check(&path, &header)?,
                    (ResultLine::Trial(record), false) => {
                        self.insert(record.clone());
                        new.push(record);
                    }
                    (ResultLine::Widened(widened), false) => {
                        if !self.widened.contains(&widened) {
                            self.widened.push(widened);
                        }
                    }
                    _ => return Err(unusable(&path, &"it does not begin as the results of a study do")),
                }
                at += line.len() as u64;
            }
            self.read.insert(path, at);
        }
        Ok(new)
    }

    /// Of two lines of a trial the one that is further counts, and of these the one that ends it.
    fn insert(&mut self, record: TrialRecord) {
        let key = (record.sparsity.to_bits(), record.batch, record.trial);
        let rank = |record: &TrialRecord| (record.status.is_final(), record.steps);
        match self.records.get(&key) {
            Some(known) if rank(known) >= rank(&record) => {}
            _ => drop(self.records.insert(key, record)),
        }
    }

    /// Files of results in the folder, in the order of their names.
    fn files(&self) -> Result<Vec<PathBuf>, Error> {
        let entries = match fs::read_dir(&self.folder) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|why| unread(&self.folder, why))?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|why| unread(&self.folder, why))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("trials-") && name.ends_with(".jsonl") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    fn check(&self, path: &Path, header: &ResultsHeader) -> Result<(), Error> {
        if header.schema != SCHEMA {
            return Err(unusable(
                path,
                &format!("it has form {}, and this program writes {SCHEMA}", header.schema),
            ));
        }
        if header.fingerprint != self.header.fingerprint {
            let why = format!(
                "results of another study ({} {}, this one is {} {}): the run file, the goal, the ranges, the steps or the method differ; give it a folder \
                 of its own with --out",
                header.name, header.fingerprint, self.header.name, self.header.fingerprint
            );
            return Err(unusable(path, &why));
        }
        Ok(())
    }

    /// Appends lines to this process's file in one call, and waits until they are on the disk.
    fn write(&mut self, lines: &[ResultLine]) -> Result<(), Error> {
        if lines.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        if self.own_file.is_none() {
            self.own_file = Some(self.create_file()?);
            push(&mut text, &ResultLine::Study(self.header.clone()));
        }
        for line in lines {
            push(&mut text, line);
        }
        let (path, file) = self.own_file.as_mut().expect("it was claimed");
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        written.map_err(|why| Error::Disk { path: path.clone(), why: format!("cannot be written: {why}") })
    }

    /// A file that no other process has.
    fn create_file(&self) -> Result<(PathBuf, File), Error> {
        fs::create_dir_all(&self.folder).map_err(|why| Error::unwritten(&self.folder, why))?;
        for number in 1.. {
            let path = self.folder.join(format!("trials-{number:04}.jsonl"));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => return Ok((path, file)),
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
                Err(why) => return Err(Error::unwritten(path, why)),
            }
        }
        unreachable!("some number is free")
    }
}

/// A line that begins at a byte of a file.
fn parse(path: &Path, at: u64, line: &str) -> Result<ResultLine, Error> {
    let wrong =
        |why: &dyn Display| unusable(path, &format!("the line at byte {at} is no result of a study: {why}"));
    let object = checksum::check_json(line).map_err(|why| wrong(&why))?;
    serde_json::from_str(&object).map_err(|why| wrong(&why))
}

fn push(text: &mut String, line: &ResultLine) {
    *text += &checksum::add_to_json(&serde_json::to_string(line).expect("lines are plain data"));
    text.push('\n');
}

/// The complete lines of a file from a byte offset on.
fn read_lines(path: &Path, from: u64) -> io::Result<String> {
    let mut bytes = regular_file::read_from(path, from, RECORDS)?;
    let complete = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    bytes.truncate(complete);
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not text"))
}

fn unread(path: &Path, error: io::Error) -> Error {
    Error::of_io(path, &error, &error)
}

fn unusable(path: &Path, why: &impl ToString) -> Error {
    Error::File { path: path.into(), why: why.to_string() }
}

#[cfg(test)]
mod tests;

//! The cluster file that a benchmark adds to: read before anything is measured, written at the end.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::cluster::Cluster;
use espalier_plan::cluster::merge::{self, ClusterSection};
use espalier_train::Error;

use crate::output::print_err;
use crate::output_file::OutputFile;

/// A cluster file, there or not yet.
pub struct ClusterFile {
    path: PathBuf,
    /// None where there is no file yet.
    text: Option<String>,
    output: OutputFile,
}

impl ClusterFile {
    /// Finds out whether the file can be written, and that it is a cluster file where there is one: others
    /// are left alone.
    pub fn open(path: &Path) -> Result<ClusterFile> {
        let refused = |why: String| Error::File { path: path.into(), why };
        let output = OutputFile::open(path, "--out")?;
        let text = match regular_file::read_text(path, SETTINGS) {
            Ok(text) => Some(text),
            Err(why) if why.kind() == ErrorKind::NotFound => None,
            Err(why) => return Err(refused(why.to_string()).into()),
        };
        if let Some(Err(why)) = text.as_deref().map(Cluster::parse_unlinked) {
            return Err(refused(format!("it is no cluster file, and is left as it is: {why}")).into());
        }
        Ok(ClusterFile { path: path.into(), text, output })
    }

    /// Whether there was one.
    pub fn exists(&self) -> bool {
        self.text.is_some()
    }

    /// What a cluster of this file is called, unless it says so itself.
    pub fn name(&self) -> String {
        self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Puts a section in. Where there is no file, `begin` makes one.
    pub fn finish(
        self,
        section: &ClusterSection,
        comment: &str,
        begin: impl FnOnce(&str) -> String,
    ) -> Result<()> {
        let text = match &self.text {
            Some(text) => merge::insert(text, section, comment).expect("it was read as a cluster file"),
            None => begin(&self.name()),
        };
        self.output.finish(&text)?;
        let verb = if self.exists() { "added to" } else { "written to" };
        print_err!("{verb} {}", self.path.display());
        if let Err(why) = Cluster::parse(&text) {
            print_err!("not complete yet: {why}");
        }
        Ok(())
    }
}

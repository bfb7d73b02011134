//! What a command writes at its end: a place that can be written to is found before a minute is spent, and nothing half-written
//! is left under the name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_train::Error;

/// A file while it is being made.
pub struct Draft {
    file: PathBuf,
    part: PathBuf,
}

impl Draft {
    /// Finds out whether the file can be written; `argument` is what named it.
    pub fn open(file: &Path, argument: &str) -> Result<Draft> {
        let refused = |why: String| Error::File { path: file.into(), why };
        if file.is_dir() || file.file_name().is_none() {
            return Err(refused(format!("a folder; {argument} takes the name of a file")).into());
        }
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(|why| Error::of_io(file, &why, &why))?;
        }
        let mut part = file.as_os_str().to_owned();
        part.push(".part");
        let draft = Draft { file: file.into(), part: part.into() };
        fs::write(&draft.part, "").map_err(|why| Error::of_io(file, &why, &why))?;
        Ok(draft)
    }

    /// The file that it will be.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Gives the file its text.
    pub fn finish(&self, text: &str) -> Result<()> {
        let written = fs::write(&self.part, text).and_then(|()| fs::rename(&self.part, &self.file));
        written.map_err(|why| Error::of_io(&self.file, &why, &why))?;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Already renamed where all went well.
        let _ = fs::remove_file(&self.part);
    }
}

//! What a command writes at its end: whether its path can be written to is found out before a minute is spent,
//! nothing half-written is left under the name, and nobody else's file is written over.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, irregular};
use espalier_train::Error;

/// Bytes of a file by which it is known whose it is.
const HEAD: u64 = 4096;

/// A file while it is being made.
pub struct OutputFile {
    file: PathBuf,
    temporary: PathBuf,
}

impl OutputFile {
    /// Finds out whether the file can be written; `argument` is what named it.
    pub fn open(file: &Path, argument: &str) -> Result<OutputFile> {
        let refused = |why: String| Error::File { path: file.into(), why };
        if file.is_dir() || file.file_name().is_none() {
            return Err(refused(format!("a folder; {argument} takes the name of a file")).into());
        }
        if let Some(got) = fs::metadata(file).ok().and_then(|found| irregular(found.file_type())) {
            return Err(refused(format!("it is {got}; {argument} takes the name of a file")).into());
        }
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(|why| Error::of_io(file, &why, &why))?;
        }
        // What a link leads to is replaced, and not the link.
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.into());
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        // The same name each time: what a killed process has left goes with the next.
        let temporary = target.with_file_name(format!(".{name}.part"));
        let output = OutputFile { file: target, temporary };
        fs::write(&output.temporary, "").map_err(|why| Error::of_io(file, &why, &why))?;
        Ok(output)
    }

    /// The file that it will be.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Gives the file its text.
    pub fn finish(&self, text: &str) -> Result<()> {
        let written = fs::write(&self.temporary, text).and_then(|()| fs::rename(&self.temporary, &self.file));
        written.map_err(|why| Error::of_io(&self.file, &why, &why))?;
        Ok(())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        // Already renamed where all went well.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Refuses to write over a file whose beginning is not that of one of ours: a slip of the pen must not cost a
/// run its metrics. An empty file is nobody's. `what` it would have to be is said, and what else can be done
/// about it.
pub fn may_replace(file: &Path, what: &str, is_ours: impl Fn(&[u8]) -> bool, advice: &str) -> Result<()> {
    if !file.is_file() {
        return Ok(());
    }
    let mut head = Vec::new();
    let read = regular_file::open(file).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    // What cannot be read is not known to be ours.
    if read.is_ok() && (head.is_empty() || is_ours(&head)) {
        return Ok(());
    }
    let why = format!("a file is here that is no {what}: choose another name, or {advice}");
    Err(Error::File { path: file.into(), why }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_at_once_and_a_link_leads_where_it_led() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("figure.svg"), folder.path().join("link.svg"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink("figure.svg", &link).unwrap();
        fs::write(folder.path().join(".figure.svg.part"), "of one that was killed").unwrap();
        let output = OutputFile::open(&link, "--svg").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "old", "until it is finished");
        output.finish("new").unwrap();
        drop(output);
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(link.is_symlink());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
        drop(OutputFile::open(&file, "--svg").unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new", "a draft that is given up changes nothing");
    }

    #[test]
    fn what_is_not_ours_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notes");
        let may = || may_replace(&file, "figure", |head| head.starts_with(b"<svg"), "add --force");
        may().unwrap();
        fs::write(&file, "").unwrap();
        may().unwrap();
        fs::write(&file, "<svg and more").unwrap();
        may().unwrap();
        fs::write(&file, "notes").unwrap();
        let error = may().unwrap_err().to_string();
        assert!(
            error.ends_with("a file is here that is no figure: choose another name, or add --force"),
            "{error}"
        );
    }
}

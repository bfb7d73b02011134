//! A run folder that a process is at work in, told from another of the same name.
//!
//! A folder can be removed or renamed under a run. What is written by its name from then on would make a
//! second folder, with half of a run in it and without its lock; so a run checks before it writes, and ends
//! where the folder is not the one that it began in.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A folder that is held open: so no other one gets its number in the file system.
#[derive(Debug)]
pub struct FolderHandle {
    path: PathBuf,
    file: File,
}

impl FolderHandle {
    /// Holds the folder that has this name now.
    pub fn open(path: &Path) -> io::Result<FolderHandle> {
        Ok(FolderHandle { path: path.into(), file: File::open(path)? })
    }

    /// Whether the name is still that of this folder. Where nobody can tell, it is: what is written next
    /// finds out.
    pub fn is_there(&self) -> bool {
        let gone = |error: &io::Error| {
            use io::ErrorKind::{NotADirectory, NotFound, StaleNetworkFileHandle};
            matches!(error.kind(), NotFound | NotADirectory | StaleNetworkFileHandle)
        };
        match (self.file.metadata(), fs::metadata(&self.path)) {
            (Ok(opened), Ok(found)) => (opened.dev(), opened.ino()) == (found.dev(), found.ino()),
            (Err(error), _) | (_, Err(error)) => !gone(&error),
        }
    }

    /// An error where it is not.
    pub fn check(&self) -> Result<()> {
        if self.is_there() {
            return Ok(());
        }
        let why = "the run folder was removed or renamed while the run was at work in it, and nothing more is written: where it \
                   was renamed, --resume with the new name as --out continues from its last checkpoint";
        Err(Error::Disk { path: self.path.clone(), why: why.into() })
    }

    /// Locks the folder itself, which stays locked where the lock file is removed from it. False
    /// where another process has it; a file system that cannot do so leaves it to that file.
    pub(super) fn lock(&self, mut attempt: impl FnMut(&File) -> Result<(), TryLockError>) -> bool {
        !matches!(attempt(&self.file), Err(TryLockError::WouldBlock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_folder_of_the_same_name_is_another() {
        let above = tempfile::tempdir().unwrap();
        let (run, moved) = (above.path().join("run"), above.path().join("moved"));
        fs::create_dir(&run).unwrap();
        let handle = FolderHandle::open(&run).unwrap();
        handle.check().unwrap();
        fs::rename(&run, &moved).unwrap();
        assert!(matches!(handle.check(), Err(Error::Disk { .. })));
        fs::create_dir(&run).unwrap();
        let message = handle.check().unwrap_err().to_string();
        assert!(message.contains("run: the run folder was removed or renamed"), "{message}");
        fs::remove_dir(&run).unwrap();
        fs::rename(&moved, &run).unwrap();
        handle.check().unwrap();
        fs::remove_dir(&run).unwrap();
        fs::create_dir(&run).unwrap();
        assert!(!handle.is_there());
    }
}

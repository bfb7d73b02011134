//! Which checkpoints go, and which are put aside.
//!
//! Of those that are intact the newest stay. A damaged one neither counts as one of them nor is removed: of
//! the only copy of a week's work, a file may still be rescued. It is put aside under another name where it
//! stands in the way.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::files::WRITING;
use super::{Checkpoint, Checkpoints};
use crate::durable;

/// One that goes bears this name: whoever is killed while it goes leaves no checkpoint with holes.
const REMOVING: &str = ".removing-";

/// Checkpoints that were put aside start with this.
const DAMAGED: &str = "damaged-";

impl Checkpoints {
    /// Removes those that are too old, once that of step `newest` was written. What cannot be removed goes
    /// to `report`: it costs disk space, and nothing else.
    pub fn remove_old(&self, newest: u64, mut report: impl FnMut(&str)) {
        let numbered = match self.numbered() {
            Ok(numbered) => numbered,
            Err(why) => return report(&format!("old checkpoints stay: {why}")),
        };
        let older = numbered.into_iter().rev().filter(|(step, _)| *step <= newest);
        let intact = older.map(|(_, path)| path).filter(|path| Checkpoint::open(path).is_ok());
        for old in intact.skip(self.keep.max(1)) {
            if let Err(why) = remove(&old) {
                report(&format!("{}: the old checkpoint cannot be removed: {why}", old.display()));
            }
        }
    }

    /// Removes what a run left that ended while it wrote or removed a checkpoint. What cannot be removed is
    /// not in the way.
    pub(crate) fn remove_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            if [WRITING, REMOVING].iter().any(|prefix| name.starts_with(prefix.as_bytes())) {
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
        Ok(())
    }
}

/// Takes a checkpoint's name away at once, and then its files, each at a second attempt where a disk did not
/// answer the first.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let nameless = rename_free(path, REMOVING).or_else(|_| rename_free(path, REMOVING))?;
    fs::remove_dir_all(&nameless).or_else(|_| fs::remove_dir_all(&nameless))
}

/// Gives a damaged checkpoint a name that is none of a checkpoint's, beside the others, and returns it.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    rename_free(path, DAMAGED)
}

/// Renames to the first free name that begins like this.
fn rename_free(path: &Path, prefix: &str) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let names = (1..).map(|n| match n {
        1 => path.with_file_name(format!("{prefix}{name}")),
        n => path.with_file_name(format!("{prefix}{name}-{n}")),
    });
    let free = names.into_iter().find(|name| name.symlink_metadata().is_err()).expect("some name is free");
    durable::rename_unsynced(path, &free)?;
    Ok(free)
}

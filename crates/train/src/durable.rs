//! Files that a power cut or a full disk leaves either as they were or as they should be.
//!
//! A new name is on the disk once the folder that holds it was synced, and not before: so whoever makes a
//! file or a folder syncs its parent too. All syncing goes through [`sync`], which tests can ask what was
//! synced, and in which order.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Makes a folder and those above it; each new one is synced into its parent.
pub(crate) fn create_folder(path: &Path) -> io::Result<()> {
    create_folders(path, &mut Vec::new())
}

/// The same; `made` gets those that were not there, the innermost first, also where it fails.
pub(crate) fn create_folders(path: &Path, made: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = parent(path);
    if parent != path {
        create_folders(parent, made)?;
    }
    match fs::create_dir(path) {
        // By another rank or process, a moment ago.
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(why) => Err(why),
        Ok(()) => {
            made.insert(0, path.into());
            sync_folder(parent)
        }
    }
}

/// Where a file or folder is written until it is complete.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.writing"))
}

/// Gives a file these bytes at once: whoever reads sees the old ones or the new ones, also after a kill.
/// Where it fails, nothing else is left.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = beside(path);
    let attempt = || {
        write_synced(&temporary, bytes)?;
        rename(&temporary, path)
    };
    attempt().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Gives a file or folder another name, and waits until that is on the disk.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    rename_unsynced(from, to)?;
    sync_folder(parent(to))
}

/// The same without waiting for the disk. A file system that a signal has interrupted, as those of a network
/// may be, is asked again, a few times.
pub(crate) fn rename_unsynced(from: &Path, to: &Path) -> io::Result<()> {
    for _ in 0..8 {
        match fs::rename(from, to) {
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
    fs::rename(from, to)
}

/// Writes a file and waits until it is on the disk; its name may not be.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    sync(&file, path)
}

/// Waits until what was written to a file is on the disk. `path` is its name, which may not be.
#[cfg_attr(not(test), expect(unused_variables, reason = "tests alone record names"))]
pub(crate) fn sync(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    #[cfg(test)]
    record::add(path);
    Ok(())
}

/// Waits until the names in a folder are on the disk.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    match sync(&File::open(path)?, path) {
        // A file system that has no such thing.
        Err(why) if why.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

/// The folder of a path, also of one that is a name alone.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// What was synced, in this order, by all tests of the process: nobody could see it from outside but with a
/// debugger or by pulling the plug. A test asks for what lies in a folder of its own.
#[cfg(test)]
pub(crate) mod record {
    use super::*;
    use std::sync::Mutex;

    static SYNCED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

    pub(super) fn add(path: &Path) {
        SYNCED.lock().unwrap().push(path.into());
    }

    /// Paths below a folder, which itself is the empty one.
    pub(crate) fn below(folder: &Path) -> Vec<String> {
        let all = SYNCED.lock().unwrap();
        let inside = all.iter().filter_map(|path| path.strip_prefix(folder).ok());
        inside.map(|path| path.display().to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_or_as_it_was_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b/c");
        create_folder(&inner).unwrap();
        create_folder(&inner).unwrap();
        let path = inner.join("file");
        replace(&path, b"old").unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        // A folder that is not empty cannot be replaced by a file.
        replace(&folder.path().join("a"), b"new").unwrap_err();
        assert!(create_folder(&path.join("below a file")).is_err());
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["a"]);
    }
}

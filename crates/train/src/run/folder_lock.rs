//! Whose a run folder is: one process writes to it at a time.
//!
//! It is a lock (`flock`) on the file `.lock` in the folder, which the system takes back from a process
//! however it ends: nothing has to be cleaned up after a kill. The file holds a few words about the process
//! for whoever comes second. It stays there behind a run; a run that did not begin leaves neither it nor a
//! folder that was made for it. The folder itself is locked too, where its file system can do that: then the
//! lock outlives a `.lock` that somebody removes.
//!
//! A numbered folder is taken in the same way: the first whose lock can be had and that holds no run. So of
//! runs that are started at once each gets its own.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use espalier_data::regular_file::{self, irregular};

use super::folder_handle::FolderHandle;
use super::holds_run;
use crate::resolved::RUN_FILE;
use crate::{Error, Result, durable, is_failure};

const LOCK: &str = ".lock";
/// How often a folder is made again that others remove.
const TRIES: usize = 100;
/// Whoever only checks whether a folder is taken (`espalier report`, a dry run) holds its lock for a moment:
/// so often it is tried again, after so long.
const RETRIES: usize = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// A run folder that is ours until this is dropped, or the process ends.
#[derive(Debug)]
pub struct FolderLock {
    folder: PathBuf,
    /// None on a file system that has no locks.
    lock: Option<File>,
    /// The folder as it was locked; none until it is.
    folder_handle: Option<FolderHandle>,
    /// Folders that were made for it, the innermost first.
    made: Vec<PathBuf>,
}

impl FolderLock {
    /// Locks a folder, which is made where it is not there.
    pub fn acquire(folder: &Path) -> Result<FolderLock> {
        FolderLock::attempt(folder)?.ok_or_else(|| taken(folder))
    }

    /// Locks the first of `BASE`, `BASE-2`, ... behind those that hold a run.
    pub(crate) fn acquire_next(base: &Path) -> Result<FolderLock> {
        for number in last_number(base) + 1.. {
            let folder = numbered(base, number);
            let Some(acquired) = FolderLock::attempt(&folder)? else { continue };
            // Its owner may have come to its end between the two checks.
            if !holds_run(&folder)? {
                return Ok(acquired);
            }
        }
        unreachable!("numbers have no end")
    }

    /// The last of `BASE`, `BASE-2`, ... that holds a run; `BASE` where none does.
    pub(crate) fn last_used(base: &Path) -> PathBuf {
        numbered(base, last_number(base).max(1))
    }

    /// An error where another process has it; nothing is made or locked.
    pub fn check_free(folder: &Path) -> Result<()> {
        let is_taken = |path: &Path| {
            let shared = regular_file::open(path).map(|file| file.try_lock_shared());
            matches!(shared, Ok(Err(TryLockError::WouldBlock)))
        };
        match is_taken(&folder.join(LOCK)) || is_taken(folder) {
            true => Err(taken(folder)),
            false => Ok(()),
        }
    }

    /// The folder that this process owns.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether the folder is still there, under its name.
    pub fn is_there(&self) -> bool {
        self.folder_handle.as_ref().is_none_or(FolderHandle::is_there)
    }

    /// The open lock: a process that inherits it shares the lock, also when this one has ended.
    pub fn lock(&self) -> Option<&File> {
        self.lock.as_ref()
    }

    /// None where another process has it.
    fn attempt(folder: &Path) -> Result<Option<FolderLock>> {
        let fail = |why: io::Error| Error::unwritten(folder, why);
        let path = folder.join(LOCK);
        for _ in 0..TRIES {
            let mut acquired =
                FolderLock { folder: folder.into(), lock: None, folder_handle: None, made: Vec::new() };
            // Whoever gives up a folder removes it: between two of these calls it may have gone.
            match durable::create_folders(folder, &mut acquired.made) {
                Err(why) if why.kind() == ErrorKind::NotFound => continue,
                outcome => outcome.map_err(fail)?,
            }
            if let Ok(Some(got)) = fs::metadata(&path).map(|found| irregular(found.file_type())) {
                return Err(Error::file(
                    path,
                    format!("it is {got}, not the lock of a run folder: remove it"),
                ));
            }
            let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let mut lock = match opened {
                Err(why) if why.kind() == ErrorKind::NotFound => continue,
                opened => opened.map_err(fail)?,
            };
            match lock_with_retries(&lock) {
                Err(TryLockError::WouldBlock) => {
                    // It is not for us to remove.
                    acquired.made.clear();
                    return Ok(None);
                }
                Err(TryLockError::Error(why)) if is_failure(&why) => return Err(fail(why)),
                Err(TryLockError::Error(_)) => {
                    acquired.folder_handle = Some(FolderHandle::open(folder).map_err(fail)?);
                    return Ok(Some(acquired));
                }
                Ok(()) => {}
            }
            // A lock on a file that was removed in the meantime holds nobody off.
            let (ours, there) = (lock.metadata(), fs::metadata(&path));
            if there.is_err() || ours.map_err(fail)?.ino() != there.map_err(fail)?.ino() {
                continue;
            }
            let folder_handle = FolderHandle::open(folder).map_err(fail)?;
            if !folder_handle.is_there() {
                continue;
            }
            if !folder_handle.lock(lock_with_retries) {
                acquired.made.clear();
                return Ok(None);
            }
            acquired.folder_handle = Some(folder_handle);
            // Words for people; the lock holds without them.
            let _ = lock
                .set_len(0)
                .and_then(|()| lock.rewind())
                .and_then(|()| writeln!(lock, "{}", process_name()));
            acquired.lock = Some(lock);
            return Ok(Some(acquired));
        }
        Err(fail(ErrorKind::NotFound.into()))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // In another folder of that name there may be another's lock.
        if !self.is_there() || self.folder.join(RUN_FILE).try_exists().unwrap_or(true) {
            return;
        }
        if self.lock.is_some() {
            let _ = fs::remove_file(self.folder.join(LOCK));
        }
        // Only as far as nothing was put into them.
        let _ = self.made.iter().try_for_each(fs::remove_dir);
    }
}

/// The lock, unless somebody holds it for longer than a check takes.
fn lock_with_retries(lock: &File) -> std::result::Result<(), TryLockError> {
    for _ in 0..RETRIES {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => thread::sleep(RETRY_PAUSE),
            outcome => return outcome,
        }
    }
    lock.try_lock()
}

fn taken(folder: &Path) -> Error {
    let mut who = String::new();
    let read =
        regular_file::open(&folder.join(LOCK)).and_then(|lock| lock.take(1024).read_to_string(&mut who));
    let who = if read.is_ok_and(|read| read > 0) { who.trim() } else { "another process" };
    Error::file(
        folder,
        format!("{who} is at work in this folder: wait until it ends, or choose another --out"),
    )
}

/// `process 1234 on node7`
fn process_name() -> String {
    let process = format!("process {}", std::process::id());
    match fs::read_to_string("/proc/sys/kernel/hostname") {
        Ok(host) => format!("{process} on {}", host.trim()),
        Err(_) => process,
    }
}

/// `out/hello`, `out/hello-2`, ...
fn numbered(base: &Path, number: u64) -> PathBuf {
    match number {
        1 => base.into(),
        n => {
            let mut name = base.file_name().unwrap_or_default().to_owned();
            name.push(format!("-{n}"));
            base.with_file_name(name)
        }
    }
}

/// The largest number of those that hold a run; 0: none does.
fn last_number(base: &Path) -> u64 {
    let (Some(parent), Some(name)) = (base.parent(), base.file_name().and_then(|name| name.to_str())) else {
        return 0;
    };
    let entries = fs::read_dir(if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    let number = |entry: io::Result<fs::DirEntry>| -> Option<u64> {
        let entry = entry.ok()?;
        let rest = entry.file_name().to_str()?.strip_prefix(name)?.to_owned();
        let number = if rest.is_empty() { 1 } else { rest.strip_prefix('-')?.parse().ok()? };
        (numbered(base, number) == parent.join(entry.file_name()) && entry.path().join(RUN_FILE).exists())
            .then_some(number)
    };
    entries.into_iter().flatten().filter_map(number).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_locked_once_and_free_again_behind_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("out/run");
        let acquired = FolderLock::acquire(&run).unwrap();
        let second = FolderLock::acquire(&run).unwrap_err().to_string();
        assert!(second.contains(&format!("process {}", std::process::id())), "{second}");
        assert_eq!(FolderLock::check_free(&run).unwrap_err().to_string(), second);
        drop(acquired);
        assert!(!folder.path().join("out").exists(), "what did not begin leaves nothing");
        FolderLock::check_free(&run).unwrap();

        let acquired = FolderLock::acquire(&run).unwrap();
        fs::write(run.join(RUN_FILE), "").unwrap();
        drop(acquired);
        assert!(run.join(LOCK).exists(), "what began stays");
        FolderLock::acquire(&run).unwrap();
    }

    /// Checking a folder, however often, is in nobody's way.
    #[test]
    fn a_folder_that_is_checked_can_be_locked() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::write(run.join(RUN_FILE), "").unwrap();
        drop(FolderLock::acquire(&run).unwrap());
        let shared = File::open(run.join(LOCK)).unwrap();
        shared.try_lock_shared().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(RETRY_PAUSE / 2);
                drop(shared);
            });
            FolderLock::acquire(&run).unwrap();
        });
    }

    #[test]
    fn an_empty_folder_of_somebody_elses_stays() {
        let folder = tempfile::tempdir().unwrap();
        drop(FolderLock::acquire(folder.path()).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn numbers_go_on_behind_the_last_run_and_pass_over_those_that_begin() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("out/run");
        assert_eq!(FolderLock::last_used(&base), base);
        let locks: Vec<FolderLock> = (0..3).map(|_| FolderLock::acquire_next(&base).unwrap()).collect();
        let names: Vec<_> = locks.iter().map(|acquired| acquired.folder().file_name().unwrap()).collect();
        assert_eq!(names, ["run", "run-2", "run-3"]);
        fs::write(locks[1].folder().join(RUN_FILE), "").unwrap();
        drop(locks);
        assert_eq!(FolderLock::last_used(&base), folder.path().join("out/run-2"));
        assert_eq!(FolderLock::acquire_next(&base).unwrap().folder(), folder.path().join("out/run-3"));
    }
}

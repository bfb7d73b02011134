//! Whose a study's folder is: of one process, or of several that split its trials (`--shard`). Two that
//! run all of them would run each twice, and write what they find beside each other.
//!
//! A lock (`flock`) on the file `.lock`, which the system takes back from a process however it ends:
//! exclusive, or shared with those that have other shards, each of which has a file of its own.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use espalier_train::Error;

use crate::search::TrialShard;

/// The folder of a study that is this process's until this is dropped.
#[derive(Debug)]
pub struct StudyLock {
    _locks: Vec<File>,
    is_locked: bool,
}

impl StudyLock {
    /// Locks a folder, which is made where it is not there, for all trials or for a shard of them.
    pub fn acquire(folder: &Path, shard: Option<TrialShard>) -> Result<StudyLock, Error> {
        fs::create_dir_all(folder).map_err(|why| Error::unwritten(folder, why))?;
        let open = |name: &str| {
            let path = folder.join(name);
            let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            opened.map_err(|why| Error::unwritten(path, why))
        };
        let all = open(".lock")?;
        let (mut locks, mut attempts) = (Vec::new(), Vec::new());
        match shard {
            None => attempts.push(all.try_lock()),
            Some(TrialShard { index, of }) => {
                let shard_lock = open(&format!("shard-{index}-of-{of}.lock"))?;
                attempts.extend([all.try_lock_shared(), shard_lock.try_lock()]);
                locks.push(shard_lock);
            }
        }
        locks.push(all);
        let mut is_locked = true;
        for attempt in attempts {
            match attempt {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(taken(folder, shard)),
                // A file system that has none.
                Err(TryLockError::Error(_)) => is_locked = false,
            }
        }
        Ok(StudyLock { _locks: locks, is_locked })
    }

    /// Whether anything keeps others out: some file systems have no locks.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }
}

fn taken(folder: &Path, shard: Option<TrialShard>) -> Error {
    let how = match shard {
        None => "wait until it ends, choose another --out, or split its trials with --shard",
        Some(_) => "wait until it ends, or choose another --shard",
    };
    let why = format!("another process is at work on this study: {how}");
    Error::File { path: folder.into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_all_trials_or_several_have_their_shards() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("out/study");
        let shard = |index| Some(TrialShard { index, of: 2 });
        let all = StudyLock::acquire(&folder, None).unwrap();
        assert!(all.is_locked());
        for second in [None, shard(1)] {
            let message = StudyLock::acquire(&folder, second).unwrap_err().to_string();
            assert!(message.contains("another process is at work on this study"), "{message}");
        }
        drop(all);
        let [one, two] = [1, 2].map(|index| StudyLock::acquire(&folder, shard(index)).unwrap());
        StudyLock::acquire(&folder, None).unwrap_err();
        StudyLock::acquire(&folder, shard(2)).unwrap_err();
        drop(two);
        StudyLock::acquire(&folder, shard(2)).unwrap();
        drop(one);
        StudyLock::acquire(&folder, None).unwrap();
    }
}

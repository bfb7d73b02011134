//! Why a checkpoint cannot be read or written, and whose fault that is.
//!
//! Only what was read and is not what was written damns a checkpoint: then the one before it may be used. A
//! disk that does not answer, or a process that has too many files open, says nothing about it. That is tried
//! again, and then ends the run, which otherwise would put its newest steps aside for a fault that lasted a
//! second.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::refuse;
use crate::Error;

/// What is waited for before each further attempt.
const PAUSES: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(100), Duration::from_millis(500)];

/// Why a checkpoint could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadFault {
    /// It was read, and is not what was written.
    Damaged(String),
    /// The system did not let it be read.
    Unread(String),
}

impl ReadFault {
    /// What a system error with a file of the checkpoint is. A file that is not there, or shorter than it
    /// should be, is a hole.
    pub(crate) fn of(name: &str, error: &io::Error) -> ReadFault {
        let why = format!("{name}: {error}");
        match is_of_content(error) {
            true => ReadFault::Damaged(why),
            false => ReadFault::Unread(why),
        }
    }

    /// The same fault, of the file of this name.
    pub(super) fn in_file(self, name: &str) -> ReadFault {
        match self {
            ReadFault::Damaged(why) => ReadFault::Damaged(format!("{name}: {why}")),
            ReadFault::Unread(why) => ReadFault::Unread(format!("{name}: {why}")),
        }
    }

    /// What it is to a run that needs the checkpoint at `path`.
    pub(crate) fn at(self, path: &Path) -> Error {
        match self {
            ReadFault::Damaged(why) => refuse(path, why),
            ReadFault::Unread(why) => Error::Disk {
                path: path.into(),
                why: format!(
                    "the checkpoint cannot be read, and is not known to be damaged: {why}; it was tried {} times, and a run \
                     falls back to the one before it only if this one is moved out of its folder",
                    PAUSES.len() + 1
                ),
            },
        }
    }
}

impl From<String> for ReadFault {
    fn from(why: String) -> ReadFault {
        ReadFault::Damaged(why)
    }
}

/// Does what reads, and does it again a little later where the system fails at it.
pub(crate) fn retry<T>(mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for pause in PAUSES {
        match read() {
            Err(why) if !is_of_content(&why) => thread::sleep(pause),
            outcome => return outcome,
        }
    }
    read()
}

/// Whether an error says what is there, and not that the system could not read it.
fn is_of_content(error: &io::Error) -> bool {
    use ErrorKind::{InvalidData, IsADirectory, NotADirectory, NotFound, UnexpectedEof};
    matches!(error.kind(), NotFound | NotADirectory | IsADirectory | UnexpectedEof | InvalidData)
}

/// Why a rank could not write.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum WriteFault {
    /// The disk is full, or failed.
    Disk(String),
    /// Ranks see different folders.
    NotShared(String),
    /// A GPU cannot be read any more, which is not the disk's fault. Other ranks know it by its words.
    Device {
        why: String,
        #[serde(skip)]
        error: Option<espalier_tensor::Error>,
    },
    /// Something of this name is NaN or infinite.
    NotFinite(String),
}

impl From<io::Error> for WriteFault {
    fn from(why: io::Error) -> WriteFault {
        WriteFault::Disk(why.to_string())
    }
}

impl From<espalier_tensor::Error> for WriteFault {
    fn from(why: espalier_tensor::Error) -> WriteFault {
        WriteFault::Device { why: why.to_string(), error: Some(why) }
    }
}

impl WriteFault {
    /// What the fault of a rank, or of the only one, is to the run: the same on every rank.
    pub(crate) fn of(self, rank: Option<usize>, target: &Path, step: u64) -> Error {
        let by = rank.map_or(String::new(), |rank| format!("rank {rank}: "));
        let path = target.to_owned();
        match self {
            WriteFault::Disk(why) => {
                Error::Disk { path, why: format!("the checkpoint cannot be written: {by}{why}") }
            }
            WriteFault::NotShared(why) => {
                Error::file(path, format!("the checkpoint cannot be written: {by}{why}"))
            }
            WriteFault::Device { error: Some(error), .. } => Error::Tensor(error),
            WriteFault::Device { why, error: None } => {
                Error::RankEnded { rank: rank.unwrap_or(0), how: "failed", why }
            }
            WriteFault::NotFinite(name) => Error::NotFinite { step, what: name },
        }
    }
}

#[cfg(test)]
mod tests {
    use espalier_comm::Failure;

    use super::*;

    #[test]
    fn what_fails_for_a_moment_is_read_and_what_is_not_there_is_not_waited_for() {
        const EIO: i32 = 5;
        let mut calls = 0;
        let read = retry(|| {
            calls += 1;
            if calls < 3 { Err(io::Error::from_raw_os_error(EIO)) } else { Ok("bytes") }
        });
        assert_eq!((read.unwrap(), calls), ("bytes", 3));
        calls = 0;
        let missing = retry(|| {
            calls += 1;
            Err::<(), _>(io::Error::from(ErrorKind::NotFound))
        });
        assert_eq!((missing.unwrap_err().kind(), calls), (ErrorKind::NotFound, 1));
        // EIO, EMFILE, EACCES: the system's; ENOENT, ENOTDIR: of what is there.
        let is_unread =
            |code| matches!(ReadFault::of("a", &io::Error::from_raw_os_error(code)), ReadFault::Unread(_));
        assert_eq!([5, 24, 13, 2, 20].map(is_unread), [true, true, true, false, false]);
    }

    /// Every rank calls it what it is, and by the number of the rank: no file is at fault.
    #[test]
    fn a_gpu_that_cannot_be_read_is_no_fault_of_the_disk() {
        let why = "CUDA: copying to the host failed: out of luck".to_owned();
        let broken = WriteFault::Device { why, error: None };
        let received = broken.of(Some(1), Path::new("checkpoints/step-000003"), 3);
        let ended = Error::from(Failure::Failed { rank: 0, error: received });
        assert!(matches!(ended, Error::RankEnded { rank: 1, .. }), "{ended}");
        assert_eq!(ended.to_string(), "rank 1 failed: CUDA: copying to the host failed: out of luck");
    }
}

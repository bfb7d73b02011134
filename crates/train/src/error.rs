//! What can stop a run, each with the sentence that a person reads.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use espalier_comm::Error::PeerFailed;
use espalier_comm::Failure;
use espalier_tensor::Category;
use espalier_tensor::memory::ByteSize;

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can stop a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The run file asks for something impossible.
    #[error(transparent)]
    Plan(#[from] espalier_plan::Error),
    /// The data is missing or not what it claims to be.
    #[error(transparent)]
    Data(espalier_data::Error),
    /// The device failed.
    #[error(transparent)]
    Tensor(#[from] espalier_tensor::Error),
    /// Ranks could not talk to each other.
    #[error(transparent)]
    Comm(#[from] espalier_comm::Error),
    /// A rank failed, and the run with it.
    #[error("rank {rank} failed: {error}")]
    RankFailed {
        /// Its number in the world.
        rank: usize,
        /// Its own message.
        error: Box<Error>,
    },
    /// A rank panicked, or failed in another process, and the run ended with it.
    #[error("rank {rank} {how}: {why}")]
    RankEnded {
        /// Its number in the world.
        rank: usize,
        /// `panicked` or `failed`.
        how: &'static str,
        /// What it said.
        why: String,
    },
    /// A rank failed, and others did not come to their end, so that they hang or are far from it.
    #[error("{error}; the run ends without {}, not heard of for another {:.1} s", ranks(.left), .waited.as_secs_f64())]
    RanksLeft {
        /// What the one that failed came to.
        error: Box<Error>,
        /// Those who hang, or compute on.
        left: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The run would need more memory than is left.
    #[error(
        "the run needs at least {}, and {holder} has {} left; most of it, {}, is for {category}: {advice} would need less \
         (device.check_memory = false starts it all the same)",
        ByteSize(*needed as usize), ByteSize(*left as usize), ByteSize(*most as usize)
    )]
    TooLarge {
        /// Bytes of all ranks that share the memory.
        needed: u64,
        /// Bytes that nobody has taken yet.
        left: u64,
        /// `this machine`, or a GPU.
        holder: String,
        /// What takes most of it.
        category: Category,
        /// How much that is.
        most: u64,
        /// What would make it fit, as a sentence.
        advice: String,
    },
    /// Ranks that must be the same are not.
    #[error("the {what} of {} differ from those of rank {first}: the run cannot continue", ranks(.others))]
    Disagree {
        /// What they should hold alike: weights, masks.
        what: &'static str,
        /// The rank that they were compared with.
        first: usize,
        /// Those that hold something else.
        others: Vec<usize>,
    },
    /// A checkpoint cannot be used.
    #[error("checkpoint {}: {why}", path.display())]
    Checkpoint {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file cannot be read or written as it was asked for.
    #[error("{}: {why}", path.display())]
    File {
        /// The file that could not be read or written.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// The disk is full or failed, or the system has no more of something; nothing is wrong with what was
    /// asked for.
    #[error("{}: {why}", path.display())]
    Disk {
        /// What was to be read or written.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// What should be saved, or came of it, cannot be gone on from.
    #[error(
        "the run diverged: {what} is NaN or infinite after step {step}, and is not saved; lower learning_rate.peak, lengthen \
         learning_rate.warmup or set train.clip"
    )]
    NotFinite {
        /// Steps done.
        step: u64,
        /// A weight, another part of the state, or the validation loss.
        what: String,
    },
    /// Trained weights that no number comes of.
    #[error("{}: {tensor} has a NaN or an infinity: what trained it diverged, and nothing comes of it", path.display())]
    BrokenWeights {
        /// The checkpoint, or the folder of another program.
        path: PathBuf,
        /// The first of them.
        tensor: String,
    },
    /// A measure of the loss around some weights has no value there.
    #[error("{what} cannot be measured: at these weights it is not a finite number")]
    Unmeasurable {
        /// The measure.
        what: String,
    },
    /// Too many steps in a row had a loss or gradient that is not a number.
    #[error(
        "the run diverged: {bad_steps} steps in a row, up to step {step}, gave a loss or gradient that is NaN or \
         infinite (last loss {loss}); lower learning_rate.peak, lengthen learning_rate.warmup or set train.clip"
    )]
    Diverged {
        /// The last step tried.
        step: u64,
        /// How many in a row.
        bad_steps: u64,
        /// The last loss.
        loss: f64,
    },
}

impl From<espalier_data::Error> for Error {
    fn from(error: espalier_data::Error) -> Error {
        match error {
            // A device that fails while it is fed fails as it does elsewhere.
            espalier_data::Error::Tensor(error) => Error::Tensor(error),
            error => Error::Data(error),
        }
    }
}

impl From<espalier_nn::Error> for Error {
    fn from(error: espalier_nn::Error) -> Error {
        match error {
            espalier_nn::Error::Tensor(error) => Error::Tensor(error),
            espalier_nn::Error::Comm(error) => Error::Comm(error),
            espalier_nn::Error::Sink(error) => *error.downcast().expect("all sinks are of this crate"),
        }
    }
}

impl From<Error> for espalier_nn::Error {
    /// What a sink of gradients could not do, on its way through layers.
    fn from(error: Error) -> espalier_nn::Error {
        match error {
            Error::Tensor(error) => espalier_nn::Error::Tensor(error),
            Error::Comm(error) => espalier_nn::Error::Comm(error),
            error => espalier_nn::Error::Sink(Box::new(error)),
        }
    }
}

impl From<Failure<Error>> for Error {
    fn from(failure: Failure<Error>) -> Error {
        match failure {
            Failure::Launch(error) => Error::Comm(error),
            // What concerns the run, and not the rank that was the first to find it.
            Failure::Failed { error, .. } if error.is_of_the_run() => error,
            // What stopped this one is what another said.
            Failure::Failed { error: Error::Comm(PeerFailed { failed, how, why, .. }), .. } => {
                Error::RankEnded { rank: failed, how, why }
            }
            Failure::Failed { error: error @ Error::RankEnded { .. }, .. } => error,
            Failure::Failed { rank, error } => Error::RankFailed { rank, error: Box::new(error) },
            Failure::Panicked { rank, message } => Error::RankEnded { rank, how: "panicked", why: message },
            Failure::Peer { rank, how, why } => Error::RankEnded { rank, how, why },
            Failure::LeftBehind { first, left, waited } => match Error::from(*first) {
                // A person's mistake is one, whoever is still at work.
                error if error.is_of_the_run() => error,
                error => Error::RanksLeft { error: Box::new(error), left, waited },
            },
        }
    }
}

impl Error {
    /// Whether it concerns the run as a whole, so that it does not matter which rank found it.
    pub(crate) fn is_of_the_run(&self) -> bool {
        match self {
            Error::Plan(_) | Error::Data(_) | Error::Checkpoint { .. } | Error::File { .. } => true,
            Error::Disk { .. } | Error::NotFinite { .. } | Error::BrokenWeights { .. } => true,
            Error::Diverged { .. } | Error::Disagree { .. } | Error::TooLarge { .. } => true,
            Error::Unmeasurable { .. } => true,
            Error::Tensor(_) | Error::Comm(_) => false,
            Error::RankFailed { .. } | Error::RankEnded { .. } | Error::RanksLeft { .. } => false,
        }
    }

    /// Wraps a system error with the file it happened on.
    pub(crate) fn file(path: impl Into<PathBuf>, why: impl ToString) -> Error {
        Error::File { path: path.into(), why: why.to_string() }
    }

    /// What a system error with a file is, in the words of `why`: the fault of the disk, or of whoever chose
    /// the file.
    pub fn of_io(path: impl Into<PathBuf>, error: &io::Error, why: impl ToString) -> Error {
        let (path, why) = (path.into(), why.to_string());
        match is_failure(error) {
            true => Error::Disk { path, why },
            false => Error::File { path, why },
        }
    }

    /// The same of a file that was being written.
    pub fn unwritten(path: impl Into<PathBuf>, error: io::Error) -> Error {
        Error::of_io(path, &error, format!("cannot be written: {error}"))
    }

    /// The same of one that was being read.
    pub fn unread(path: impl Into<PathBuf>, error: io::Error) -> Error {
        Error::of_io(path, &error, format!("cannot be read: {error}"))
    }
}

/// Whether a system error is that of a disk or a machine: the same command may do better elsewhere, or later,
/// as it is.
pub fn is_failure(error: &io::Error) -> bool {
    use io::ErrorKind::{
        FileTooLarge, Interrupted, OutOfMemory, QuotaExceeded, StaleNetworkFileHandle, StorageFull, TimedOut,
    };
    /// Errors that have no kind: EIO, ENFILE, EMFILE.
    const NUMBERS: [i32; 3] = [5, 23, 24];
    let of_space = matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory);
    let of_machine = matches!(error.kind(), Interrupted | StaleNetworkFileHandle | TimedOut);
    of_space || of_machine || error.raw_os_error().is_some_and(|number| NUMBERS.contains(&number))
}

/// `rank 3`, `ranks 1, 2 and 3`
fn ranks(ranks: &[usize]) -> String {
    let words: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match words.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, most)) => format!("ranks {} and {last}", most.join(", ")),
        None => "no rank".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// EIO, ENOSPC, EDQUOT, EMFILE: the machine's; ENOENT, EACCES, ENOTDIR, EROFS: of whoever chose the file.
    #[test]
    fn a_disk_that_fails_is_not_the_fault_of_who_chose_the_file() {
        let is_disk = |number: i32| {
            let error = || io::Error::from_raw_os_error(number);
            let all = [Error::unread("a", error()), Error::unwritten("a", error())];
            let disk = all.map(|error| matches!(error, Error::Disk { .. }));
            assert_eq!(disk[0], disk[1], "{number}");
            disk[0]
        };
        assert_eq!([5, 28, 122, 24].map(is_disk), [true; 4]);
        assert_eq!([2, 13, 20, 30].map(is_disk), [false; 4]);
    }
}

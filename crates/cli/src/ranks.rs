//! Ranks that end badly. Those of a launcher but the first say nothing unless they are the cause of what went
//! wrong: what is wrong with a run file is wrong on every rank, and a rank that fails stops all others. A
//! person should read each sentence once. Those that are threads here end with the process, even where one of
//! them hangs.

use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use espalier_train::Error;

use crate::signals::INTERRUPTED;
use crate::{exit_code, print_error};

/// How long a rank waits for rank 0, which may be about to print the same. A launcher ends the job
/// with the first process that ends badly, and this one with it.
const RANK0_HEAD_START: Duration = Duration::from_secs(3);

/// Runs the work of a rank that a launcher has started; those behind the first are quiet.
pub fn launched(rank: usize, work: impl FnOnce() -> Result<ExitCode>) -> ! {
    let error = match work() {
        Ok(code) => leave(if code == ExitCode::SUCCESS { 0 } else { INTERRUPTED }),
        Err(error) => error,
    };
    if rank == 0 {
        leave(print_error(&error));
    }
    match error.downcast_ref::<Error>() {
        // Another rank says why; or all do, and rank 0 speaks for them.
        Some(Error::RankEnded { rank: other, .. }) if *other != rank => leave(exit_code(&error)),
        Some(
            Error::Diverged { .. } | Error::NotFinite { .. } | Error::Disk { .. } | Error::Disagree { .. },
        ) => leave(exit_code(&error)),
        // They name the rank.
        Some(Error::RankFailed { .. } | Error::RankEnded { .. }) => leave(print_error(&error)),
        _ => {
            thread::sleep(RANK0_HEAD_START);
            leave(print_error(&error.context(format!("rank {rank}"))))
        }
    }
}

/// Ends the process. Nothing is run on the way out: NCCL's threads are still there, and one that sits in a
/// call that never returns may hold a lock that a handler of the C library or of the GPU's driver would wait
/// for.
fn leave(code: u8) -> ! {
    let _ = std::io::stdout().flush();
    signal_hook::low_level::exit(code.into())
}

/// Ends the process although a rank hangs, with what the others have to say.
pub fn abort(error: Error) -> ! {
    leave(print_error(&error.into()))
}

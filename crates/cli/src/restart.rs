//! `--max-restarts N`: a run that falls over goes on from its last good checkpoint.
//!
//! The run is a process of its own and this one waits for it. So it does not matter how it fell over: a rank
//! that panicked, a GPU that no longer answers, a kernel that was out of memory and killed it. What a person
//! did wrong (exit code 2), a run that diverged (4) and one that was interrupted (130) are left as they are:
//! they would come to the same end again.
//!
//! Of ranks that a launcher has started, each process waits for its own rank. Where one falls over all do,
//! since NCCL's ranks end with each other; so all are started again, and meet where they met before.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use anyhow::{Context, Result};
use espalier_train::run::{FolderLock, holds_run};
use rustix::process::{Pid, Signal, getppid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::output::print_err;
use crate::signals;

/// Exit codes after which nothing is gained by trying again.
const FINAL: [i32; 4] = [0, 2, 4, 130];

/// Runs this program with `first`, and, as often as it may, with `again`, for as long as it falls over. The
/// lock of its folder is held throughout, so that nobody comes in between.
pub fn supervise(
    restarts: usize,
    folder_lock: Option<&FolderLock>,
    first: &[OsString],
    again: &[OsString],
) -> Result<ExitCode> {
    let signals = SignalForwarder::start()?;
    let mut arguments = first;
    for restart in 1.. {
        let status = signals.wait(start(arguments, folder_lock)?)?;
        if status.code().is_some_and(|code| FINAL.contains(&code)) {
            return Ok(exit_code(status));
        }
        let is_there = folder_lock.is_none_or(FolderLock::is_there);
        let has_begun = match folder_lock {
            Some(lock) => is_there && holds_run(lock.folder())?,
            None => true,
        };
        if restart > restarts || signals.asked_to_stop() || !helps(status, is_there, has_begun) {
            if restarts > 0 && restart > restarts {
                print_err!("the run {}; no restart is left of {restarts}", ended(status));
            }
            return Ok(exit_code(status));
        }
        let (from, next) = match has_begun {
            true => ("from its last good checkpoint", again),
            false => ("from the beginning", first),
        };
        print_err!("the run {}; restart {restart} of {restarts}, {from}", ended(status));
        arguments = next;
    }
    unreachable!("restarts are counted without end")
}

/// Whether another attempt may come further. Where the run had not begun, what stopped it will stop it again,
/// unless it was killed; and in a folder of another the run of another may be.
fn helps(status: ExitStatus, is_there: bool, has_begun: bool) -> bool {
    has_begun || (is_there && status.signal().is_some())
}

/// Starts this program again, in a group of its own: the terminal's signals come here and are passed on,
/// once. It inherits the lock of the run folder as its standard input, which it does not read: where this
/// process is killed, the folder is taken until the run has saved and stopped.
fn start(arguments: &[OsString], folder_lock: Option<&FolderLock>) -> Result<Child> {
    let program = std::env::current_exe().context("where this program is")?;
    let lock = folder_lock
        .and_then(FolderLock::lock)
        .map(File::try_clone)
        .transpose()
        .context("the lock of the run folder")?;
    let input = lock.map_or_else(Stdio::null, Stdio::from);
    let mut run = Command::new(program);
    run.args(arguments).stdin(input).process_group(0).spawn().context("the run cannot be started")
}

/// `was killed by signal 9`, `failed with exit code 3`
fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("failed with exit code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended".into(),
    }
}

/// Its own exit code; for a signal the one that a shell would report.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Signals that end a run, passed on to whichever process is the run at the time.
struct SignalForwarder {
    /// Its number; 0 between two runs.
    run: Arc<AtomicI32>,
    /// The first signal that came.
    received: Arc<AtomicI32>,
}

impl SignalForwarder {
    fn start() -> Result<SignalForwarder> {
        let mut signals = Signals::new(signals::handled_signals())?;
        let forwarder = SignalForwarder { run: Arc::default(), received: Arc::default() };
        let (run, received) = (forwarder.run.clone(), forwarder.received.clone());
        thread::Builder::new().name("espalier-signals".into()).spawn(move || {
            for signal in signals.forever() {
                received.store(signal, Ordering::SeqCst);
                if let Some(run) = Pid::from_raw(run.load(Ordering::SeqCst)) {
                    forward(run, signal);
                }
            }
        })?;
        Ok(forwarder)
    }

    fn wait(&self, mut child: Child) -> Result<ExitStatus> {
        self.run.store(child.id() as i32, Ordering::SeqCst);
        // One that came before there was anybody to pass it on to.
        let received = self.received.load(Ordering::SeqCst);
        if let Some(run) = Pid::from_raw(child.id() as i32).filter(|_| received != 0) {
            forward(run, received);
        }
        let status = child.wait().context("the run cannot be waited for");
        self.run.store(0, Ordering::SeqCst);
        status
    }

    fn asked_to_stop(&self) -> bool {
        self.received.load(Ordering::SeqCst) != 0
    }
}

fn forward(run: Pid, signal: i32) {
    let signal = match signal {
        SIGINT => Signal::INT,
        SIGUSR1 => Signal::USR1,
        SIGHUP => Signal::HUP,
        _ => Signal::TERM,
    };
    // It may have ended by itself.
    let _ = kill_process(run, signal);
}

/// Asks this process to stop where the one that waits for it, of this number, ends. By a signal that only
/// asks: the kernel may send it more than once, and a second SIGTERM would not let the run save. False where
/// that one has ended already: of this there is no signal.
pub fn stop_with_parent(parent: i32) -> Result<bool> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
    Ok(getppid() == Pid::from_raw(parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_killed_before_it_began_is_started_again() {
        let (failed, killed) = (ExitStatus::from_raw(3 << 8), ExitStatus::from_raw(9));
        assert!(helps(killed, true, false) && helps(killed, true, true) && helps(failed, true, true));
        assert!(!helps(failed, true, false), "what stopped it will stop it again");
        assert!(!helps(killed, false, false), "its folder is another's");
    }
}

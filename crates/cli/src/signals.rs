//! Signals that ask a run to stop: what a person (SIGINT), a batch system (SIGTERM, or SIGUSR1 as in Slurm's
//! `--signal=USR1@60`) and a terminal that closes (SIGHUP) send.
//!
//! Once steps are taken, the first signal lets the step end, and the run saves. Until then, as long as files
//! are read, there is nothing to save, and the process ends at once: a read that takes long, or hangs, would
//! not let it end otherwise. A second SIGINT or SIGTERM does not wait. The others only ask: Slurm sends
//! SIGTERM behind them.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::output::print_err;

/// Exit code of a run that was interrupted and has saved.
pub const INTERRUPTED: u8 = 130;

/// The signals that are handled. SIGHUP is not where whoever started this does not want it to be, as `nohup`
/// does.
pub fn handled_signals() -> Vec<i32> {
    let mut signals = vec![SIGINT, SIGTERM, SIGUSR1];
    signals.extend((!is_ignored(SIGHUP)).then_some(SIGHUP));
    signals
}

/// What was asked for, and whether there is something to save.
#[derive(Debug, Clone, Default)]
pub struct StopSignal {
    /// The run should save and stop.
    pub requested: Arc<AtomicBool>,
    /// Steps are taken.
    pub begun: Arc<AtomicBool>,
}

impl StopSignal {
    /// Listens from now on, in a run.
    pub fn listen() -> Result<StopSignal> {
        StopSignal::listen_with_message("interrupted before the first step: there is nothing to save")
    }

    /// The same of any command: `at_once` is printed where nothing has begun, and the process ends.
    pub fn listen_with_message(at_once: &'static str) -> Result<StopSignal> {
        let stop = StopSignal::default();
        let (mut signals, signalled) = (Signals::new(handled_signals())?, stop.clone());
        let listener = thread::Builder::new().name("espalier-signals".into()).spawn(move || {
            let mut insisted = false;
            for signal in signals.forever() {
                if !signalled.begun.load(Ordering::SeqCst) {
                    print_err!("{at_once}");
                    // Nothing is run on the way out: what hangs may hold what a destructor would wait for.
                    low_level::exit(INTERRUPTED.into());
                }
                signalled.requested.store(true, Ordering::SeqCst);
                if [SIGINT, SIGTERM].contains(&signal) {
                    if insisted {
                        let _ = low_level::emulate_default_handler(signal);
                    }
                    insisted = true;
                }
            }
        });
        listener.context("no thread can be started that listens for signals")?;
        Ok(stop)
    }
}

/// Whether this process was started with a signal ignored, as the system tells it.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

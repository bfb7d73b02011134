//! What is said, and to whom. What a command was asked for goes to standard output (`print_out!`), progress
//! and notes to standard error (`print_err!`); with `--json` standard output belongs to the one line for a
//! program (`json`), and answers for people join the notes.
//!
//! Words may be lost. Whoever reads them can close the pipe (`| head`) or fill the disk that they go to, and
//! that must not end hours of training: what cannot be said is dropped. `eprintln!` and `println!` panic
//! there, so this program does not use them (see the lint in `main`).

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use indicatif::ProgressBar;
use rustix::termios::tcgetwinsize;
use serde::Serialize;

/// Where nobody says how wide lines are.
const USUAL_WIDTH: usize = 80;
/// Below this no table can be read.
const NARROWEST: usize = 20;

/// Whether standard output is for a program. Set once, before anything is said.
static IS_FOR_PROGRAM: AtomicBool = AtomicBool::new(false);
/// Whether it was reported that answers are lost.
static IS_WARNED: AtomicBool = AtomicBool::new(false);

/// Keeps standard output free for the line of JSON: answers go to standard error from now on.
pub fn keep_output_for_json() {
    IS_FOR_PROGRAM.store(true, Ordering::Relaxed);
}

/// `eprintln!` that cannot fail: progress, notes, warnings, errors.
macro_rules! print_err {
    ($($text:tt)*) => { $crate::output::on_standard_error(format_args!("{}\n", format_args!($($text)*))) };
}
pub(crate) use print_err;

/// `println!` that cannot fail: what the command was asked for.
macro_rules! print_out {
    ($($text:tt)*) => { $crate::output::on_standard_output(format_args!("{}\n", format_args!($($text)*))) };
}
pub(crate) use print_out;

/// The bar that is on the terminal, where there is one: whatever else is written takes it away first and puts
/// it back behind, so that no half of it stays.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Has a bar step aside for all that is said from now on; with none, no longer.
pub fn set_bar(bar: Option<ProgressBar>) {
    *BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar;
}

fn suspending_bar(write: impl FnOnce()) {
    // A copy, so that nothing is locked while it is written.
    let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Writes for a person, where somebody listens.
pub fn on_standard_error(text: impl Display) {
    let text = text.to_string();
    // In one piece: lines of several ranks share a terminal.
    suspending_bar(|| drop(io::stderr().write_all(text.as_bytes())));
}

/// Writes what the command was asked for. Whoever closed the pipe has read enough; of any other reason a
/// person hears once.
pub fn on_standard_output(text: impl Display) {
    if IS_FOR_PROGRAM.load(Ordering::Relaxed) {
        return on_standard_error(text);
    }
    let (text, mut written) = (text.to_string(), Ok(()));
    suspending_bar(|| {
        let mut stdout = io::stdout().lock();
        written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    });
    match written {
        Err(why) if why.kind() != ErrorKind::BrokenPipe && !IS_WARNED.swap(true, Ordering::Relaxed) => {
            print_err!("warning: what follows is lost, since standard output cannot be written: {why}");
        }
        _ => {}
    }
}

/// Whether answers are seen by a person at once.
pub fn answers_on_terminal() -> bool {
    match IS_FOR_PROGRAM.load(Ordering::Relaxed) {
        true => io::stderr().is_terminal(),
        false => io::stdout().is_terminal(),
    }
}

/// Letters in a line of where answers go: what `COLUMNS` says, else those of the terminal, else 80.
pub fn width() -> usize {
    let asked = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse::<usize>().ok());
    let found = || match IS_FOR_PROGRAM.load(Ordering::Relaxed) {
        true => tcgetwinsize(io::stderr()).ok(),
        false => tcgetwinsize(io::stdout()).ok(),
    };
    let found = asked.or_else(|| found().map(|size| usize::from(size.ws_col)));
    found.filter(|columns| *columns >= NARROWEST).unwrap_or(USUAL_WIDTH)
}

/// Writes the one line for a program, where it is `asked` for. Where it cannot be written a person hears of it;
/// what it tells of has happened, so the exit code stays that of the command.
pub fn json<T: Serialize>(asked: bool, value: impl FnOnce() -> T) {
    if !asked {
        return;
    }
    let line = serde_json::to_string(&value()).expect("an answer is plain data");
    let mut stdout = io::stdout().lock();
    if let Err(why) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        print_err!("warning: the line of JSON is lost, since standard output cannot be written: {why}");
    }
}

/// The same as the end of a command that has done what it was asked to.
pub fn answer<T: Serialize>(asked: bool, value: impl FnOnce() -> T) -> Result<ExitCode> {
    json(asked, value);
    Ok(ExitCode::SUCCESS)
}

//! Words that may be lost. Whoever reads them can close the pipe (`2>&1 | head`) or fill the disk that they go to, and that
//! must not end hours of training: what cannot be said is dropped. `eprintln!` and `println!` panic there, so this program
//! does not use them (see the lint in `main`).

use std::fmt;
use std::io::{self, Write};

/// `eprintln!` that cannot fail.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::on_standard_error(format_args!("{}\n", format_args!($($text)*))) };
}
pub(crate) use say;

/// Writes for a person, where somebody listens.
pub fn on_standard_error(text: fmt::Arguments<'_>) {
    // In one piece: lines of several ranks share a terminal.
    let _ = io::stderr().write_all(text.to_string().as_bytes());
}

/// Writes the one line for a program. Where it cannot be written a person hears of it; what it tells of has happened, so the
/// exit code stays that of the command.
pub fn json(value: &impl fmt::Display) {
    let mut stdout = io::stdout().lock();
    if let Err(why) = writeln!(stdout, "{value}").and_then(|()| stdout.flush()) {
        say!("warning: the line of JSON is lost, since standard output cannot be written: {why}");
    }
}

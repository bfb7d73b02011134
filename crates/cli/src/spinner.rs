//! What is being worked on while an answer takes long: a line on a terminal that goes away again, a sentence
//! every few seconds elsewhere. An answer that is there at once comes without either.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output::print_err;

/// Between two sentences where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);
/// A line that is gone sooner than it can be read is not shown.
const SHOWN_AFTER: Duration = Duration::from_millis(500);

/// So many things to do, one after the other.
pub struct Spinner {
    bar: Option<ProgressBar>,
    begun: Instant,
    last: Instant,
    done: usize,
    all: usize,
}

impl Spinner {
    pub fn new(all: usize) -> Spinner {
        let style = ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template");
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::no_length().with_style(style));
        Spinner { bar, begun: Instant::now(), last: Instant::now(), done: 0, all }
    }

    /// The next of them begins.
    pub fn next(&mut self, what: &str) {
        self.done += 1;
        let text = match self.all {
            1 => what.to_owned(),
            all => format!("{what} ({} of {all})", self.done),
        };
        match &self.bar {
            Some(bar) if self.begun.elapsed() > SHOWN_AFTER => {
                bar.set_message(text);
                bar.tick();
            }
            None if self.last.elapsed() > EVERY => {
                self.last = Instant::now();
                print_err!("{text}");
            }
            _ => {}
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

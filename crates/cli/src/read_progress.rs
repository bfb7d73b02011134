//! Progress of reading and tokenizing files: a bar on a terminal, a line every few seconds elsewhere.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::output::print_err;
use crate::progress::{bar, clear};

/// A bar on a terminal, a line every few seconds elsewhere.
pub struct ReadProgress {
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl ReadProgress {
    pub fn new() -> ReadProgress {
        let bar = bar("{bar:20} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left");
        ReadProgress { bar, last_line: Instant::now() }
    }

    pub fn update(&mut self, read: u64, all: u64) {
        match &self.bar {
            Some(bar) => {
                bar.set_length(all);
                bar.set_position(read);
            }
            None if self.last_line.elapsed() > Duration::from_secs(5) => {
                self.last_line = Instant::now();
                print_err!("{:.1} of {:.1} MB", read as f64 / 1e6, all as f64 / 1e6);
            }
            None => {}
        }
    }

    pub fn finish(&mut self) {
        self.bar.take().iter().for_each(clear);
    }
}

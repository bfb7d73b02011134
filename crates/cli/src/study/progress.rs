//! A study as it goes: a bar on a terminal, lines elsewhere; a line for every new best.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use espalier_study::{Cell, SearchProgress, StudyObserver, TrialRecord};
use indicatif::ProgressBar;

use crate::output::print_err;
use crate::progress::{bar, clear};

/// Without a terminal, a line comes at least this often while trials end.
const LINES: Duration = Duration::from_secs(20);

/// Shows a study as it goes.
pub struct StudyProgressPrinter {
    bar: Option<ProgressBar>,
    began: Instant,
    last_line: Instant,
    /// Trials of cells that an earlier process had ended.
    before: Option<usize>,
    /// K* of each cell, by batch and the bits of its sparsity.
    best: HashMap<(usize, u64), u64>,
}

impl StudyProgressPrinter {
    /// A bar where standard error is a terminal.
    pub fn new() -> StudyProgressPrinter {
        let bar = bar("{bar:20} {pos}/{len} trials{wide_msg}");
        let now = Instant::now();
        StudyProgressPrinter { bar, began: now, last_line: now, before: None, best: HashMap::new() }
    }

    /// Takes the bar away.
    pub fn finish(&mut self) {
        self.bar.take().iter().for_each(clear);
    }
}

/// Also where the study has failed.
impl Drop for StudyProgressPrinter {
    fn drop(&mut self) {
        self.finish();
    }
}

impl StudyObserver for StudyProgressPrinter {
    fn trial_updated(&mut self, record: &TrialRecord, progress: SearchProgress) {
        let SearchProgress { done, trials, settled, best } = progress;
        let before = *self.before.get_or_insert(settled);
        let cell = record.cell();
        let key = (cell.batch, cell.sparsity.to_bits());
        let left = left(self.began.elapsed(), settled - before.min(settled), trials - settled);
        if let Some(steps) = best.filter(|steps| self.best.get(&key).is_none_or(|known| steps < known)) {
            self.best.insert(key, steps);
            print_err!("{}: {steps} steps (trial {}, {})", name(cell), record.trial, values(record));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_length(trials as u64);
                bar.set_position(done as u64);
                bar.set_message(left);
            }
            None if self.last_line.elapsed() >= LINES => {
                self.last_line = Instant::now();
                print_err!("{done} of {trials} trials{left}");
            }
            None => {}
        }
    }

    fn widened(&mut self, cell: Cell, field: &str, low: f64, high: f64) {
        print_err!(
            "{}: the best {field} is at the edge; range extended to {low:.3e} .. {high:.3e}",
            name(cell)
        );
    }
}

/// `batch 64, 90 % sparsity`
pub fn name(cell: Cell) -> String {
    format!("batch {}, {} % sparsity", cell.batch, (cell.sparsity * 1000.0).round() / 10.0)
}

/// The hyperparameters of a trial, by the last word of their names.
fn values(record: &TrialRecord) -> String {
    let one = |(field, value): &(String, f64)| {
        let word = field.rsplit('.').next().unwrap_or(field);
        format!("{word} {}", short(*value))
    };
    record.fields.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A number in few digits.
pub fn short(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.01 {
        format!("{value:.2e}")
    } else {
        format!("{:.4}", value).trim_end_matches('0').trim_end_matches('.').into()
    }
}

/// Time that is left, if cells go on to end as they have: those of large batches take longer, so it is a guess.
fn left(elapsed: Duration, done: usize, to_do: usize) -> String {
    if done == 0 || to_do == 0 {
        return String::new();
    }
    let seconds = (elapsed.as_secs_f64() * to_do as f64 / done as f64).round() as u64;
    match seconds {
        0..90 => format!(", about {seconds} s left"),
        90..5400 => format!(", about {} min left", seconds.div_ceil(60)),
        _ => format!(", about {:.1} h left", seconds as f64 / 3600.0),
    }
}

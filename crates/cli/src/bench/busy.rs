//! Whether others are at work on this machine: what is measured beside them is true of nobody.
//! `/proc/stat` counts the ticks of all processors, `/proc/self/stat` those of this process.

use std::time::Duration;
use std::{fs, thread};

use crate::output::print_err;

/// How long the processors are watched before a benchmark begins.
const WATCHED: Duration = Duration::from_millis(300);
/// The fraction of their time from which there is a warning.
pub const MUCH: f64 = 0.1;

/// Warns where other programs, or other machines on the same host, take a fraction of the processors.
pub fn warn_if_busy() {
    let taken = watched(|| fs::read_to_string("/proc/stat").unwrap_or_default());
    if let Some(fraction) = taken.filter(|fraction| *fraction >= MUCH) {
        let percent = 100.0 * fraction;
        print_err!(
            "warning: other processes use {percent:.0} % of the CPU: measure again when the machine is idle"
        );
    }
}

/// Ticks of the processors when something began: those that somebody took, all, and this process's own.
pub struct ProcessorUse([u64; 3]);

impl ProcessorUse {
    /// None where the system does not say.
    pub fn begin() -> Option<ProcessorUse> {
        let [stat, own] = ["/proc/stat", "/proc/self/stat"].map(|path| fs::read_to_string(path).ok());
        let [taken, all] = ticks(&stat?)?;
        Some(ProcessorUse([taken, all, own_ticks(&own?)?]))
    }

    /// The fraction of all processors' time since then that others took.
    pub fn of_others(&self) -> Option<f64> {
        self.until(&ProcessorUse::begin()?)
    }

    fn until(&self, now: &ProcessorUse) -> Option<f64> {
        let [taken, all, own] = [0, 1, 2].map(|i| now.0[i].saturating_sub(self.0[i]) as f64);
        (all > 0.0).then(|| ((taken - own) / all).max(0.0))
    }
}

/// Ticks of a process and its children that have ended: the 12th to 15th number behind its name, which stands in
/// parentheses and may be any text.
fn own_ticks(stat: &str) -> Option<u64> {
    let numbers = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let ticks: Vec<u64> = numbers.skip(11).take(4).map(str::parse).collect::<Result<_, _>>().ok()?;
    (ticks.len() == 4).then(|| ticks.iter().sum())
}

/// The fraction of all processors' time that was taken while nothing was done here; none where the system does
/// not say.
fn watched(read: impl Fn() -> String) -> Option<f64> {
    let before = ticks(&read())?;
    thread::sleep(WATCHED);
    let after = ticks(&read())?;
    let [taken, all] = [0, 1].map(|i| after[i].saturating_sub(before[i]) as f64);
    (all > 0.0).then(|| taken / all)
}

/// Ticks of all processors since the machine began: those that somebody took, and all. From the first line of
/// `/proc/stat`: user, nice, system, idle, waiting for a disk, interrupts (two), stolen by the host; guests
/// come after these and are counted as users.
fn ticks(stat: &str) -> Option<[u64; 2]> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let numbers: Vec<u64> =
        line.split_ascii_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    let all = numbers.iter().sum();
    let idle: u64 = numbers.get(3..5)?.iter().sum();
    Some([all - idle, all])
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Of 200 ticks 30 were somebody's, of which 5 another machine's; guests are not counted twice.
    #[test]
    fn the_share_of_others_is_read_off_the_ticks() {
        let reads = Cell::new(0);
        let fraction = watched(|| {
            reads.set(reads.get() + 1);
            match reads.get() {
                1 => "cpu  1000 10 500 7000 90 3 2 0 40 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n".into(),
                _ => "cpu  1020 10 505 7160 100 3 2 5 60 0\n".into(),
            }
        });
        assert_eq!(fraction, Some(0.15));
    }

    /// Of 400 ticks 300 were taken, 180 of them by this process: others had 120.
    #[test]
    fn what_this_process_takes_is_not_that_of_others() {
        let [before, after] = [[1000, 5000, 20], [1300, 5400, 200]].map(ProcessorUse);
        assert_eq!(before.until(&after), Some(0.3));
        assert_eq!(before.until(&before), None, "no tick went by");
        let line = "41 (a ) name) S 1 41 41 0 -1 4194304 900 0 0 0 70 11 2 1 20 0 3 0 100";
        assert_eq!(own_ticks(line), Some(84));
        assert_eq!(own_ticks("41 (name) S 1"), None);
        assert!(ProcessorUse::begin().is_none_or(|use_now| use_now.of_others().is_none_or(f64::is_finite)));
    }

    #[test]
    fn a_system_that_does_not_say_is_not_called_busy() {
        assert_eq!(watched(String::new), None);
        assert_eq!(watched(|| "cpu  1 2\n".into()), None);
        assert_eq!(watched(|| "cpu  1 2 3 4 5 6 7 8\n".into()), None, "no tick went by");
    }
}

//! Whether others are at work on this machine: what is measured beside them is true of nobody.

use std::time::Duration;
use std::{fs, thread};

use crate::output::print_err;

/// How long the processors are watched before a benchmark begins.
const WATCHED: Duration = Duration::from_millis(300);
/// The fraction of their time from which there is a warning.
const MUCH: f64 = 0.1;

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

    #[test]
    fn a_system_that_does_not_say_is_not_called_busy() {
        assert_eq!(watched(String::new), None);
        assert_eq!(watched(|| "cpu  1 2\n".into()), None);
        assert_eq!(watched(|| "cpu  1 2 3 4 5 6 7 8\n".into()), None, "no tick went by");
    }
}

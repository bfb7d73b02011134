//! Whether a progress thread may keep a core to itself while its rank waits: whether the ranks of this
//! machine have one each.
//!
//! Launchers often bind a rank to a core of its own, so that what one process may use says nothing of the
//! machine. Therefore the ranks of a machine put together what each may use.

use std::fs;
use std::thread;

use ferrompi::{Communicator, ReduceOp, Result};

/// Cores of a machine that are told apart.
const MOST: usize = 1024;

/// The cores that a process may use, a bit each.
type CoreSet = [u64; MOST / 64];

/// What the ranks of a machine have of its cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CoreSubscription {
    /// At least one each.
    CoreEach,
    /// Fewer than ranks, or an unknown number: whoever keeps a core may keep it from the one that it waits for.
    Oversubscribed,
}

impl CoreSubscription {
    /// Of this machine. All ranks of the world must ask.
    pub(super) fn of(world: &Communicator) -> Result<CoreSubscription> {
        let machine = world.split_shared()?;
        let local = fs::read_to_string("/proc/self/status").map_or([0; _], |status| allowed(&status));
        let mut all = local;
        machine.allreduce_inplace(&mut all, ReduceOp::BitwiseOr)?;
        // A container may be granted the time of fewer cores than it may run on.
        let granted = thread::available_parallelism().map_or(1, usize::from);
        let cores = if granted < count(&local) { granted } else { count(&all) };
        Ok(if cores < machine.size() as usize {
            CoreSubscription::Oversubscribed
        } else {
            CoreSubscription::CoreEach
        })
    }
}

fn count(cores: &CoreSet) -> usize {
    cores.iter().map(|word| word.count_ones() as usize).sum()
}

/// What Linux says of a process: `Cpus_allowed:` and words of 32 bits in hexadecimal, the last for the first
/// cores. None where it says nothing of the kind.
fn allowed(status: &str) -> CoreSet {
    let mut cores = [0; _];
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"));
    for (i, word) in line.unwrap_or_default().trim().rsplit(',').enumerate().take(MOST / 32) {
        cores[i / 2] |= u64::from_str_radix(word, 16).unwrap_or(0) << (32 * (i % 2));
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_read_from_the_last_word_on() {
        let cores =
            allowed("Name:\tespalier\nCpus_allowed:\t1,00000000,80000003\nCpus_allowed_list:\t0-1,31,64\n");
        assert_eq!((cores[0], cores[1], count(&cores)), (0x8000_0003, 1, 4));
        assert_eq!(count(&allowed("Cpus_allowed:\tf\n")), 4);
        assert_eq!(count(&allowed("State:\tR (running)\n")), 0, "an unknown number");
        assert_eq!(count(&allowed(&format!("Cpus_allowed:\t{}f", "ffffffff,".repeat(40)))), MOST - 28);
    }
}

//! How much memory the machine has left for this process: what the kernel says is available, or less where
//! the process stands in control groups with a limit, as in a container or a batch job.
//!
//! Pages of files count as left: the kernel drops them when memory is asked for. Swap does not: a step
//! touches all of its memory, and one that waits for a disk each time is not what anybody wants.

use std::fs;
use std::path::Path;

/// Bytes that can still be taken without swapping; none where the system does not say.
pub fn memory_left() -> Option<u64> {
    left_below(Path::new("/"))
}

/// The same with the system's files below another folder.
fn left_below(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let meminfo = read("proc/meminfo");
    let machine = field(&meminfo, "MemAvailable:").map(|kilobytes| kilobytes.saturating_mul(1024));
    let groups = read("proc/self/cgroup");
    let limits = groups.lines().filter_map(ControlGroup::of).flat_map(|group| group.left(root));
    machine.into_iter().chain(limits).min()
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten()
    })
}

/// A control group that counts memory, in the first or the second version of them.
struct ControlGroup<'a> {
    is_second: bool,
    path: &'a str,
}

impl ControlGroup<'_> {
    /// From a line of `/proc/self/cgroup`: `0::/path`, or `4:cpu,memory:/path`.
    fn of(line: &str) -> Option<ControlGroup<'_>> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_second = number == "0" && controllers.is_empty();
        let counts = is_second || controllers.split(',').any(|controller| controller == "memory");
        counts.then_some(ControlGroup { is_second, path: path.trim_start_matches('/') })
    }

    /// What it and each group around it has left, where they have a limit. In a container its path may be
    /// that of the machine, of which only the end is to be seen: the folders that are there are asked.
    fn left(&self, root: &Path) -> Vec<u64> {
        let (base, limit, usage, files) = match self.is_second {
            true => ("sys/fs/cgroup", "memory.max", "memory.current", ["inactive_file", "active_file"]),
            false => (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_inactive_file", "total_active_file"],
            ),
        };
        let base = root.join(base);
        let folders = Path::new(self.path).ancestors().map(|path| base.join(path));
        let left = |folder: std::path::PathBuf| {
            let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
            let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
            let (limit, used) = (number(limit)?, number(usage)?);
            let counts = read("memory.stat").unwrap_or_default();
            let of_files: u64 = files.iter().filter_map(|name| field(&counts, name)).sum();
            Some(limit.saturating_sub(used.saturating_sub(of_files)))
        };
        folders.filter_map(left).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with the files of a system; it goes when it is dropped.
    struct System(std::path::PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> System {
            let root = std::env::temp_dir().join(format!("espalier-machine-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            System(root)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 16000 kB\nMemFree: 10 kB\nMemAvailable:   8000 kB\nSwapFree: 1000 kB\n");

    #[test]
    fn without_limits_what_is_available() {
        let system = System::new("plain", &[MEMINFO, ("proc/self/cgroup", "0::/\n")]);
        assert_eq!(left_below(&system.0), Some(8000 * 1024));
        assert_eq!(left_below(Path::new("/no/such/folder")), None);
    }

    #[test]
    fn a_group_or_one_around_it_has_a_limit() {
        let system = System::new(
            "second",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/job/step\n"),
                ("sys/fs/cgroup/job/step/memory.max", "max\n"),
                ("sys/fs/cgroup/job/step/memory.current", "100\n"),
                ("sys/fs/cgroup/job/memory.max", "5000\n"),
                ("sys/fs/cgroup/job/memory.current", "3000\n"),
                ("sys/fs/cgroup/job/memory.stat", "anon 1500\ninactive_file 900\nactive_file 600\n"),
            ],
        );
        assert_eq!(left_below(&system.0), Some(5000 - 1500), "pages of files can be dropped");
    }

    #[test]
    fn the_first_version_in_a_container_that_sees_its_own_group_as_the_root() {
        let system = System::new(
            "first",
            &[
                MEMINFO,
                ("proc/self/cgroup", "5:cpuset:/x\n4:memory:/docker/1234\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
                ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000\n"),
            ],
        );
        assert_eq!(left_below(&system.0), Some(0));
    }
}

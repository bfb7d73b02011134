//! A file that nobody can open for writing, as on a disk that no longer answers: who tries waits, for up to
//! 45 s, until the lease of another process on it is given up. Linux lets a program take such a lease;
//! Python's standard library has the call.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use espalier_testing::{Need, skipped};

/// A lease on a file, for as long as it lives.
pub struct Lease(Child);

const TAKE: &str = "
import fcntl, os, signal, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored where somebody else opens it
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print('taken', flush=True)
time.sleep(600)
";

impl Lease {
    /// Makes a file, empty, and takes the lease; nothing where the machine cannot.
    pub fn on(file: &Path) -> Option<Lease> {
        fs::write(file, "").unwrap();
        let mut python = Command::new("python3");
        python.args(["-c", TAKE]).arg(file).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut child) = python.spawn() else {
            skipped(Need::Python, "there is no python3 to take a lease of a file");
            return None;
        };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let lease = Lease(child);
        if line != "taken\n" {
            skipped(Need::Python, "no lease of a file can be taken here");
            return None;
        }
        Some(lease)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

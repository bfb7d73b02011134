//! Where nobody listens: standard error or standard output is a full disk (`/dev/full`) or a pipe whose
//! reader has gone (`2>&1 | head`). What is said is lost; the work is not. With `eprintln!` and `println!`
//! each of these would be a panic.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::{TINY, TestDir, command, espalier_command, json, stderr};

/// A place that takes nothing: a full disk, or a pipe that nobody reads.
#[derive(Clone, Copy, Debug)]
enum Deaf {
    Full,
    Closed,
}

impl Deaf {
    fn end(self) -> Stdio {
        match self {
            Deaf::Full => File::options().write(true).open("/dev/full").unwrap().into(),
            Deaf::Closed => std::io::pipe().unwrap().1.into(),
        }
    }
}

fn here(folder: &Path, arguments: &str) -> Command {
    fs::write(folder.join("run.toml"), TINY).unwrap();
    command(folder, arguments)
}

fn finished(output: &Output, why: &str) {
    assert_eq!(output.status.code(), Some(0), "{why}: {}", stderr(output));
}

#[test]
fn a_run_goes_on_where_standard_error_takes_nothing() {
    for deaf in [Deaf::Full, Deaf::Closed] {
        for more in ["", "--ranks 2", "--max-restarts 1", "--ranks 2 --log trace"] {
            let folder = TestDir::new();
            let arguments = format!("--json --out run --set train.eval_every=2 {more}");
            let output = here(&folder, &arguments).stderr(deaf.end()).output().unwrap();
            finished(&output, &format!("{deaf:?} {more:?}"));
            assert_eq!(json(&output.stdout)["steps"], 4);
            assert!(folder.join("run/checkpoints/step-000004/manifest.json").exists());
        }
        let folder = TestDir::new();
        let output = here(&folder, "--set train.bacth=4").stderr(deaf.end()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "an exit code is heard all the same");
    }
}

#[test]
fn a_run_goes_on_where_standard_output_takes_nothing() {
    for deaf in [Deaf::Full, Deaf::Closed] {
        let folder = TestDir::new();
        let output = here(&folder, "--json --out run").stdout(deaf.end()).output().unwrap();
        finished(&output, &format!("{deaf:?}"));
        assert_eq!(
            stderr(&output).matches("warning: the line of JSON is lost").count(),
            1,
            "{}",
            stderr(&output)
        );
        let neither =
            here(&folder, "--json --out other").stdout(deaf.end()).stderr(deaf.end()).output().unwrap();
        finished(&neither, &format!("{deaf:?}, both"));
        assert!(folder.join("other/checkpoints/step-000004/manifest.json").exists());
    }
}

#[test]
fn other_commands_do_not_panic_either() {
    let commands: [&str; 5] = [
        "schedule 1f1b --stages 2 --micro-batches 4",
        "doctor",
        "schedule 1f1b --stages 2 --micro-batches 4 --json",
        "schedule 1f1b --stages 2 --micro-batches 4 --actions",
        "doctor --json",
    ];
    for arguments in commands {
        for deaf in [Deaf::Full, Deaf::Closed] {
            // Whoever closed the pipe hears nothing more; who filled the disk, once.
            let command = || espalier_command(Path::new("."), arguments);
            let output = command().stdout(deaf.end()).output().unwrap();
            if !["--json", "--actions"].iter().any(|option| arguments.contains(option)) {
                let warnings = stderr(&output).matches("standard output cannot be written").count();
                assert_eq!(warnings, usize::from(matches!(deaf, Deaf::Full)), "{}", stderr(&output));
                assert_eq!(stderr(&output).lines().count(), warnings, "{}", stderr(&output));
            }
            let run = || command().stdout(deaf.end()).stderr(deaf.end()).status().unwrap().code();
            // A file of actions that is not all there is no success; a reader that has seen enough is.
            let lost = arguments.contains("--actions") && matches!(deaf, Deaf::Full);
            assert_eq!(run(), Some(if lost { 3 } else { 0 }), "{deaf:?} {arguments:?}");
        }
    }
}

//! The binary as a person or a program meets it.

mod bad_input;
mod bench;
mod browser;
mod claimed;
mod compare;
mod completions;
mod damage;
mod doctor;
mod dry_run;
mod explain;
mod faults;
mod generate;
mod hello;
mod killed;
mod kinds;
mod launch;
mod lease;
mod log;
mod measure;
mod models;
#[cfg(feature = "mpi")]
mod mpi;
mod outputs;
mod overwrite;
mod pipeline;
mod plan;
mod planned;
mod prune;
mod ranks;
mod report;
mod resumed;
mod schedule;
mod signals;
mod streams;
mod study;
mod terminal;
mod tokenize;
mod train;
mod unheard;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A run file that finishes in a moment.
pub const TINY: &str = r#"
    [model]
    name = "gpt"
    layers = 1
    heads = 2
    width = 16
    context = 16
    [data]
    kind = "arithmetic"
    count = 200
    [train]
    steps = 4
    batch = 4
    eval_samples = 8
    [device]
    kind = "cpu"
    threads = 2
"#;

/// Writes `run.toml` into `folder` and runs `espalier train run.toml ARGUMENTS` there.
pub fn train_in(folder: &Path, run_file: &str, arguments: &[&str]) -> Output {
    fs::write(folder.join("run.toml"), run_file).unwrap();
    command(folder, arguments).output().unwrap()
}

/// The command `espalier train run.toml ARGUMENTS`, to be run in `folder`.
pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.current_dir(folder).arg("train").arg("run.toml").args(arguments);
    command
}

/// What `espalier doctor --json` finds.
pub fn doctor() -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_espalier")).args(["doctor", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    json(&output.stdout)
}

/// Standard output, which must be one line of JSON.
pub fn json(stdout: &[u8]) -> Value {
    let text = String::from_utf8(stdout.to_vec()).unwrap();
    assert_eq!(text.lines().count(), 1, "one line of JSON and nothing else on standard output: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Standard error as text.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output as text.
pub fn shown(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A build without MPI has no tests that could say that they were skipped.
#[cfg(not(feature = "mpi"))]
#[test]
fn mpi_is_built_in() {
    espalier_testing::skipped(
        espalier_testing::Need::Mpi,
        "these tests were built without `--features espalier-cli/mpi`",
    );
}

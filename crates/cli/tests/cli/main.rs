//! The binary as a person or a program meets it.

mod bad_input;
mod train;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

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

/// Standard error as text.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

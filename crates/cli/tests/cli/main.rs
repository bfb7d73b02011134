//! The binary as a person or a program meets it.

mod bad_input;
mod bench;
mod browser;
mod compare;
mod completions;
mod damage;
mod data;
mod doctor;
mod dry_run;
mod explain;
mod faults;
mod folder_lock;
mod generate;
mod hello;
mod images;
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
mod time_to_result;
mod tokenize;
mod train;
mod unheard;

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
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

/// A folder of its own, which goes with the test.
pub struct TestDir(tempfile::TempDir);

impl TestDir {
    /// With nothing in it.
    #[expect(clippy::new_without_default, reason = "a folder on the disk is no default")]
    pub fn new() -> TestDir {
        TestDir(tempfile::tempdir().unwrap())
    }

    /// With `run.toml`.
    pub fn with_run_file() -> TestDir {
        let folder = TestDir::new();
        fs::write(folder.join("run.toml"), TINY).unwrap();
        folder
    }

    /// With a run of four steps in `run`.
    pub fn trained() -> TestDir {
        let folder = TestDir::new();
        succeeded(train_in(&folder, TINY, "--out run"));
        folder
    }
}

impl Deref for TestDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.0.path()
    }
}

impl AsRef<Path> for TestDir {
    fn as_ref(&self) -> &Path {
        self
    }
}

/// The repository, where run files are named from.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The command `espalier ARGUMENTS`, which spaces divide, to be run in `folder`.
pub fn espalier_command(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.current_dir(folder).args(arguments.split_whitespace());
    command
}

/// Runs `espalier ARGUMENTS` in `folder`.
pub fn espalier(folder: &Path, arguments: &str) -> Output {
    espalier_command(folder, arguments).output().unwrap()
}

/// Writes `run.toml` into `folder` and runs `espalier train run.toml ARGUMENTS` there.
pub fn train_in(folder: &Path, run_file: &str, arguments: &str) -> Output {
    fs::write(folder.join("run.toml"), run_file).unwrap();
    command(folder, arguments).output().unwrap()
}

/// The command `espalier train run.toml ARGUMENTS`, to be run in `folder`.
pub fn command(folder: &Path, arguments: &str) -> Command {
    espalier_command(folder, &format!("train run.toml {arguments}"))
}

/// `--set FIELD=VALUE` for each of these fields, which spaces divide.
pub fn set(fields: &str) -> String {
    fields.split_whitespace().map(|field| format!("--set {field} ")).collect()
}

/// Settings with which a run diverges.
pub const DIVERGING: &str = "--set learning_rate.peak=1e38 --set optimizer.name=sgd --set train.steps=30";

/// What `espalier doctor --json` finds.
pub fn doctor() -> Value {
    json_of(espalier(Path::new("."), "doctor --json"))
}

/// What has succeeded.
#[track_caller]
pub fn succeeded(output: Output) -> Output {
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

/// What has succeeded, and has said all of these on standard error.
#[track_caller]
pub fn said(output: Output, words: &[&str]) -> Output {
    assert_contains(&stderr(&output), words);
    succeeded(output)
}

/// The JSON of what has succeeded.
#[track_caller]
pub fn json_of(output: Output) -> Value {
    json(&succeeded(output).stdout)
}

/// What was said by what has found a mistake in its input; all of these are in it.
#[track_caller]
pub fn refused(output: Output, words: &[&str]) -> String {
    ended(output, 2, words)
}

/// What was said by what has ended with an exit code; all of these are in it.
#[track_caller]
pub fn ended(output: Output, code: i32, words: &[&str]) -> String {
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_contains(&text, words);
    text
}

/// The same in one sentence, with nothing on standard output.
#[track_caller]
pub fn refused_in_a_sentence(output: Output, words: &[&str]) -> String {
    assert!(output.stdout.is_empty(), "{}", stdout(&output));
    let text = refused(output, words);
    assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    text
}

/// The same of each line of a table, `ARGUMENTS => WORDS`.
#[track_caller]
pub fn refused_each(table: &str, run: impl Fn(&str) -> Output) {
    for line in table.trim().lines() {
        let (arguments, words) = line.split_once(" => ").expect("arguments, and words");
        refused_in_a_sentence(run(arguments), &[words]);
    }
}

/// The same where something else may have been said before: the last line is the sentence.
#[track_caller]
pub fn refused_at_last(output: Output, words: &[&str]) -> String {
    let text = refused(output, words);
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: "), "{text}");
    assert_contains(last, words);
    last.to_owned()
}

/// All of these are in a text.
#[track_caller]
pub fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is missing: {text}");
    }
}

/// Standard output, which must be one line of JSON.
pub fn json(stdout: &[u8]) -> Value {
    let text = String::from_utf8(stdout.to_vec()).unwrap();
    assert_eq!(text.lines().count(), 1, "one line of JSON and nothing else on standard output: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output as text.
pub fn stdout(output: &Output) -> String {
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

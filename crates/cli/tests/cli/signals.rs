//! Signals that ask a run to stop, beside SIGINT and SIGTERM: those of a batch system and of a terminal that
//! closes.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::faults::{LONG, kill, wait_for_step};
use crate::lease::Lease;
use crate::{TINY, TestDir, ended};

/// A run without an end in `broken`, with SIGHUP as `env` is told to leave it, whatever these tests were
/// started with.
fn start(folder: &Path, hup: &str, more: &str) -> Child {
    fs::write(folder.join("run.toml"), TINY).unwrap();
    let mut command = Command::new("env");
    command.current_dir(folder).args([hup, env!("CARGO_BIN_EXE_espalier"), "train", "run.toml"]);
    let settings = format!("{LONG} --set train.steps=1000000 --out broken {more}");
    command.args(settings.split_whitespace());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Its end, which must come.
fn end(mut child: Child) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn a_batch_system_and_a_closed_terminal_let_it_save() {
    for (signal, more) in
        [("-USR1", ""), ("-HUP", ""), ("-USR1", "--max-restarts 1"), ("-HUP", "--max-restarts 1")]
    {
        let folder = TestDir::new();
        let mut child = start(&folder, "--default-signal=HUP", more);
        wait_for_step(&mut child, &folder.join("broken"), 3);
        kill(signal, child.id());
        ended(end(child), 130, &["interrupted and saved"]);
    }
}

/// `nohup espalier train ...` goes on when the terminal closes.
#[test]
fn whoever_ignores_a_closed_terminal_is_left_alone() {
    let folder = TestDir::new();
    let mut child = start(&folder, "--ignore-signal=HUP", "");
    let run = folder.join("broken");
    wait_for_step(&mut child, &run, 3);
    kill("-HUP", child.id());
    let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count() as u64;
    wait_for_step(&mut child, &run, lines + 5);
    // Slurm's order: a request first, and SIGTERM behind it, which must not be taken for impatience.
    kill("-USR1", child.id());
    kill("-TERM", child.id());
    ended(end(child), 130, &["interrupted and saved"]);
}

/// Before the first step there is nothing to save, and a read that does not come back must not keep the
/// process.
#[test]
fn a_slow_read_answers_the_first_signal() {
    let folder = TestDir::new();
    let run = folder.join("broken");
    fs::create_dir(&run).unwrap();
    // The last thing that a run opens before its first step.
    let Some(_lease) = Lease::on(&run.join("metrics.jsonl")) else { return };
    let child = start(&folder, "--default-signal=HUP", "");
    let begin = Instant::now();
    while !run.join("plan.json").exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the run does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill("-TERM", child.id());
    let text = ended(end(child), 130, &[]);
    assert!(text.ends_with("interrupted before the first step: there is nothing to save\n"), "{text}");
}

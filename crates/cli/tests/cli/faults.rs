//! Runs that are killed: what is left is complete, and resuming it gives the bits of never having been killed.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use espalier_train::checkpoint::Checkpoint;
use espalier_train::parallel::Ranks;

use crate::lease::Lease;
use crate::{
    DIVERGING, TINY, TestDir, command, ended, json, json_of, refused, said, stderr, succeeded, train_in,
};

/// Settings of a run that is long enough to be killed, and saves often enough to be killed while it does.
pub const LONG: &str = "--set train.steps=40 --set model.width=64 --set train.log_every=1 --set checkpoint.every=2 \
                        --set model.dropout=0.1";

/// A number below `n` that differs from run to run; whoever uses it says what it was where a test fails.
pub fn random(n: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    (u64::from(now.subsec_nanos()) / 1000 + u64::from(std::process::id())) % n
}

pub fn kill(signal: &str, process: u32) {
    let killed = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(killed.success(), "kill {signal} {process}");
}

/// Waits until the run in a folder has logged a step: false where the process ended before.
pub fn reaches_step(process: &mut Child, folder: &Path, step: u64) -> bool {
    let begin = Instant::now();
    let reached = || {
        let metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
        let step_of = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64();
        metrics.lines().filter_map(step_of).any(|logged| logged >= step)
    };
    while !reached() {
        if process.try_wait().unwrap().is_some() {
            return reached();
        }
        assert!(begin.elapsed() < Duration::from_secs(150), "step {step} is never reached");
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// The same of a run that must not end before.
pub fn wait_for_step(process: &mut Child, folder: &Path, step: u64) {
    assert!(reaches_step(process, folder, step), "the run ended before step {step}");
}

/// All checkpoints that are there under their names can be used.
pub fn assert_complete(run: &Path) {
    let Ok(checkpoints) = fs::read_dir(run.join("checkpoints")) else { return };
    for entry in checkpoints.map(|entry| entry.unwrap().path()) {
        if entry.file_name().unwrap().to_str().unwrap().starts_with("step-") {
            Checkpoint::read(&entry, &Ranks::single()).unwrap();
        }
    }
}

/// Starts a run, whose output is kept.
pub fn start(folder: &Path, arguments: &str) -> Child {
    let mut command = command(folder, arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn uninterrupted(folder: &Path, more: &str) -> serde_json::Value {
    json_of(train_in(folder, TINY, &format!("{LONG} --json --out whole {more}")))["weights_hash"].clone()
}

#[test]
fn a_killed_run_leaves_whole_checkpoints_and_goes_on_with_the_same_bits() {
    // Each rank writes its shard of kept weights.
    let sharded = "--ranks 2 --set parallel.zero=3 --set prune.method=random";
    for ranks in ["--ranks 1", "--ranks 2", sharded] {
        let folder = TestDir::new();
        let expected = uninterrupted(&folder, ranks);
        let arguments = format!("{LONG} --json --out broken {ranks}");
        let run = folder.join("broken");
        let (first, second) = (1 + random(12), 20 + random(10));
        for (step, resume) in [(first, ""), (second, "--resume")] {
            let mut child = start(&folder, &format!("{arguments} {resume}"));
            wait_for_step(&mut child, &run, step);
            kill("-KILL", child.id());
            assert_eq!(child.wait().unwrap().code(), None, "killed at {first} and {second}");
            assert_complete(&run);
        }
        let resumed = command(&folder, &format!("{arguments} --resume")).output().unwrap();
        let output = said(resumed, &["resumed after step"]);
        assert_eq!(json(&output.stdout)["weights_hash"], expected, "killed at {first} and {second}");
    }
}

/// The process that a process has started, and not the one that it started before.
fn child_of(process: u32, before: Option<u32>) -> u32 {
    let begin = Instant::now();
    loop {
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
        let child = children.split_whitespace().filter_map(|child| child.parse().ok()).next();
        if let Some(child) = child.filter(|child| Some(*child) != before) {
            return child;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "no process was started: {children:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills the run of a process that restarts it, at as many steps as are given.
fn killed_at(steps: &[u64], folder: &Path, arguments: &str) -> Output {
    let mut child = start(folder, arguments);
    let mut run = None;
    for step in steps {
        run = Some(child_of(child.id(), run));
        wait_for_step(&mut child, &folder.join("broken"), *step);
        kill("-KILL", run.unwrap());
    }
    child.wait_with_output().unwrap()
}

#[test]
fn a_run_that_falls_over_is_restarted_as_often_as_it_may() {
    for ranks in ["1", "2"] {
        let folder = TestDir::new();
        let ranks = format!("--ranks {ranks}");
        let expected = uninterrupted(&folder, &ranks);
        let arguments = format!("{LONG} --json --out broken --max-restarts 2 {ranks}");
        let steps = [3 + random(12), 20 + random(10)];
        let output = killed_at(&steps, &folder, &arguments);
        let text = stderr(&output);
        assert!(output.status.success(), "killed at {steps:?}: {text}");
        assert_eq!(json(&output.stdout)["weights_hash"], expected, "killed at {steps:?}");
        for restart in 1..=2 {
            let sentence = format!(
                "the run was killed by signal 9; restart {restart} of 2, from its last good checkpoint"
            );
            assert_eq!(text.matches(&sentence).count(), 1, "killed at {steps:?}: {text}");
        }
        assert_eq!(text.matches("resumed after step").count(), 2, "killed at {steps:?}: {text}");
    }
}

#[test]
fn restarts_come_to_an_end_and_are_not_for_mistakes() {
    let folder = TestDir::with_run_file();
    let arguments = format!("{LONG} --out broken --max-restarts 1");
    let text = ended(killed_at(&[3, 20], &folder, &arguments), 128 + 9, &[]);
    assert!(text.ends_with("killed by signal 9; no restart is left of 1\n"), "{text}");

    let text = refused(train_in(&folder, "nonsense", "--max-restarts 3"), &[]);
    assert_eq!(text.lines().count(), 1, "{text}");
    let text = ended(train_in(&folder, TINY, &format!("{DIVERGING} --max-restarts 3")), 4, &[]);
    assert!(!text.contains("restart"), "{text}");
    let mut launched = command(&folder, "--max-restarts 3");
    let text = refused(
        launched.env("OMPI_COMM_WORLD_SIZE", "2").env("OMPI_COMM_WORLD_RANK", "0").output().unwrap(),
        &[],
    );
    // NCCL's ranks are restarted each by its own process; MPI's cannot be, and a program without MPI says
    // that first.
    let mistake = "error: `--max-restarts` restarts ranks of one process or of NCCL";
    assert!(text.starts_with(mistake) || text.contains("was built without MPI"), "{text}");
}

#[test]
fn a_stop_reaches_the_run_through_the_process_that_restarts_it() {
    let folder = TestDir::with_run_file();
    let arguments = format!("{LONG} --out broken --max-restarts 1 --set train.steps=100000");
    let mut child = start(&folder, &arguments);
    wait_for_step(&mut child, &folder.join("broken"), 2);
    kill("-INT", child.id());
    ended(child.wait_with_output().unwrap(), 130, &["interrupted and saved"]);

    // Where the one that waits is killed, the run does not go on alone.
    let mut child = start(&folder, &format!("{arguments} --resume"));
    let run = child_of(child.id(), None);
    wait_for_step(&mut child, &folder.join("broken"), 10);
    kill("-KILL", child.id());
    child.wait().unwrap();
    let mut text = String::new();
    // The end of this stream is the end of the last process that could write to it.
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(text.contains("interrupted and saved"), "process {run} went on: {text}");
}

/// Killed before its first checkpoint, a run that started from other weights starts from them again.
#[test]
fn a_run_that_is_restarted_before_its_first_checkpoint_has_the_weights_it_started_from() {
    let at = &TestDir::new();
    uninterrupted(at, "");
    let from = format!("{LONG} --set checkpoint.every=1000 --from whole --json --out");
    let expected = json_of(train_in(at, TINY, &format!("{from} tuned")));
    let output = said(
        killed_at(&[3], at, &format!("{from} broken --max-restarts 1")),
        &["note: the run starts from the weights of "],
    );
    assert_eq!(json(&output.stdout)["weights_hash"], expected["weights_hash"]);
}

/// One that is killed before the run has asked to be told of it leaves no run behind, which nobody would wait
/// for.
#[test]
fn a_run_whose_starter_has_ended_before_it_does_not_begin() {
    let folder = TestDir::new();
    let nobody = (i32::MAX - 1).to_string();
    ended(train_in(&folder, TINY, &format!("--supervised {nobody} --out run")), 130, &[]);
    assert!(!folder.join("run").exists());
    let own = std::process::id().to_string();
    fs::create_dir(folder.join("run")).unwrap();
    succeeded(train_in(&folder, TINY, &format!("--supervised {own} --out run")));
}

/// Rank 0 hangs where it opens a file, as on a disk that no longer answers: the other names it, and the
/// process ends with that, to be started again where that is wanted.
#[test]
fn a_run_ends_although_a_rank_hangs() {
    for (restarts, said_last) in [("0", "another 1.0 s\n"), ("1", "no restart is left of 1\n")] {
        let folder = TestDir::new();
        let metrics = folder.join("broken/metrics.jsonl");
        fs::create_dir(folder.join("broken")).unwrap();
        let Some(_lease) = Lease::on(&metrics) else { return };
        let arguments = format!("--ranks 2 --out broken --max-restarts {restarts}");
        let limit = "--set parallel.timeout_s=1";
        let text = ended(train_in(&folder, TINY, &format!("{arguments} {limit}")), 3, &[]);
        // How long it took to notice is the machine's affair.
        let names_it = |line: &&str| {
            line.starts_with("error: rank 1 failed: rank 1 waited ") && line.contains(" s for rank 0 in ")
        };
        let named = text.lines().filter(names_it).count();
        let left = text.matches("; the run ends without rank 0, not heard of for another 1.0 s").count();
        assert_eq!((named, left), (1 + restarts.parse::<usize>().unwrap(), named), "{text}");
        assert!(text.ends_with(said_last), "{text}");
    }
}

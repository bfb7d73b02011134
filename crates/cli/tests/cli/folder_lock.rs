//! Run folders: one process at a time writes to one, and runs that are started at once get one each.

use std::fs;
use std::process::Child;

use crate::faults::{LONG, kill, start, wait_for_step};
use crate::{TINY, TestDir, command, json_of, refused, succeeded, train_in};

const ENDLESS: &str = "--out run --set train.steps=1000000";

#[test]
fn six_runs_started_at_once_get_six_folders() {
    let folder = TestDir::with_run_file();
    let kinds = ["", "", "", "--ranks 2", "", "--max-restarts 1"];
    let runs: Vec<Child> = kinds.iter().map(|kind| start(&folder, &format!("--json {kind}"))).collect();
    let mut folders: Vec<String> = Vec::new();
    for run in runs {
        folders.push(json_of(run.wait_with_output().unwrap())["run"].as_str().unwrap().into());
    }
    folders.sort();
    assert_eq!(folders, ["out/run", "out/run-2", "out/run-3", "out/run-4", "out/run-5", "out/run-6"]);
    for run in folders {
        assert!(folder.join(&run).join("checkpoints/step-000004/manifest.json").exists(), "{run}");
    }
}

/// The lock goes with the process, however it ends: nobody has to clean up behind a kill.
#[test]
fn a_second_process_is_refused_until_the_first_has_ended() {
    let folder = TestDir::with_run_file();
    let run = folder.join("run");
    let mut first = start(&folder, &format!("{LONG} {ENDLESS}"));
    wait_for_step(&mut first, &run, 3);
    let metrics = fs::metadata(run.join("metrics.jsonl")).unwrap().len();
    for more in ["", "--resume", "--resume --max-restarts 1", "--resume --ranks 2", "--resume --dry-run"] {
        let second = command(&folder, &format!("{LONG} {ENDLESS} {more}")).output().unwrap();
        let text = refused(second, &["is at work in this folder"]);
        let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
        let expected = format!("error: run: process {} ", first.id());
        assert!(errors.len() == 1 && errors[0].starts_with(&expected), "{more:?}: {text}");
    }
    assert!(fs::metadata(run.join("metrics.jsonl")).unwrap().len() >= metrics, "it was not touched");
    kill("-KILL", first.id());
    first.wait().unwrap();
    succeeded(command(&folder, &format!("{LONG} --out run --resume")).output().unwrap());
}

/// A run that is started again keeps its folder in between, and one whose starter was killed until it has
/// saved.
#[test]
fn a_restarted_run_holds_its_folder() {
    let folder = TestDir::with_run_file();
    let mut first = start(&folder, &format!("{LONG} {ENDLESS} --max-restarts 1"));
    wait_for_step(&mut first, &folder.join("run"), 3);
    let second = refused(command(&folder, &format!("{LONG} {ENDLESS} --resume")).output().unwrap(), &[]);
    assert!(second.contains(&format!("process {} ", first.id())), "{second}");
    kill("-TERM", first.id());
    assert_eq!(first.wait().unwrap().code(), Some(130));
}

#[test]
fn a_run_that_does_not_begin_leaves_nothing() {
    let folder = TestDir::new();
    for arguments in ["--from nowhere", "--from nowhere --max-restarts 2"] {
        refused(train_in(&folder, TINY, arguments), &[]);
        assert!(!folder.join("out").exists(), "{arguments:?}");
    }
}

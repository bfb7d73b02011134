//! A run that is killed while it writes checkpoints, on several ranks: what it leaves can be gone on from.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::{TINY, TestDir, command, json, said, set, stderr, train_in};

/// The last step of which a checkpoint is there.
pub fn last_step(folder: &Path) -> Option<u64> {
    let names = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max()
}

#[test]
fn whenever_a_run_is_killed_its_checkpoints_are_whole() {
    killed("parallel.zero=true", "");
}

/// The same where each rank writes its shards of kept weights.
#[test]
fn whenever_a_run_of_sharded_weights_is_killed_its_checkpoints_are_whole() {
    killed("parallel.zero=3", "prune.method=magnitude prune.sparsity=0.8");
}

/// Kills a run on two and four ranks in turn, and goes on with a single one; the rest of the settings is that
/// of all of them.
fn killed(on_ranks: &str, settings: &str) {
    let folder = TestDir::new();
    let checkpoints = folder.join("out/checkpoints");
    fs::write(folder.join("run.toml"), TINY).unwrap();
    let alone = set(&format!("{settings} checkpoint.every=1 train.eval_samples=0"));
    let settings = format!("{alone} {}", set(&format!("{on_ranks} train.steps=100000")));
    let mut reached = 0;
    for kill in 0..6 {
        let ranks = ["2", "4"][kill % 2];
        let resume = if kill > 0 { "--resume" } else { "" };
        let arguments = format!("--out out --ranks {ranks} {settings} {resume}");
        let mut run =
            command(&folder, &arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while last_step(&checkpoints).is_none_or(|step| step <= reached) {
            if run.try_wait().unwrap().is_some() {
                panic!("it goes on until it is killed: {}", stderr(&run.wait_with_output().unwrap()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // At another moment of the next checkpoints each time.
        std::thread::sleep(Duration::from_micros(3700 * kill as u64));
        run.kill().unwrap();
        let output = run.wait_with_output().unwrap();
        assert!(!stderr(&output).contains("the one before it is used"), "{}", stderr(&output));
        reached = last_step(&checkpoints).unwrap();
    }
    let end = format!("--out out --resume --json --set train.steps={} {alone}", reached + 2);
    let output = said(train_in(&folder, TINY, &end), &[&format!("resumed after step {reached}")]);
    assert_eq!(json(&output.stdout)["steps"], reached + 2);
    let left: Vec<_> = fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        left.iter().all(|name| name.to_string_lossy().starts_with("step-")),
        "nothing else is left: {left:?}"
    );
}

//! `--log LEVEL`: what each rank does and waits for, for whoever has to find out where a run hangs.

use std::fs;

use crate::lease::Lease;
use crate::{TINY, TestDir, command, ended, espalier, json, stderr, succeeded, train_in};

/// The lines that a log of `text` has of a rank, without their times.
fn of_rank(text: &str, rank: usize) -> Vec<&str> {
    let name = format!("rank {rank}: ");
    let lines = text.lines().filter(|line| !line.starts_with("error"));
    lines
        .filter_map(|line| Some((line.find(&name)?, line)))
        .map(|(at, line)| &line[at + name.len()..])
        .collect()
}

#[test]
fn each_rank_tells_its_actions_and_what_it_waits_for_before_it_does() {
    let folder = TestDir::new();
    let arguments = "--json --out a --ranks 2 --log debug";
    let output = succeeded(train_in(&folder, TINY, arguments));
    assert_eq!(json(&output.stdout)["steps"], 4);
    let text = stderr(&output);
    for rank in 0..2 {
        let lines = of_rank(&text, rank);
        let at = |wanted: &str| {
            let found = lines.iter().position(|line| line.starts_with(wanted));
            found.unwrap_or_else(|| panic!("rank {rank} does not say `{wanted}`: {text}"))
        };
        let landmarks = [
            &format!("connected to the others: rank {rank} of 2"),
            "its weights are initialized",
            "the run begins after 0 of 4 steps",
            "step 1: F0",
            "step 1: B0",
            "step 1: reduce",
            "step 1: step",
            "step 4: F0",
            "evaluates after step 4",
            "begins the checkpoint after step 4",
            "the run has ended",
        ];
        let places: Vec<usize> = landmarks.iter().map(|landmark| at(landmark)).collect();
        assert!(places.is_sorted(), "{places:?} of rank {rank}: {text}");
        let waits = lines.iter().find(|line| line.starts_with("step 2: waits for all_reduce (sum) of "));
        assert!(waits.is_some_and(|line| line.ends_with(" bytes, among ranks 0 and 1")), "{waits:?}: {text}");
    }
    assert!(!text.contains(" TRACE ") && !text.contains("done: "), "{text}");
}

#[test]
fn a_pipeline_names_who_sends_and_a_file_takes_it_all() {
    let folder = TestDir::new();
    let set = "--set model.layers=2 --set parallel.pipeline=2 --set train.micro_batches=2";
    let log = "--out a --log trace --log-file a.log";
    let output = succeeded(train_in(&folder, TINY, &format!("{set} {log}")));
    assert!(!stderr(&output).contains("DEBUG"), "{}", stderr(&output));
    let text = fs::read_to_string(folder.join("a.log")).unwrap();
    let lines = of_rank(&text, 1);
    let has = |start: &str, end: &str| {
        assert!(lines.iter().any(|l| l.starts_with(start) && l.ends_with(end)), "`{start}`: {text}");
    };
    has("step 1: a0<0", "");
    has("step 1: waits for receive (tag ", "from rank 0");
    has("step 1: done: a0<0, after ", " ms");
    has("step 1: done: receive (tag ", " after it began");
    // Started again, a run goes on in its file.
    let resumed = "--out a --resume --log info --log-file a.log";
    succeeded(train_in(&folder, TINY, &format!("{set} {resumed}")));
    let longer = fs::read_to_string(folder.join("a.log")).unwrap();
    assert!(longer.starts_with(&text) && longer.len() > text.len(), "{longer}");
}

#[test]
fn pruning_and_a_run_that_may_be_restarted_are_logged_too() {
    let folder = TestDir::new();
    let arguments = "--out a --max-restarts 1 --log info --log-file a.log";
    succeeded(train_in(&folder, TINY, arguments));
    let text = fs::read_to_string(folder.join("a.log")).unwrap();
    assert_eq!(text.matches("INFO  the run has ended\n").count(), 1, "{text}");
    assert!(!text.contains("rank 0"), "one rank alone has no number: {text}");

    let prune = "prune a --method magnitude --sparsity 0.5 -o b --log info";
    let text = stderr(&succeeded(espalier(&folder, prune)));
    for landmark in
        ["asks the pruning method after 0 steps", "pruned before step 5: ", "step-000004 is written"]
    {
        assert!(
            text.lines().any(|line| line.contains("INFO ") && line.contains(landmark)),
            "{landmark}: {text}"
        );
    }
}

/// Rank 0 hangs where it opens a file, as on a disk that no longer answers.
#[test]
fn the_last_lines_of_a_run_that_hangs_say_in_what() {
    let folder = TestDir::new();
    fs::create_dir(folder.join("a")).unwrap();
    let Some(_lease) = Lease::on(&folder.join("a/metrics.jsonl")) else { return };
    let arguments = "--ranks 2 --out a --set parallel.timeout_s=1";
    let log = "--log debug --log-file a.log";
    ended(train_in(&folder, TINY, &format!("{arguments} {log}")), 3, &[]);
    let text = fs::read_to_string(folder.join("a.log")).unwrap();
    assert_eq!(of_rank(&text, 0).last(), Some(&"writes into a"), "{text}");
    let [.., waits, fails] = of_rank(&text, 1)[..] else { panic!("{text}") };
    assert!(waits.contains("waits for all_reduce") && waits.ends_with("among ranks 0 and 1"), "{text}");
    let waited = fails.strip_prefix("the run ends here: rank 1 waited ");
    assert!(waited.is_some_and(|it| it.contains(" s for rank 0 in all_reduce")), "{text}");
}

#[test]
fn nothing_is_logged_unless_asked_and_what_is_asked_wrongly_gets_a_sentence() {
    let folder = TestDir::new();
    let output = succeeded(train_in(&folder, TINY, "--out a --ranks 2"));
    for level in ["ERROR", "WARN", "INFO", "DEBUG", "TRACE", "rank 1"] {
        assert!(!stderr(&output).contains(level), "{}", stderr(&output));
    }
    let refused = |arguments: &str, sentence: &str| {
        let output = command(&folder, arguments).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(2), sentence));
    };
    refused(
        "--log loud",
        "error: invalid value 'loud' for '--log <LEVEL>' [possible values: error, warn, info, debug, trace]\n",
    );
    refused("--log-file a.log", "error: the following required arguments were not provided: --log <LEVEL>\n");
    refused(
        "--log info --log-file none/a.log",
        "error: none/a.log: the log cannot be written: No such file or directory (os error 2)\n",
    );
}

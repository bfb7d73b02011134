//! `espalier train --ranks N`: one run on several ranks, as a person or a program meets it.

use std::fs;

use crate::{TINY, json, said, train_in};

#[test]
fn ranks_train_as_one_and_are_in_the_summary() {
    let folder = tempfile::tempdir().unwrap();
    let run = |out: &str, more: &[&str]| {
        let output = train_in(folder.path(), TINY, &[&["--json", "--out", out], more].concat());
        assert!(output.status.success(), "{}", said(&output));
        (json(&output.stdout), said(&output))
    };
    let (one, _) = run("one", &[]);
    let (four, text) = run("four", &["--ranks", "4"]);
    assert_eq!((&four["layout"]["data"], &four["steps"]), (&4.into(), &4.into()));
    let loss = |summary: &serde_json::Value| summary["loss"].as_f64().unwrap();
    assert!((loss(&one) - loss(&four)).abs() < 1e-6 * loss(&one));
    assert!(text.contains("batch 4 over 4 ranks"), "{text}");
    assert_eq!(
        text.lines().filter(|line| line.contains("validation loss")).count(),
        2,
        "one rank talks: {text}"
    );
    // 2 (P - 1) / P bytes for each byte of gradient, and three numbers of the loss.
    let expected = 2.0 * 0.75 * 4.0 * four["parameters"].as_f64().unwrap();
    let sent = four["bytes_sent"]["all_reduce"].as_f64().unwrap();
    assert!((sent - expected).abs() < 200.0, "{sent} sent, {expected} expected");
    assert_eq!(one["bytes_sent"]["all_reduce"], 0);
    for file in ["run.toml", "plan.json", "metrics.jsonl", "checkpoints/step-000004/manifest.json"] {
        assert!(folder.path().join("four").join(file).exists(), "{file}");
    }
    let resolved = fs::read_to_string(folder.path().join("four/run.toml")).unwrap();
    assert!(resolved.contains("data = 4"), "the resolved file gives the same run again: {resolved}");
    // The flag wins over the file.
    let (two, _) = run("two", &["--set", "parallel.data=3", "--ranks", "2"]);
    assert_eq!(two["layout"]["data"], 2);
}

#[test]
fn a_run_can_go_on_with_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    train_in(folder.path(), TINY, &["--out", "a", "--ranks", "2"]);
    let more = ["--out", "a", "--resume", "--json", "--set", "train.steps=8", "--ranks", "4"];
    let output = train_in(folder.path(), TINY, &more);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("resumed after step 4"), "{}", said(&output));
    assert_eq!(json(&output.stdout)["steps"], 8);
}

/// The user's mistakes keep their sentence and their code, on whichever rank they show.
#[test]
fn mistakes_and_divergence_read_as_on_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let output = train_in(folder.path(), TINY, &["--ranks", "3"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        said(&output),
        "error: `parallel.data` is 3, but `train.batch` = 4 cannot be cut into 3 equal parts (3 ranks with \
         `train.micro_batches` = 1)\n"
    );
    let output = train_in(folder.path(), TINY, &["--ranks", "0"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let output = train_in(folder.path(), TINY, &["--ranks", "2", "--resume", "--out", "nowhere"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("no run here to resume"), "{}", said(&output));
    assert!(!folder.path().join("nowhere").exists(), "nothing is left behind");

    let diverging =
        ["--set", "learning_rate.peak=1e38", "--set", "optimizer.name=sgd", "--set", "train.steps=30"];
    let output = train_in(folder.path(), TINY, &[&diverging[..], &["--ranks", "2"]].concat());
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("error: the run diverged"), "{}", said(&output));
}

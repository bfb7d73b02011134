//! `espalier train --ranks N`: one run on several ranks, as a person or a program meets it.

use std::fs;

use crate::{DIVERGING, TINY, TestDir, ended, json, json_of, refused, set, stderr, succeeded, train_in};

#[test]
fn ranks_train_as_one_and_are_in_the_summary() {
    let folder = TestDir::new();
    let run = |out: &str, more: &str| {
        let output = succeeded(train_in(&folder, TINY, &format!("--json --out {out} {more}")));
        (json(&output.stdout), stderr(&output))
    };
    let (one, _) = run("one", "");
    let (four, text) = run("four", "--ranks 4");
    assert_eq!((&four["layout"]["data"], &four["steps"]), (&4.into(), &4.into()));
    let loss = |summary: &serde_json::Value| summary["loss"].as_f64().unwrap();
    assert!((loss(&one) - loss(&four)).abs() < 1e-6 * loss(&one));
    assert!(text.contains("batch 4 over 4 data-parallel ranks"), "{text}");
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
        assert!(folder.join("four").join(file).exists(), "{file}");
    }
    let resolved = fs::read_to_string(folder.join("four/run.toml")).unwrap();
    assert!(resolved.contains("data = 4"), "the resolved file gives the same run again: {resolved}");
    // The flag wins over the file.
    let (two, _) = run("two", "--set parallel.data=3 --ranks 2");
    assert_eq!(two["layout"]["data"], 2);
}

/// The user's mistakes keep their sentence and their code, on whichever rank they show.
#[test]
fn mistakes_and_divergence_read_as_on_one_rank() {
    let folder = TestDir::new();
    let text = refused(train_in(&folder, TINY, "--ranks 3"), &[]);
    assert_eq!(
        text,
        "error: `parallel.data` is 3, but `train.batch` = 4 cannot be split into 3 equal parts (3 ranks with \
         `train.micro_batches` = 1)\n"
    );
    refused(train_in(&folder, TINY, "--ranks 0"), &[]);
    refused(train_in(&folder, TINY, "--ranks 2 --resume --out nowhere"), &["no run here to resume"]);
    assert!(!folder.join("nowhere").exists(), "nothing is left behind");

    ended(train_in(&folder, TINY, &format!("{DIVERGING} --ranks 2")), 4, &["error: the run diverged"]);
}

/// What `--ranks` leaves beside the other axes are replicas.
#[test]
fn ranks_are_divided_by_all_other_axes() {
    let folder = TestDir::new();
    let dry = |ranks: &str, fields: &str| {
        train_in(&folder, TINY, &format!("--dry-run --json --ranks {ranks} {}", set(fields)))
    };
    let both = "parallel.tensor=2 parallel.pipeline=2 train.micro_batches=2";
    assert_eq!(json_of(dry("8", both))["layout"]["data"], 2);
    let refused = |ranks: &str, fields: &str| refused(dry(ranks, fields), &[]);
    assert_eq!(
        refused("6", both),
        "error: `--ranks` is 6, but `parallel.pipeline` = 2 and `parallel.tensor` = 2, 4 ranks together: it must be a multiple of 4\n"
    );
    assert_eq!(
        refused("3", "parallel.tensor=2"),
        "error: `--ranks` is 3, but `parallel.tensor` = 2: it must be a multiple of that\n"
    );
    let tiles = refused("5", "parallel.spatial=[2,3]");
    assert!(tiles.contains("`parallel.spatial` = 6: it must be a multiple of that"), "{tiles}");
}

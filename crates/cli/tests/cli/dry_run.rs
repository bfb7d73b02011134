//! `--dry-run` says what would stop the run, and leaves nothing.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bad_input::refused;
use crate::{TINY, TestDir, assert_contains, doctor, json, set, stderr, succeeded, train_in};

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(files(&entry));
        }
        found.push(entry);
    }
    found.sort();
    found
}

#[test]
fn it_finds_what_the_run_would_find_before_its_first_step() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out used"));
    fs::write(at.join("file"), "in the way").unwrap();
    let before = files(at);
    let cases: [(&str, &str); 10] = [
        ("--out used", "there is a run here already"),
        ("--out file/run", "file/run"),
        ("--resume --out nowhere", "no run here to resume"),
        ("--resume", "no run here to resume"),
        ("--resume --out used --set seed=3", "--allow seed"),
        ("--from nowhere", "nowhere"),
        ("--from used --set model.width=32", "step-000004: wte.weight is "),
        ("--trace nowhere/trace.json", "nowhere/trace.json"),
        ("--set prune.method=magnitude --set prune.at=4", "`prune.at` is 4, but the run has 4 steps"),
        (
            "--set prune.method=magnitude --set prune.at=400 --set train.epochs=1",
            "`prune.at` is 400, but the run has ",
        ),
    ];
    for (arguments, words) in cases {
        let run_file =
            if arguments.contains("train.epochs=1") { TINY.replace("steps = 4", "") } else { TINY.into() };
        for dry in ["--dry-run --json", ""] {
            refused(at, &run_file, &format!("{arguments} {dry}"), &[words]);
        }
        assert_eq!(files(at), before, "{arguments:?} leaves nothing");
    }
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "in the way");
}

#[test]
fn it_accepts_what_the_run_would_and_leaves_nothing() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out used"));
    fs::write(at.join("old-trace.json"), "[]").unwrap();
    let before = files(at);
    let cases: [&str; 5] = [
        "--out new/folder",
        "--out used --resume --set train.steps=8",
        "--from used --set seed=4",
        "--trace trace.json",
        "--ranks 2",
    ];
    for arguments in cases {
        let output = train_in(at, TINY, &format!("{arguments} --dry-run --json"));
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        let plan = json(&output.stdout);
        assert!(plan["loss"].is_null() && plan["weights_hash"].is_null());
        assert_eq!(files(at), before, "{arguments:?} leaves nothing");
    }
}

/// A laptop can check what a cluster will run.
#[test]
fn it_plans_for_a_gpu_that_is_not_here() {
    let folder = TestDir::new();
    let output = succeeded(train_in(&folder, TINY, "--dry-run --json --set device.kind=cuda"));
    let plan = json(&output.stdout);
    assert_eq!(plan["device"], "cuda");
    assert!(plan["memory"]["activations"]["predicted"].as_u64().unwrap() > 0);
    let found = doctor()["cuda"]["found"] == true;
    assert_eq!(
        stderr(&output).contains("on a GPU (none was found on this machine)"),
        !found,
        "{}",
        stderr(&output)
    );
}

/// The picture of a layout: its mesh, a line a rank, and what the one that sends most sends.
#[test]
fn it_draws_the_layout_of_several_ranks() {
    let folder = TestDir::new();
    let dry = |fields: &str| {
        let output = succeeded(train_in(&folder, TINY, &format!("--dry-run --json {}", set(fields))));
        (json(&output.stdout), stderr(&output))
    };
    let (alone, text) = dry("");
    assert!(alone.get("picture").is_none() && !text.contains("layout:"), "{text}");
    let (plan, text) = dry("parallel.tensor=2 parallel.data=2 model.tied=false");
    assert_contains(
        &text,
        &[
            "batch 4 over 2 data-parallel replicas x 2 tensor-parallel ranks, each",
            "layout: data 2 x tensor 2 = 4 ranks",
            "\n  3     data 1, tensor 1  ",
            "  activation all-reduce ",
        ],
    );
    let picture = &plan["picture"];
    assert_eq!((&picture["ranks"], picture["rows"].as_array().unwrap().len()), (&4.into(), 4));
    assert_eq!((&plan["layout"]["tensor"], &plan["layout"]["spatial"]), (&2.into(), &1.into()));
    let share = picture["rows"][0]["share"].as_f64().unwrap();
    assert!((0.5..0.6).contains(&share), "two halves, and norms on both: {share}");
    assert!(picture["rows"][0]["sends"]["sums"]["bytes"].as_u64().unwrap() > 0);
    let (plan, text) = dry("parallel.data=20 train.batch=20");
    let rows: Vec<u64> =
        plan["picture"]["rows"].as_array().unwrap().iter().map(|row| row["rank"].as_u64().unwrap()).collect();
    assert_eq!(rows, (0..15).chain([19]).collect::<Vec<_>>());
    assert!(text.contains("4 more") && text.contains("all 20 data-parallel replicas"), "{text}");
    // At once: what is alike on all replicas is not counted one by one.
    let (plan, text) = dry("parallel.data=16000000 train.batch=16000000");
    assert_eq!(plan["picture"]["rows"][15]["rank"], 15_999_999, "{text}");
}

//! The planner beside runs: its traces and theirs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use espalier_train::run::trace::TraceFile;

use crate::{TINY, said, train_in};

/// `espalier ARGUMENTS`, in a folder.
fn espalier(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_espalier")).current_dir(folder).args(arguments).output().unwrap()
}

/// What a rank does up to the end of its first step, by name.
fn first_step(file: &Path, rank: usize) -> Vec<String> {
    let trace: TraceFile = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let mut names: Vec<String> = trace.of_rank(rank).map(|spent| spent.name.clone()).collect();
    let end = names.iter().position(|name| name == "step").expect("a step ends with one");
    names.truncate(end + 1);
    names
}

#[test]
fn a_planned_trace_has_the_rows_and_the_names_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let layers = TINY.replace("layers = 1", "layers = 4");
    let set = ["--set", "parallel.pipeline=2", "--set", "parallel.data=2", "--set", "train.micro_batches=2"];
    let run = train_in(at, &layers, &[&["--out", "run", "--trace", "run.json"], &set[..]].concat());
    assert!(run.status.success(), "{}", said(&run));
    let layout = "pipeline=2,data=2,micro_batch=1,schedule=1f1b";
    let plan =
        ["plan", "run.toml", "--gpus", "4", "--layout", layout, "--trace", "planned.json", "--top", "1"];
    let planned = espalier(at, &plan);
    assert!(planned.status.success(), "{}", said(&planned));
    assert!(said(&planned).contains("one rank of each of the 2 stages of a replica"), "{}", said(&planned));
    let text = fs::read_to_string(at.join("planned.json")).unwrap();
    let trace: TraceFile = serde_json::from_str(&text).unwrap();
    let mut ranks: Vec<usize> = (0..4).filter(|rank| trace.of_rank(*rank).next().is_some()).collect();
    assert_eq!(ranks.len(), 2, "{text}");
    for rank in ranks.drain(..) {
        let names = first_step(&at.join("planned.json"), rank);
        assert_eq!(names, first_step(&at.join("run.json"), rank), "rank {rank}");
        assert!(names.iter().any(|name| name == "B1"), "{names:?}");
        let ends = trace.of_rank(rank).map(|spent| (spent.ts, spent.ts + spent.dur));
        let ends: Vec<(f64, f64)> = ends.collect();
        assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-6), "one after another: {ends:?}");
    }
    // A person's file is not written over.
    fs::write(at.join("notes.json"), "mine").unwrap();
    let refused = espalier(at, &["plan", "run.toml", "--gpus", "1", "--trace", "notes.json"]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert_eq!(fs::read_to_string(at.join("notes.json")).unwrap(), "mine");
}

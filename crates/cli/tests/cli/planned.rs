//! The planner beside runs: its traces and theirs, layouts that are left to it, what it predicts, and rates
//! refitted to what runs took.

use std::fs;
use std::path::Path;

use espalier_train::run::trace::TraceFile;
use serde_json::Value;

use crate::{TINY, TestDir, espalier, json, refused, root, said, stderr, succeeded, train_in};

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
    let at = &TestDir::new();
    let layers = TINY.replace("layers = 1", "layers = 4");
    let set = "--set parallel.pipeline=2 --set parallel.data=2 --set train.micro_batches=2";
    succeeded(train_in(at, &layers, &format!("--out run --trace run.json {set}")));
    let layout = "pipeline=2,data=2,micro_batch=1,schedule=1f1b";
    let plan = format!("plan run.toml --gpus 4 --layout {layout} --trace planned.json --top 1");
    said(espalier(at, &plan), &["one rank for each of the 2 pipeline stages"]);
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
    refused(espalier(at, "plan run.toml --gpus 1 --trace notes.json"), &[]);
    assert_eq!(fs::read_to_string(at.join("notes.json")).unwrap(), "mine");
}

/// A run file without a layout of its own.
fn auto() -> String {
    format!("parallel = \"auto\"\n{}", TINY.replace("layers = 1", "layers = 2"))
}

/// The layout that the run in a folder resolved to.
fn parallel(folder: &Path) -> String {
    let text = fs::read_to_string(folder.join("run.toml")).unwrap();
    let section = text.split("[parallel]\n").nth(1).expect("every field is written");
    section.split("\n[").next().unwrap().to_owned()
}

#[test]
fn a_layout_that_is_left_open_is_found_said_and_written_down() {
    let at = &TestDir::new();
    let dry = succeeded(train_in(at, &auto(), "--dry-run --json --ranks 2"));
    let notes = stderr(&dry).matches("note: `parallel` = \"auto\" chose ").count();
    assert_eq!(notes, 1, "{}", stderr(&dry));
    let layout = &json(&dry.stdout)["layout"];
    let axes = ["data", "pipeline", "tensor"].map(|axis| layout[axis].as_u64().unwrap());
    assert_eq!(axes.iter().product::<u64>(), 2, "{layout}");

    succeeded(train_in(at, &auto(), "--out run --ranks 2 --set train.steps=2"));
    let before = parallel(&at.join("run"));
    assert!(before.starts_with(&format!("data = {}\ntensor = {}\n", axes[0], axes[2])), "{before}");

    // The run goes on as it was, whatever the rates have become since.
    let cores = std::thread::available_parallelism().unwrap();
    let slow = "name = \"slow\"\n[device]\nname = \"a core\"\nmemory_gb = 1.0\nlaunch_us = 1.0\n\
        [device.bf16]\npeak_tflops = 1.0\nefficiency = [[1.0, 1.0]]\n[device.f32]\npeak_tflops = 1.0\nefficiency = [[1.0, 1.0]]\n\
        [device.memory]\ngb_per_s = 1.0\nefficiency = [[1.0, 1.0]]\n[node]\ndevices = 2\ncores = true\n\
        [node.link]\nalpha_us = 1e6\ngb_per_s = 1e-6\n";
    let slow = slow.replace("devices = 2", &format!("devices = {cores}"));
    fs::write(at.join("cluster.toml"), slow).unwrap();
    said(train_in(at, &auto(), "--out run --resume"), &["resumed after step 2"]);
    assert_eq!(parallel(&at.join("run")), before);

    // Nobody says how many ranks: one is what such a link leaves.
    let free = train_in(at, &auto(), "--dry-run --json");
    assert_eq!(json(&free.stdout)["layout"]["data"], 1, "{}", stderr(&free));
    assert!(stderr(&free).contains("chose one rank, micro-batch "), "{}", stderr(&free));

    // A new one is reckoned with what was measured here.
    let new = train_in(at, &auto(), "--dry-run --ranks 2");
    assert!(stderr(&new).contains(" per step (cluster.toml)."), "{}", stderr(&new));
}

#[test]
fn what_cannot_be_laid_out_gets_one_sentence() {
    let at = &TestDir::new();
    let refused = |text: &str, arguments: &str, words: &str| {
        let stderr = refused(train_in(at, text, &format!("--dry-run {arguments}")), &[]);
        assert_eq!(stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    };
    refused(&auto().replace("\"auto\"", "\"atuo\""), "", "did you mean `auto`?");
    refused(&auto(), "--ranks 0", "`--ranks` is 0");
    refused(&auto(), "--ranks 1021", "`train.batch` is 4, which 1021 devices cannot split evenly");
    fs::write(at.join("cluster.toml"), "name = 3\n").unwrap();
    refused(&auto(), "", "cluster.toml: line 1: ");
}

/// Nothing of a prediction may stop a run.
#[test]
fn a_run_says_what_was_predicted_beside_what_it_took() {
    let at = &TestDir::new();
    // Rates of other cores are no prediction of these.
    let run = succeeded(train_in(at, TINY, "--out other --json"));
    assert!(
        json(&run.stdout)["predicted"].is_null() && !stderr(&run).contains(" ms/step ("),
        "{}",
        stderr(&run)
    );
    said(train_in(at, TINY, "--dry-run"), &["this-machine is of other cores than these: `espalier bench"]);
    let cores = std::thread::available_parallelism().unwrap();
    let text = fs::read_to_string(root().join("clusters/this-machine.toml")).unwrap();
    fs::write(at.join("cluster.toml"), text.replace("devices = 2", &format!("devices = {cores}"))).unwrap();
    let run = succeeded(train_in(at, TINY, "--out run --json --ranks 2"));
    let predicted = &json(&run.stdout)["predicted"];
    assert!(predicted["step_ms"].as_f64().unwrap() > 0.0, "{predicted}");
    assert_eq!(predicted["cluster"], "cluster.toml");
    assert!(stderr(&run).contains(" ms/step (cluster.toml), measured "), "{}", stderr(&run));
    fs::write(at.join("cluster.toml"), text.replace("a core, AVX-512", "a core of an abacus")).unwrap();
    said(
        train_in(at, TINY, "--out another --json"),
        &["no step time is predicted: cluster.toml is of 2 x a core of an abacus, and"],
    );
    fs::write(at.join("cluster.toml"), "no cluster").unwrap();
    let run = succeeded(train_in(at, TINY, "--out again --json"));
    assert!(json(&run.stdout)["predicted"].is_null());
    assert!(stderr(&run).contains("no step time is predicted"), "{}", stderr(&run));
}

#[test]
fn rates_are_refitted_to_what_runs_took() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, "--out run --ranks 2 --set train.log_every=1"));
    // As slow as a run of a busy machine, so that what is measured does not depend on this one.
    let path = at.join("run/summary.json");
    let mut summary: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    summary["step_ms"] = 5.0.into();
    fs::write(&path, summary.to_string()).unwrap();

    let refit = succeeded(espalier(at, "plan --calibrate run --json"));
    let found = json(&refit.stdout);
    let row = &found["runs"][0];
    assert!((row["measured_ms"].as_f64().unwrap() - 5.0).abs() < 1e-9, "{row}");
    assert!((row["calibrated_ms"].as_f64().unwrap() - 5.0).abs() < 0.005, "{row}");
    assert_eq!(found["file"], "cluster.toml");
    assert!(stderr(&refit).contains(" scaled by "), "{}", stderr(&refit));
    let written = fs::read_to_string(at.join("cluster.toml")).unwrap();
    assert!(written.contains("# Refitted by `espalier plan --calibrate` to run."), "{written}");
    // The next run of this layout is predicted by it.
    let again = train_in(at, TINY, "--dry-run --json --ranks 2");
    let step = json(&again.stdout)["predicted"]["step_ms"].as_f64().unwrap();
    assert!((step - 5.0).abs() < 0.005, "{step}");
    // Once more changes nothing.
    let once_more = espalier(at, "plan --calibrate run --json");
    assert!((json(&once_more.stdout)["factor"].as_f64().unwrap() - 1.0).abs() < 1e-3);

    for (name, words) in
        [("run.toml", "run.toml: the run file is not there"), ("summary.json", "summary.json cannot be read")]
    {
        fs::rename(at.join("run").join(name), at.join("aside")).unwrap();
        refused(espalier(at, "plan --calibrate run"), &[words]);
        fs::rename(at.join("aside"), at.join("run").join(name)).unwrap();
    }
    summary["step_ms"] = Value::Null;
    fs::write(&path, summary.to_string()).unwrap();
    let refused = espalier(at, "plan --calibrate run");
    assert!(stderr(&refused).contains("no step was timed"), "{}", stderr(&refused));
}

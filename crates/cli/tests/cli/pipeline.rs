//! `runs/pipeline.toml`: every schedule, as a person runs it.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{json, said};

const ALL: [&str; 8] = ["gpipe", "1f1b", "interleaved", "pipedream", "2bw", "chimera", "zb-h1", "axonn"];

/// The run file of the repository, on a model small enough for a test.
pub fn small(schedule: &str) -> Vec<String> {
    let run_file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../runs/pipeline.toml");
    let set = [
        format!("parallel.schedule={schedule}"),
        "train.steps=4".into(),
        "train.eval_every=2".into(),
        "train.eval_samples=8".into(),
        "model.width=16".into(),
        "model.context=16".into(),
        "learning_rate.warmup=1".into(),
    ];
    let set = set.into_iter().flat_map(|set| ["--set".to_owned(), set]);
    ["train".to_owned(), run_file.display().to_string()].into_iter().chain(set).collect()
}

#[test]
fn every_schedule_runs_from_the_run_file_and_writes_its_timeline() {
    let folder = tempfile::tempdir().unwrap();
    let mut losses = Vec::new();
    for schedule in ALL {
        let trace = folder.path().join(format!("{schedule}.json"));
        let mut arguments = small(schedule);
        let out = folder.path().join(schedule);
        arguments.extend(
            ["--out", out.to_str().unwrap(), "--trace", trace.to_str().unwrap(), "--json"].map(String::from),
        );
        let output = Command::new(env!("CARGO_BIN_EXE_espalier")).args(&arguments).output().unwrap();
        assert!(output.status.success(), "{schedule}: {}", said(&output));
        let summary = json(&output.stdout);
        assert_eq!(
            (&summary["layout"]["pipeline"], &summary["layout"]["schedule"]),
            (&2.into(), &schedule.into())
        );
        assert!(summary["bytes_sent"]["point_to_point"].as_u64().unwrap() > 0, "{summary}");
        losses.push(summary["loss"].as_f64().unwrap());
        let trace: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        for rank in 0..2 {
            let of =
                |category: &str| events.iter().filter(|e| e["tid"] == rank && e["cat"] == category).count();
            // Four steps of four micro-batches, each forward and backward at least once.
            assert!(of("compute") >= 32 && of("step") >= 4 && of("send") > 0, "{schedule}, rank {rank}");
        }
    }
    // Those that flush are the same function; the others are near it.
    for (schedule, loss) in ALL.iter().zip(&losses) {
        let most = if matches!(*schedule, "pipedream" | "2bw") { 0.2 } else { 1e-6 };
        assert!((loss / losses[0] - 1.0).abs() < most, "{schedule}: {loss}, gpipe {}", losses[0]);
    }
}

/// What one layout saves, another goes on from.
#[test]
fn a_pipeline_goes_on_from_the_checkpoint_of_another_layout() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let run = |more: &[&str]| {
        let mut arguments = small("1f1b");
        arguments.extend(["--out", out.to_str().unwrap(), "--json"].map(String::from));
        arguments.extend(more.iter().map(ToString::to_string));
        let output = Command::new(env!("CARGO_BIN_EXE_espalier")).args(&arguments).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        json(&output.stdout)
    };
    let whole = run(&["--set", "train.steps=6", "--set", "learning_rate.decay_steps=6"]);
    fs::remove_dir_all(&out).unwrap();
    let decay = ["--set", "learning_rate.decay_steps=6"];
    run(&[&decay[..], &["--set", "train.steps=2"]].concat());
    run(&[&decay[..], &["--resume", "--set", "train.steps=4", "--set", "parallel.pipeline=3"]].concat());
    let chimera =
        ["--resume", "--set", "train.steps=6", "--set", "parallel.schedule=chimera", "--ranks", "4"];
    let last = run(&[&decay[..], &chimera].concat());
    let loss = |summary: &Value| summary["loss"].as_f64().unwrap();
    assert!((loss(&last) / loss(&whole) - 1.0).abs() < 1e-5, "{} {}", loss(&last), loss(&whole));
    assert_eq!(last["steps"], 6);
}

//! `runs/pipeline.toml`: every schedule, as a person runs it.

use std::fs;

use espalier_train::RunSummary;
use espalier_train::run::trace::TraceFile;
use serde_json::Value;

use crate::{TestDir, espalier, json, json_of, refused, root, set};

pub const ALL: [&str; 9] =
    ["gpipe", "1f1b", "interleaved", "pipedream", "2bw", "chimera", "chimera-doubling", "zb-h1", "axonn"];

/// The run file of the repository, on a model small enough for a test.
pub fn small(schedule: &str) -> String {
    let fields = "train.steps=4 train.eval_every=2 train.eval_samples=8 model.width=16 model.context=16 learning_rate.warmup=1";
    let settings = set(&format!("parallel.schedule={schedule} {fields}"));
    format!("train {}/runs/pipeline.toml {settings}", root().display())
}

#[test]
fn every_schedule_runs_from_the_run_file_and_writes_its_timeline() {
    let folder = TestDir::new();
    let mut losses = Vec::new();
    for schedule in ALL {
        let trace = folder.join(format!("{schedule}.json"));
        let arguments = format!("{} --out {schedule} --trace {schedule}.json --json", small(schedule));
        let summary: RunSummary = serde_json::from_value(json_of(espalier(&folder, &arguments))).unwrap();
        assert_eq!((summary.layout.pipeline, summary.layout.schedule.as_deref()), (2, Some(schedule)));
        assert!(summary.bytes_sent["point_to_point"] > 0, "{summary:?}");
        losses.push(summary.loss.unwrap());
        let trace: TraceFile = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
        for rank in 0..2 {
            let of = |category: &str| trace.of_rank(rank).filter(|spent| spent.cat == category).count();
            // Four steps of four micro-batches, each forward and backward at least once.
            assert!(of("compute") >= 32 && of("step") >= 4 && of("send") > 0, "{schedule}, rank {rank}");
            assert!(of("all-reduce") >= 8, "each sum is started, and waited for: {schedule}, rank {rank}");
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
    let folder = TestDir::new();
    let out = folder.join("run");
    let run = |more: &str| {
        let decay = "--set learning_rate.decay_steps=6";
        json_of(espalier(&folder, &format!("{} --out run --json {decay} {more}", small("1f1b"))))
    };
    let uninterrupted = run("--set train.steps=6");
    fs::remove_dir_all(&out).unwrap();
    run("--set train.steps=2");
    run("--resume --set train.steps=4 --set parallel.pipeline=3");
    let last = run("--resume --set train.steps=6 --set parallel.schedule=chimera --ranks 4");
    let loss = |summary: &Value| summary["loss"].as_f64().unwrap();
    assert!(
        (loss(&last) / loss(&uninterrupted) - 1.0).abs() < 1e-5,
        "{} {}",
        loss(&last),
        loss(&uninterrupted)
    );
    assert_eq!(last["steps"], 6);
}

/// The order of a named schedule, written to a file and brought back, is the same run; one for other numbers
/// is refused.
#[test]
fn a_schedule_of_ones_own_runs() {
    let folder = TestDir::new();
    let mine = folder.join("mine.txt");
    let order = "pipeline 0 1\nmicro-batches 4\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n";
    fs::write(&mine, order).unwrap();
    let run = |more: &str| espalier(&folder, &format!("{} {more}", small("1f1b")));
    let named = json(&run("--json --out named").stdout);
    let file = format!("parallel.schedule_file={}", mine.display());
    let from_file = json_of(run(&format!("--json --out mine --set {file}")));
    assert_eq!(from_file["weights_hash"], named["weights_hash"]);
    // The first rank holds both ends of the model: what no named schedule has.
    let bent = "name there-and-back\npipeline 0 1 1 0\nF0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0\n\
                F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0\n";
    fs::write(folder.join("bent.txt"), bent).unwrap();
    let two = "--json --set train.micro_batches=2 --set";
    let straight = json(&run(&format!("{two} parallel.schedule=1f1b --out straight")).stdout);
    let file_of_bent = format!("parallel.schedule_file={}", folder.join("bent.txt").display());
    let bent = json_of(run(&format!("{two} {file_of_bent} --out bent")));
    assert_eq!(bent["layout"]["schedule"], "there-and-back");
    let loss = |summary: &Value| summary["loss"].as_f64().unwrap();
    assert!((loss(&bent) / loss(&straight) - 1.0).abs() < 1e-6, "{} {}", loss(&bent), loss(&straight));
    refused(run(&format!("--set {file} --set train.micro_batches=8")), &["is for 2 ranks, 4 micro-batches"]);
}

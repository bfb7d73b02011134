//! `espalier train`: its JSON, its folder, its signals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::killed::last_step;
use crate::{TINY, TestDir, command, doctor, espalier, json, json_of, refused, stderr, succeeded, train_in};

#[test]
fn a_run_prints_its_summary_and_leaves_its_folder() {
    let folder = TestDir::new();
    let summary = json_of(train_in(&folder, TINY, "--json"));
    assert_eq!(summary["steps"], 4);
    assert_eq!(summary["device"], "cpu");
    assert_eq!(summary["precision"], "f32");
    assert!(summary["loss"].as_f64().unwrap() > 0.0);
    assert!(summary["validation"]["perplexity"].as_f64().unwrap() > 1.0);
    assert!(summary["validation"]["accuracy"].is_null());
    assert!(summary["tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(summary["images_per_s"].is_null());
    assert_eq!(summary["weights_hash"].as_str().unwrap().len(), 64);
    for category in ["weights", "gradients", "optimizer", "mask", "activations", "workspace", "communication"]
    {
        assert!(summary["memory"][category]["measured"].is_u64(), "{category}");
    }
    for category in ["weights", "optimizer"] {
        let entry = &summary["memory"][category];
        assert_eq!(entry["predicted"], entry["measured"], "{category}");
    }
    assert_eq!(summary["layout"]["data"], 1);
    let run = folder.join(summary["run"].as_str().unwrap());
    for file in ["run.toml", "plan.json", "metrics.jsonl", "checkpoints/step-000004/manifest.json"] {
        assert!(run.join(file).exists(), "{file}");
    }
    // A second run gets a folder of its own.
    assert_eq!(summary["run"], "out/run");
    assert_eq!(json_of(train_in(&folder, TINY, "--json"))["run"], "out/run-2");
}

#[test]
fn the_resolved_file_gives_the_same_run_again() {
    let folder = TestDir::new();
    let first = json(&train_in(&folder, TINY, "--json --out a --set seed=9").stdout);
    let resolved = fs::read_to_string(folder.join("a/run.toml")).unwrap();
    let again = json(&train_in(&folder, &resolved, "--json --out b").stdout);
    assert_eq!(first["weights_hash"], again["weights_hash"]);
}

#[test]
fn images_report_images_and_accuracy() {
    let folder = TestDir::new();
    let run_file = r#"
        [model]
        name = "resnet8"
        [data]
        kind = "shapes"
        count = 64
        [train]
        steps = 2
        batch = 8
    "#;
    let summary = json(&train_in(&folder, run_file, "--json").stdout);
    assert!(summary["images_per_s"].as_f64().unwrap() > 0.0);
    assert!(summary["tokens_per_s"].is_null());
    assert!(summary["validation"]["accuracy"].as_f64().is_some());
    assert_eq!(summary["parameters"], 75_050);
}

/// Interrupts a long run once it has begun, and checks that it saved and goes on to the same end as an
/// unbroken one.
fn interrupted_by(signal: &str, ranks: &str) {
    let folder = TestDir::new();
    // However many steps it has taken by then, the unbroken one takes a few more.
    let settings = format!("--set learning_rate.schedule=constant --set model.width=64 --ranks {ranks}");
    fs::write(folder.join("run.toml"), TINY).unwrap();
    let mut child = command(&folder, &format!("--out broken --set train.steps=1000000 {settings}"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("step ")), "the run says something at its first step");
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("--resume")), "it says how to go on: {rest:?}");

    let steps = last_step(&folder.join("broken/checkpoints")).unwrap() + 9;
    let to_end = |run: &str| {
        let arguments = format!("--json --out {run} --set train.steps={steps} {settings}");
        json_of(command(&folder, &arguments).output().unwrap())["weights_hash"].clone()
    };
    assert_eq!(to_end("broken --resume"), to_end("whole"));
}

#[test]
fn control_c_saves_and_can_be_resumed() {
    interrupted_by("-INT", "1");
}

#[test]
fn control_c_stops_all_ranks_after_the_same_step() {
    interrupted_by("-INT", "2");
}

#[test]
fn sigterm_saves_and_can_be_resumed() {
    interrupted_by("-TERM", "1");
}

/// A GPU where one works, and otherwise one sentence that says what is missing and what to do.
#[test]
fn a_gpu_is_used_or_what_is_missing_is_said() {
    let folder = TestDir::new();
    let run = |kind: &str, out: &str| {
        let setting = format!("device.kind={kind}");
        train_in(&folder, TINY, &format!("--json --out {out} --set {setting}"))
    };
    let (asked, left_open) = (run("cuda", "asked"), run("auto", "open"));
    assert!(left_open.status.success(), "{}", stderr(&left_open));
    if doctor()["cuda"]["found"] == true {
        assert!(asked.status.success(), "{}", stderr(&asked));
        assert_eq!(json(&asked.stdout)["device"], "cuda");
        assert_eq!(json(&left_open.stdout)["device"], "cuda");
        assert!(
            stderr(&left_open).lines().any(|line| line.starts_with("device: ")),
            "{}",
            stderr(&left_open)
        );
        return;
    }
    assert_eq!(json(&left_open.stdout)["device"], "cpu");
    let text = stderr(&asked);
    assert_eq!(asked.status.code(), Some(3), "{text}");
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{text}");
    assert!(
        errors[0].contains("CUDA") && (errors[0].contains("install") || errors[0].contains("check")),
        "{text}"
    );
    assert!(!folder.join("asked").exists(), "nothing is left behind");
}

/// Paths in the run file are relative to it, those of `--set` to where the command is run; a name that is
/// missing is said.
#[test]
fn a_path_that_is_set_lies_where_the_command_is_run() {
    let at = &TestDir::new();
    fs::create_dir(at.join("runs")).unwrap();
    let text =
        TINY.replace("kind = \"arithmetic\"\n    count = 200", "kind = \"text\"\n    path = \"beside.txt\"");
    assert!(text.contains("beside.txt"));
    fs::write(at.join("runs/run.toml"), text).unwrap();
    fs::write(at.join("here.txt"), "some words to learn, ".repeat(40)).unwrap();
    let train = |more: &str| espalier(at, &format!("train runs/run.toml --dry-run --json {more}"));
    let missing = refused(train(""), &[]);
    let expected = format!("{} is not there", at.join("runs/beside.txt").display());
    assert!(missing.contains(&expected), "{missing}");
    succeeded(train("--set data.path=here.txt"));
    let unset = train("--set data= --set train.steps= --set train.epochs=1");
    assert!(unset.status.success(), "back to the data of a run file without any: {}", stderr(&unset));
}

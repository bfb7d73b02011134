//! `benches/compare.py`, as far as it goes without PyTorch and without a GPU: what it would run, and how.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use espalier_testing::{Need, skipped};
use serde_json::Value;

use crate::{TestDir, refused, stderr, succeeded};

/// `python3 benches/compare.py --peers peers ARGUMENTS` in a folder with peers that do nothing; `None`
/// without Python.
fn compare(folder: &Path, arguments: &str) -> Option<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/compare.py");
    let mut command = Command::new("python3");
    command.current_dir(folder).arg(script).args(["--peers", "peers"]);
    command.args(["--binary", env!("CARGO_BIN_EXE_espalier")]).args(arguments.split_whitespace());
    match command.output() {
        Ok(output) => Some(output),
        Err(why) => {
            skipped(Need::Python, format!("python3 cannot be started: {why}"));
            None
        }
    }
}

fn peers() -> TestDir {
    let folder = TestDir::new();
    fs::create_dir(folder.join("peers")).unwrap();
    for program in ["torch_gpt.py", "torch_llama.py", "torch_cnn.py", "torch_vision.py"] {
        fs::write(folder.join("peers").join(program), "").unwrap();
    }
    folder
}

fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", stderr(output));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn words(command: &Value) -> Vec<&str> {
    command.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// Shapes that everybody quotes, and others: a fast case must not stand for all. Every run file among them is
/// one that the program takes, of the size that its name says, and the peer is given the same.
#[test]
fn every_shape_is_one_that_both_sides_can_run() {
    let folder = peers();
    let Some(output) = compare(&folder, "--dry-run --device cuda") else { return };
    let works = lines(&output);
    let million = 1_000_000.0;
    let shapes = [
        ("gpt2-124m", 124.0, 1024, 32),
        ("gpt2-350m", 355.0, 1024, 16),
        ("gpt-774m", 774.0, 1024, 8),
        ("gpt-1.3b", 1314.0, 1024, 8),
        ("gpt-1.3b-4x2048", 1316.0, 2048, 4),
        ("gpt2-124m-8x4096", 127.0, 4096, 8),
        ("gpt2-124m-4x256", 124.0, 256, 4),
        ("gpt-10m", 10.8, 256, 64),
        ("llama-135m", 134.5, 1024, 32),
        ("llama-0.5b", 494.0, 1024, 8),
        ("llama-1.2b", 1236.0, 1024, 8),
        ("llama-1.2b-bf16-moments", 1236.0, 1024, 8),
    ];
    let names: Vec<&str> = works.iter().map(|work| work["name"].as_str().unwrap()).collect();
    assert_eq!(names[..shapes.len()], shapes.map(|shape| shape.0));
    let (small, vision) = names[shapes.len()..].split_at(3);
    assert_eq!(small, ["simple-cnn", "resnet8", "vgg16"]);
    assert_eq!(vision, ["resnet-50", "resnet-50-f32", "resnet-18", "vgg-19", "wide-resnet-101-2", "alexnet"]);
    // As torchvision counts them, of 1000 classes; its form that is compiled is tried too.
    let millions = [25.557, 25.557, 11.690, 143.678, 126.887, 61.101];
    for (work, expected) in works[shapes.len() + 3..].iter().zip(millions) {
        let planned = work["parameters"].as_f64().unwrap() / million;
        assert!((planned - expected).abs() < 1e-3, "{}: {planned} million parameters", work["name"]);
        assert!(words(&work["or"][0]).contains(&"--compile"), "{work}");
    }
    for (work, (name, parameters, seq, batch)) in works.iter().zip(shapes) {
        let planned = work["parameters"].as_f64().unwrap() / million;
        assert!((planned / parameters - 1.0).abs() < 0.01, "{name}: {planned} million parameters");
        let theirs = words(&work["theirs"]);
        let flag = |flag: &str| theirs[theirs.iter().position(|word| *word == flag).unwrap() + 1];
        assert_eq!((flag("--seq"), flag("--batch")), (&*seq.to_string(), &*batch.to_string()), "{name}");
    }
    for work in &works {
        // The programs run in a folder of their own, where a relative path would lead nowhere.
        let program = PathBuf::from(words(&work["theirs"])[1]);
        assert!(program.is_absolute() && program.is_file(), "{}", program.display());
        assert!(work["rounds"].as_u64().unwrap() >= 3, "{work}");
    }
}

#[test]
fn a_run_that_is_compared_saves_no_checkpoint() {
    let folder = peers();
    let Some(output) = compare(&folder, "--dry-run --only simple-cnn --work work") else { return };
    let work = &lines(&output)[0];
    let ours = words(&work["ours"]);
    let mut short = Command::new(ours[0]);
    short.current_dir(folder.join("work")).args(&ours[1..]).args(["--set", "train.steps=1"]);
    succeeded(short.output().unwrap());
    let run = folder.join("work/simple-cnn");
    assert!(run.join("run.toml").exists() && !run.join("checkpoints").exists());
}

#[test]
fn what_would_say_nothing_is_refused() {
    let folder = peers();
    let Some(output) = compare(&folder, "--rounds 2") else { return };
    refused(output, &["--rounds must be at least 3"]);
    fs::remove_file(folder.join("peers/torch_cnn.py")).unwrap();
    refused(compare(&folder, "--dry-run").unwrap(), &["--peers: there is no torch_cnn.py in "]);
}

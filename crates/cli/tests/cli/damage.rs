//! Damaged checkpoints, full disks and folders that cannot be removed, as a person or a program meets them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::faults::assert_complete;
use crate::outputs::compare;
use crate::{TINY, TestDir, ended, espalier, json, refused, said, stderr, succeeded, train_in};

/// The command `espalier ARGUMENTS` in `folder`, from a shell that has set its limits first.
fn limited(folder: &Path, limits: &str, arguments: &str) -> Output {
    let script = format!("{limits}; exec \"$0\" \"$@\"");
    let mut command = Command::new("bash");
    command.current_dir(folder).args(["-c", &script, env!("CARGO_BIN_EXE_espalier")]);
    command.args(arguments.split_whitespace()).output().unwrap()
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const EVERY_2: &str = "--set checkpoint.every=2 --set train.log_every=1";

#[test]
fn a_run_folder_is_verified_and_what_is_damaged_is_passed_over_aloud() {
    let at = &TestDir::new();
    succeeded(train_in(at, TINY, &format!("{EVERY_2} --out run")));
    let output = espalier(at, "verify run --json");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let found = json(&output.stdout);
    assert_eq!(found["newest_whole"], 4);
    let steps = found["checkpoints"].as_array().unwrap();
    let intact: Vec<_> =
        steps.iter().map(|one| (one["step"].as_u64(), &one["whole"], &one["problem"])).collect();
    let (yes, null) = (&serde_json::Value::Bool(true), &serde_json::Value::Null);
    assert_eq!(intact, [(Some(2), yes, null), (Some(4), yes, null)]);

    flip(&at.join("run/checkpoints/step-000004/optimizer.safetensors"));
    let output = espalier(at, "verify run --json");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let found = json(&output.stdout);
    assert_eq!((&found["newest_whole"], &found["checkpoints"][1]["whole"]), (&2.into(), &false.into()));
    compare("espalier verify --json", std::slice::from_ref(&found));
    let problem = found["checkpoints"][1]["problem"].as_str().unwrap();
    assert!(problem.contains("optimizer.safetensors is damaged"), "{problem}");
    let one = espalier(at, "verify run/checkpoints/step-000002 --json");
    assert_eq!((one.status.code(), &json(&one.stdout)["newest_whole"]), (Some(0), &2.into()));
    for nothing in ["nowhere", "run.toml"] {
        let text = refused(espalier(at, &format!("verify {nothing}")), &[]);
        assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    }

    // Those who begin with it hear which one they got.
    let passed_over = "step-000004: optimizer.safetensors is damaged";
    said(espalier(at, "prune run --method magnitude -o thin"), &[passed_over]);
    said(train_in(at, TINY, "--from run --out child"), &[passed_over]);
    assert_eq!(
        names(&at.join("run/checkpoints")),
        ["step-000002", "step-000004"],
        "another's folder is left alone"
    );

    // And whoever goes on, goes on from the one before.
    let more = "--out run --resume --set train.steps=6";
    said(train_in(at, TINY, &format!("{EVERY_2} {more}")), &["resumed after step 2"]);
    assert!(names(&at.join("run/checkpoints")).contains(&"damaged-step-000004".to_owned()));
    assert_eq!(espalier(at, "verify run").status.code(), Some(0));
}

#[test]
fn without_a_whole_checkpoint_a_run_is_not_resumed_unless_it_starts_over() {
    let at = &TestDir::trained();
    flip(&at.join("run/checkpoints/step-000004/model.safetensors"));
    let more = "--out run --resume --set train.steps=6";
    for restarts in ["0", "2"] {
        let text = refused(train_in(at, TINY, &format!("{more} --max-restarts {restarts}")), &[]);
        let errors: Vec<String> = text.lines().filter(|l| l.starts_with("error: ")).map(Into::into).collect();
        assert!(errors.len() == 1 && errors[0].contains("no intact checkpoint is left"), "{text}");
    }
    assert_eq!(names(&at.join("run/checkpoints")), ["step-000004"]);
    succeeded(train_in(at, TINY, &format!("{more} --fresh")));
    assert_eq!(
        names(&at.join("run/set-aside-1")),
        ["checkpoints", "metrics.jsonl", "run.toml", "summary.json"]
    );
    refused(train_in(at, TINY, "--fresh --out other"), &[]);
}

/// A disk that takes no file of that size: the run says so at every checkpoint, goes on, and fails in the
/// end; nothing is lost and nothing half-written is left.
#[test]
fn a_full_disk_is_no_end_before_the_end() {
    let at = &TestDir::new();
    // Larger than what else is written.
    let wide = "--set model.width=64 --set learning_rate.schedule=constant";
    let steps = |steps, out| format!("{EVERY_2} {wide} --set train.steps={steps} --out {out}");
    succeeded(train_in(at, TINY, &steps(2, "run")));
    let resume = format!("train run.toml --resume {}", steps(7, "run"));
    for restarts in ["0", "1"] {
        let output = limited(at, "ulimit -f 100", &format!("{resume} --max-restarts {restarts}"));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{text}");
        let goes_on =
            |step: u64| text.contains(&format!("step-{step:06}: the checkpoint cannot be written: "));
        assert!(goes_on(4) && goes_on(6) && goes_on(7), "{text}");
        assert_eq!(text.contains("restart 1 of 1"), restarts == "1", "{text}");
        assert_eq!(names(&at.join("run/checkpoints")), ["step-000002"]);
        assert!(
            names(&at.join("run")).iter().all(|name| name == ".lock" || !name.starts_with('.')),
            "{:?}",
            names(&at.join("run"))
        );
        assert_complete(&at.join("run"));
    }
    let output = succeeded(espalier(at, &format!("{resume} --json")));
    let unbroken = train_in(at, TINY, &format!("{} --json", steps(7, "unbroken")));
    assert_eq!(json(&output.stdout)["weights_hash"], json(&unbroken.stdout)["weights_hash"]);
}

/// Folders so deep that removing them takes more open files than the process may have.
#[test]
fn a_checkpoint_that_cannot_be_removed_costs_room_and_nothing_else() {
    let at = &TestDir::new();
    let settings = "--out run --set checkpoint.every=1 --set checkpoint.keep=1";
    succeeded(train_in(at, TINY, settings));
    let deep = at.join("run/checkpoints/step-000004").join("d/".repeat(200));
    fs::create_dir_all(deep).unwrap();
    // And what an earlier run could not remove either.
    fs::write(at.join("run/checkpoints/.removing-step-000001"), "a file").unwrap();
    let resume = format!("train run.toml --resume --set train.steps=7 {settings}");
    let text = stderr(&succeeded(limited(at, "ulimit -n 100", &resume)));
    assert_eq!(text.matches("step-000004: the old checkpoint cannot be removed: ").count(), 1, "{text}");
    assert_eq!(names(&at.join("run/checkpoints")), [".removing-step-000004", "step-000007"]);
}

/// Other people of a group read what its mask lets them read, the tensors like the rest.
#[test]
fn files_have_the_mode_that_was_asked_for() {
    let folder = TestDir::with_run_file();
    succeeded(limited(&folder, "umask 027", "train run.toml --out run"));
    let run = folder.join("run");
    let mut files: Vec<_> = ["run.toml", "plan.json", "metrics.jsonl"].map(|name| run.join(name)).into();
    let checkpoint = run.join("checkpoints/step-000004");
    files.extend(names(&checkpoint).iter().map(|name| checkpoint.join(name)));
    assert!(files.len() >= 6, "{files:?}");
    for file in files {
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o640, "{}", file.display());
    }
}

/// The last step put the weights where nothing is a number any more.
#[test]
fn a_run_whose_validation_loss_is_no_number_exits_with_4() {
    let folder = TestDir::new();
    let changes = "--set learning_rate.peak=1e38 --set optimizer.name=sgd --set train.steps=1";
    let output = train_in(&folder, TINY, &format!("{changes} --out run --json"));
    assert!(output.stdout.is_empty(), "no summary of a success");
    ended(output, 4, &["error: the run diverged: the validation loss is NaN"]);
    assert!(!folder.join("run/checkpoints").exists());
}

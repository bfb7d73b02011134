//! `--resume` with another run file or other `--set`s: what would make another run of it is named and must be
//! allowed.

use std::fs;
use std::path::Path;

use crate::{TINY, TestDir, command, json, refused, said, set, stderr, succeeded, train_in};

fn resume(folder: &Path, more: &str) -> std::process::Output {
    command(folder, &format!("--out run --resume --json {more}")).output().unwrap()
}

#[test]
fn what_makes_another_run_of_it_is_named_and_must_be_allowed() {
    let folder = TestDir::trained();
    let before = fs::read_to_string(folder.join("run/run.toml")).unwrap();
    let changes = "--set train.steps=6 --set train.batch=8 --set seed=3";
    let text = refused(resume(&folder, changes), &[]);
    let error = "error: run/run.toml: `seed` was 0 and is 3, `train.batch` was 4 and is 8, which would make it a different run; if \
                 you mean it, add --allow seed --allow train.batch\n";
    assert!(text.ends_with(error), "{text}");
    assert_eq!(fs::read_to_string(folder.join("run/run.toml")).unwrap(), before, "nothing is touched");
    refused(resume(&folder, &format!("{changes} --allow seed")), &["add --allow train.batch\n"]);

    let allowed = said(
        resume(&folder, &format!("{changes} --allow seed --allow train")),
        &["note: `train.batch` was 4 and is 8 from here on"],
    );
    assert_eq!(json(&allowed.stdout)["steps"], 6);
    let kept = fs::read_to_string(folder.join("run/run-to-step-000004.toml")).unwrap();
    assert_eq!(kept, before, "what the run was is kept");
    assert!(fs::read_to_string(folder.join("run/run.toml")).unwrap().contains("batch = 8"));
    // It is permission and not a setting: what no longer differs needs none, and the same command works again.
    succeeded(resume(&folder, &format!("{changes} --allow seed --allow train")));

    refused(resume(&folder, &format!("{changes} --allow train.bacth")), &["did you mean `train.batch`?"]);
}

#[test]
fn length_layout_and_intervals_may_change_and_the_rate_is_said() {
    let folder = TestDir::trained();
    let free =
        set("train.steps=8 train.micro_batches=2 train.log_every=1 checkpoint.every=2 device.threads=1");
    let output = succeeded(resume(&folder, &format!("{free} --ranks 2")));
    let notes: Vec<String> =
        stderr(&output).lines().filter(|l| l.starts_with("note: ")).map(String::from).collect();
    assert_eq!(notes.len(), 1, "{}", stderr(&output));
    // Cosine from 1e-3 to 1e-4: the end of 4 steps, and the middle of 8.
    let expected = "note: the run has 8 steps now, and had 4: schedules follow the new length, and the learning rate \
                    continues at 5.50e-4 instead of 1.00e-4";
    assert_eq!(notes[0], expected);
}

#[test]
fn the_end_of_a_run_is_nothing_to_do() {
    let folder = TestDir::trained();
    let read = |name: &str| fs::read(folder.join("run").join(name)).unwrap();
    let files = ["run.toml", "plan.json", "metrics.jsonl", "checkpoints/step-000004/manifest.json"];
    let before = files.map(read);
    for more in ["", "--set train.steps=2", "--dry-run"] {
        let output = succeeded(resume(&folder, more));
        let expected = format!(
            "note: there is nothing to do: 4 steps are done, and the run has {}; a larger `train.steps` continues it",
            if more.contains("train.steps=2") { 2 } else { 4 }
        );
        assert_eq!(stderr(&output).matches(&expected).count(), 1, "{}", stderr(&output));
        assert!(files.map(read) == before, "{more:?}: nothing is written");
    }
}

const WORDS: &str = "what is written here is learnt by heart ";

/// The run file with a text instead of sums.
fn text(path: &str) -> String {
    TINY.replace("kind = \"arithmetic\"", &format!("kind = \"text\"\npath = \"{path}\""))
        .replace("count = 200", "")
}

/// Data that is found by another path to the same file is the same data, and so is a copy.
#[test]
fn a_path_may_be_written_otherwise() {
    let folder = TestDir::new();
    fs::create_dir(folder.join("inner")).unwrap();
    fs::write(folder.join("text"), WORDS.repeat(40)).unwrap();
    fs::write(folder.join("copy"), WORDS.repeat(40)).unwrap();
    fs::write(folder.join("other"), "what is written there is another text ".repeat(40)).unwrap();
    succeeded(train_in(&folder, &text("text"), "--out run"));
    let more = "--out run --resume --set train.steps=5";
    succeeded(train_in(&folder, &text("inner/../text"), more));
    let more = "--out run --resume --set train.steps=6";
    succeeded(train_in(&folder, &text("copy"), more));
    refused(train_in(&folder, &text("other"), more), &["`data.path` was "]);
}

/// The same path need not be the same data.
#[test]
fn a_data_file_that_was_written_anew_is_named_and_must_be_allowed() {
    let folder = TestDir::new();
    let path = folder.join("text");
    fs::write(&path, WORDS.repeat(40)).unwrap();
    succeeded(train_in(&folder, &text("text"), "--out run"));
    let before = fs::read_to_string(folder.join("run/data.json")).unwrap();
    fs::write(&path, WORDS.to_uppercase().repeat(40)).unwrap();
    let more = "--out run --resume --set train.steps=5";
    for dry in ["", "--dry-run"] {
        let text = refused(train_in(&folder, &text("text"), &format!("{more} {dry}")), &[]);
        let error = format!(
            "error: run/data.json: the data files have changed: {} holds something else than it did, which would make it a different \
             run; if you mean it, add --allow data\n",
            path.display()
        );
        assert!(text.ends_with(&error), "{text}");
    }
    assert_eq!(fs::read_to_string(folder.join("run/data.json")).unwrap(), before, "nothing is touched");
    said(
        train_in(&folder, &text("text"), &format!("{more} --allow data")),
        &["note: the data files have changed: "],
    );
    let kept = fs::read_to_string(folder.join("run/data-to-step-000004.json")).unwrap();
    assert_eq!(kept, before, "what the data was is kept");
    // From here on it is the run's data; a run of an older program has no record of its own.
    fs::remove_file(folder.join("run/data.json")).unwrap();
    said(
        train_in(&folder, &text("text"), "--out run --resume --set train.steps=6"),
        &["the earlier contents of the data files are unknown"],
    );
    assert!(folder.join("run/data.json").exists());
}

//! `--resume` with another run file or other `--set`s: what would make another run of it is named and must be allowed.

use std::fs;
use std::path::Path;

use crate::{TINY, command, json, said, train_in};

/// A run of four steps in `run`.
fn trained() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let output = train_in(folder.path(), TINY, &["--out", "run"]);
    assert!(output.status.success(), "{}", said(&output));
    folder
}

fn resume(folder: &Path, more: &[&str]) -> std::process::Output {
    command(folder, &[&["--out", "run", "--resume", "--json"], more].concat()).output().unwrap()
}

#[test]
fn what_makes_another_run_of_it_is_named_and_must_be_allowed() {
    let folder = trained();
    let before = fs::read_to_string(folder.path().join("run/run.toml")).unwrap();
    let changes = ["--set", "train.steps=6", "--set", "train.batch=8", "--set", "seed=3"];
    let refused = resume(folder.path(), &changes);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    let error = "error: run/run.toml: `seed` was 0 and is 3, `train.batch` was 4 and is 8, which would be another run; if \
                 that is meant, add --allow seed --allow train.batch\n";
    assert!(said(&refused).ends_with(error), "{}", said(&refused));
    assert_eq!(fs::read_to_string(folder.path().join("run/run.toml")).unwrap(), before, "nothing is touched");
    let one = resume(folder.path(), &[&changes[..], &["--allow", "seed"]].concat());
    assert_eq!(one.status.code(), Some(2), "{}", said(&one));
    assert!(said(&one).contains("add --allow train.batch\n"), "{}", said(&one));

    let allowed = resume(folder.path(), &[&changes[..], &["--allow", "seed", "--allow", "train"]].concat());
    assert!(allowed.status.success(), "{}", said(&allowed));
    assert!(said(&allowed).contains("note: `train.batch` was 4 and is 8 from here on"), "{}", said(&allowed));
    assert_eq!(json(&allowed.stdout)["steps"], 6);
    let kept = fs::read_to_string(folder.path().join("run/run-to-step-000004.toml")).unwrap();
    assert_eq!(kept, before, "what the run was is kept");
    assert!(fs::read_to_string(folder.path().join("run/run.toml")).unwrap().contains("batch = 8"));
    // It is permission and not a setting: what no longer differs needs none, and the same command works again.
    let again = resume(folder.path(), &[&changes[..], &["--allow", "seed", "--allow", "train"]].concat());
    assert!(again.status.success(), "{}", said(&again));

    let misspelt = resume(folder.path(), &[&changes[..], &["--allow", "train.bacth"]].concat());
    assert_eq!(misspelt.status.code(), Some(2), "{}", said(&misspelt));
    assert!(said(&misspelt).contains("did you mean `train.batch`?"), "{}", said(&misspelt));
}

#[test]
fn length_layout_and_intervals_may_change_and_the_rate_is_said() {
    let folder = trained();
    let free = [
        "train.steps=8",
        "train.micro_batches=2",
        "train.log_every=1",
        "checkpoint.every=2",
        "device.threads=1",
    ];
    let free: Vec<&str> = free.iter().flat_map(|setting| ["--set", setting]).collect();
    let output = resume(folder.path(), &[&free[..], &["--ranks", "2"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let notes: Vec<String> =
        said(&output).lines().filter(|l| l.starts_with("note: ")).map(String::from).collect();
    assert_eq!(notes.len(), 1, "{}", said(&output));
    // Cosine from 1e-3 to 1e-4: the end of 4 steps, and the middle of 8.
    let expected = "note: the run has 8 steps now, and had 4: schedules are measured by the new length, and the learning rate \
                    goes on at 5.50e-4 instead of 1.00e-4";
    assert_eq!(notes[0], expected);
}

#[test]
fn the_end_of_a_run_is_nothing_to_do() {
    let folder = trained();
    let read = |name: &str| fs::read(folder.path().join("run").join(name)).unwrap();
    let files = ["run.toml", "plan.json", "metrics.jsonl", "checkpoints/step-000004/manifest.json"];
    let before = files.map(read);
    for more in [&[][..], &["--set", "train.steps=2"], &["--dry-run"]] {
        let output = resume(folder.path(), more);
        assert!(output.status.success(), "{}", said(&output));
        let expected = format!(
            "note: there is nothing to do: 4 steps are done, and the run has {}; a larger `train.steps` makes it go on",
            if more.contains(&"train.steps=2") { 2 } else { 4 }
        );
        assert_eq!(said(&output).matches(&expected).count(), 1, "{}", said(&output));
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
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("inner")).unwrap();
    fs::write(folder.path().join("text"), WORDS.repeat(40)).unwrap();
    fs::write(folder.path().join("copy"), WORDS.repeat(40)).unwrap();
    fs::write(folder.path().join("other"), "what is written there is another text ".repeat(40)).unwrap();
    assert!(train_in(folder.path(), &text("text"), &["--out", "run"]).status.success());
    let more = ["--out", "run", "--resume", "--set", "train.steps=5"];
    let output = train_in(folder.path(), &text("inner/../text"), &more);
    assert!(output.status.success(), "{}", said(&output));
    let more = ["--out", "run", "--resume", "--set", "train.steps=6"];
    let output = train_in(folder.path(), &text("copy"), &more);
    assert!(output.status.success(), "{}", said(&output));
    let output = train_in(folder.path(), &text("other"), &more);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("`data.path` was "), "{}", said(&output));
}

/// The same path need not be the same data.
#[test]
fn a_data_file_that_was_written_anew_is_named_and_must_be_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    fs::write(&path, WORDS.repeat(40)).unwrap();
    assert!(train_in(folder.path(), &text("text"), &["--out", "run"]).status.success());
    let before = fs::read_to_string(folder.path().join("run/data.json")).unwrap();
    fs::write(&path, WORDS.to_uppercase().repeat(40)).unwrap();
    let more = ["--out", "run", "--resume", "--set", "train.steps=5"];
    for dry in [&[][..], &["--dry-run"]] {
        let refused = train_in(folder.path(), &text("text"), &[&more[..], dry].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
        let error = format!(
            "error: run/data.json: the data files have changed: {} holds something else than it did, which would be another run; \
             if that is meant, add --allow data\n",
            path.display()
        );
        assert!(said(&refused).ends_with(&error), "{}", said(&refused));
    }
    assert_eq!(
        fs::read_to_string(folder.path().join("run/data.json")).unwrap(),
        before,
        "nothing is touched"
    );
    let allowed = train_in(folder.path(), &text("text"), &[&more[..], &["--allow", "data"]].concat());
    assert!(allowed.status.success(), "{}", said(&allowed));
    assert!(said(&allowed).contains("note: the data files have changed: "), "{}", said(&allowed));
    let kept = fs::read_to_string(folder.path().join("run/data-to-step-000004.json")).unwrap();
    assert_eq!(kept, before, "what the data was is kept");
    // From here on it is the run's data; a run of an older program has no record of its own.
    fs::remove_file(folder.path().join("run/data.json")).unwrap();
    let old = train_in(folder.path(), &text("text"), &["--out", "run", "--resume", "--set", "train.steps=6"]);
    assert!(
        old.status.success() && said(&old).contains("it is not known what the data files held"),
        "{}",
        said(&old)
    );
    assert!(folder.path().join("run/data.json").exists());
}

//! What a run starts from, where its folder goes, and how its end is written down: a run that is stopped at
//! the wrong moment is the run that it was, or says why not.

use std::fs;
use std::path::Path;

use espalier_train::run::{FolderLock, RunDir};
use espalier_train::{Error, RunSummary};

use crate::support::{self, RecordingObserver, assert_says, hash};

/// As a kill before the first checkpoint leaves it.
fn without_checkpoints(run: &Path) {
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    fs::remove_file(run.join("summary.json")).unwrap();
}

/// A fine-tuning run that was killed before its first checkpoint used to go on from random weights.
#[test]
fn a_run_without_a_checkpoint_starts_again_from_the_weights_it_started_from() {
    for ranks in ["parallel.data=1", "parallel.data=2"] {
        let base = support::tiny_gpt("train.steps=3").set(ranks);
        let folder = tempfile::tempdir().unwrap();
        let [first, tuned, moved] = ["first", "tuned", "moved"].map(|name| folder.path().join(name));
        let seed = hash(base.run_in(&first));
        let start = RunDir { from: Some(first.clone()), ..RunDir::at(&tuned) };
        let expected = base.run_to_hash(&start);
        assert_ne!(expected, seed, "it starts from other weights");
        let resumed = support::resumed(&tuned);
        without_checkpoints(&tuned);
        assert_eq!(base.run_to_hash(&resumed), expected, "{ranks}");
        // To start over is to start from there, too.
        let fresh = RunDir { fresh: true, ..resumed.clone() };
        assert_eq!(base.run_to_hash(&fresh), expected, "{ranks}");
        assert!(tuned.join("set-aside-1/start.json").exists());

        // Weights that are gone, that are elsewhere by now, and others.
        fs::rename(&first, &moved).unwrap();
        // A checkpoint is enough to go on from.
        base.set("train.steps=4").run_to_hash(&resumed);
        without_checkpoints(&tuned);
        let before = fs::read(tuned.join("metrics.jsonl")).unwrap();
        assert_says(base.fails(&resumed), &["start.json: the run started from ", "which is gone"]);
        let other = folder.path().join("other");
        base.set("seed=9").run_in(&other);
        assert_says(
            base.fails(&RunDir { from: Some(other.clone()), ..resumed.clone() }),
            &["the run did not start from ", "have changed"],
        );
        assert!(fs::read(tuned.join("metrics.jsonl")).unwrap() == before, "nothing was changed");
        let elsewhere = RunDir { from: Some(moved.clone()), ..resumed.clone() };
        assert_eq!(base.run_to_hash(&elsewhere), expected, "{ranks}");
        without_checkpoints(&tuned);
        assert_eq!(base.run_to_hash(&resumed), expected, "where they are is written down anew");

        let not_from = RunDir { from: Some(moved), ..support::resumed(&other) };
        assert_says(base.set("seed=9").fails(&not_from), &["this run did not start from other weights"]);
        without_checkpoints(&tuned);
        fs::write(tuned.join("start.json"), "{}").unwrap();
        assert_says(base.fails(&resumed), &["does not record what the run started from"]);
    }
}

/// A second folder with half of a run, and a success, is what came of it before.
#[test]
fn a_run_folder_that_goes_away_ends_the_run_and_none_is_made_in_its_place() {
    for settings in ["checkpoint.every=2", "checkpoint.every=2 parallel.data=2"] {
        let base = support::tiny_gpt(settings).set("train.steps=6");
        let folder = tempfile::tempdir().unwrap();
        let [uninterrupted, at, to] = ["whole", "run", "moved"].map(|name| folder.path().join(name));
        let expected = hash(base.run_in(&uninterrupted));
        for moved in [None, Some(to.clone())] {
            let take_away = || match &moved {
                Some(to) => fs::rename(&at, to).unwrap(),
                None => fs::remove_dir_all(&at).unwrap(),
            };
            let mut takes_away = RecordingObserver::then(3, take_away);
            let error = base.run_at(&RunDir::at(&at), &mut takes_away).unwrap_err();
            assert!(matches!(error, Error::Disk { .. }), "{error:?}");
            assert_says(&error, &["the run folder was removed or renamed"]);
            assert!(!at.exists(), "{moved:?}: no new folder");
        }
        let resumed = support::resumed(&to);
        assert_eq!(base.run_to_hash(&resumed), expected, "what was renamed can be gone on with");
    }
}

/// A process whose folder was renamed used to remove the lock of whoever came after it under that name.
#[test]
fn a_lock_on_a_folder_that_went_away_leaves_anothers_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (run, moved) = (folder.path().join("run"), folder.path().join("moved"));
    let first = FolderLock::acquire(&run).unwrap();
    fs::rename(&run, &moved).unwrap();
    assert!(!first.is_there());
    FolderLock::acquire(&moved).expect_err("it is taken under its new name, too");
    let second = FolderLock::acquire(&run).unwrap();
    drop(first);
    assert!(run.join(".lock").exists() && second.is_there());
    FolderLock::acquire(&run).expect_err("the second has it");
    // The lock is on the folder, not on a file that somebody may remove.
    fs::remove_file(run.join(".lock")).unwrap();
    FolderLock::acquire(&run).expect_err("the second still has it");
    FolderLock::check_free(&run).expect_err("and so whoever looks is told");
}

/// Killed behind its last checkpoint, a run lacked its summary for ever, and kept what was being written or
/// removed.
#[test]
fn the_end_of_a_run_that_was_killed_behind_its_last_checkpoint_is_written_down() {
    let base = support::tiny_gpt("train.steps=4 checkpoint.every=2 checkpoint.keep=1 train.log_every=1");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let uninterrupted = base.set("checkpoint.keep=2").run_in(at);
    fs::remove_file(at.join("summary.json")).unwrap();
    fs::create_dir(at.join("checkpoints/.removing-step-000001")).unwrap();
    let metrics = fs::read(at.join("metrics.jsonl")).unwrap();
    let (again, observer) = base.resume_observed(at);
    assert_eq!(observer.warnings, [""; 0]);
    assert_eq!(
        (&again.weights_hash, again.loss, again.steps),
        (&uninterrupted.weights_hash, uninterrupted.loss, 4)
    );
    assert_eq!(again.validation, uninterrupted.validation);
    let written: RunSummary = serde_json::from_slice(&fs::read(at.join("summary.json")).unwrap()).unwrap();
    assert_eq!(written.weights_hash, uninterrupted.weights_hash);
    assert!(fs::read(at.join("metrics.jsonl")).unwrap() == metrics);
    let names = || support::names(&at.join("checkpoints"));
    assert_eq!(names(), ["step-000004"]);
    // What a disk that failed for a moment has left goes too, although nothing else is to be done.
    fs::create_dir(at.join("checkpoints/.removing-step-000002")).unwrap();
    base.run_in(at);
    assert_eq!(names(), ["step-000004"]);
}

/// What was lost of the metrics is reported by whoever goes on.
#[test]
fn holes_in_the_metrics_are_reported_where_a_run_goes_on() {
    let base = support::tiny_gpt("train.steps=4 train.log_every=1");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    base.run_in(at);
    let path = at.join("metrics.jsonl");
    let lines = fs::read_to_string(&path).unwrap();
    let kept: String = lines.split_inclusive('\n').filter(|line| !line.contains("\"step\":2,")).collect();
    assert_ne!(kept, lines);
    fs::write(&path, kept).unwrap();
    let (_, observer) = base.set("train.steps=5").resume_observed(at);
    assert_eq!(observer.warnings, [format!("{}: there is no line for step 2", path.display())]);
}

/// A changed digit used to make another run of it, or another evaluation.
#[test]
fn a_resolved_run_file_that_was_changed_is_refused() {
    let base = support::tiny_gpt("train.steps=2");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    base.run_in(at);
    let path = at.join("run.toml");
    let text = fs::read_to_string(&path).unwrap();
    let resumed = support::resumed(at);
    fs::write(&path, text.replacen("eval_samples = 4", "eval_samples = 6", 1)).unwrap();
    for error in [
        base.set("train.steps=3").fails(&resumed),
        espalier_train::trained::TrainedModel::open(at, |_| ()).unwrap_err(),
    ] {
        assert_says(&error, &["run.toml: is not the file that the run wrote"]);
        assert!(matches!(error, Error::File { .. }), "{error:?}");
    }
    // Of an older program, or by a person who knows what he does.
    let (_, plain) = text.split_once('\n').unwrap();
    fs::write(&path, plain).unwrap();
    base.set("train.steps=3").run_at(&resumed, &mut ()).unwrap();
    assert!(fs::read_to_string(&path).unwrap().starts_with("# blake3"), "from here on it has one");
}

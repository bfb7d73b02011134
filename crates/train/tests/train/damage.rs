//! What a run does where checkpoints are damaged, the disk fails or its numbers do: nothing that might be
//! rescued is lost, and nothing that cannot be gone on from is called a checkpoint.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use espalier_train::Error;
use espalier_train::checkpoint::Checkpoint;
use espalier_train::parallel::Ranks;
use espalier_train::run::{Observer, RunDir};

use crate::support::{self, Base, RecordingObserver, assert_says, hash, resumed};

/// Names in the folder of checkpoints, in order.
fn names(folder: &Path) -> Vec<String> {
    support::names(&folder.join("checkpoints"))
}

/// Every file below a folder, with its bytes.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.push((path.clone(), fs::read(path).unwrap()));
        }
    }
    found.sort();
    found
}

fn damage(checkpoint: &Path) {
    support::flip_a_bit(&checkpoint.join("model.safetensors"));
}

/// Where no checkpoint is intact, resuming is refused and changes nothing; starting over is asked for, and
/// puts them aside.
#[test]
fn what_might_be_rescued_is_never_written_over() {
    let base = support::tiny_gpt("checkpoint.every=2 train.log_every=1");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let expected = hash(base.steps(4).run_in(at));
    for step in ["step-000002", "step-000004"] {
        damage(&at.join("checkpoints").join(step));
    }
    let before = contents(at);
    let error = base.steps(6).fails(&resumed(at));
    assert!(matches!(error, Error::File { .. }), "{error:?}");
    let message = error.to_string();
    assert_says(&message, &["no intact checkpoint is left", "step-000004: model.safetensors"]);
    assert_says(&message, &["espalier verify", "--resume --fresh"]);
    assert!(contents(at) == before, "nothing was changed");

    let fresh = RunDir { fresh: true, ..resumed(at) };
    let (ended, observer) = base.steps(4).run_observed_at(&fresh);
    assert_eq!(hash(ended.unwrap()), expected, "it is the same run again");
    assert_eq!(observer.resumed_after, Some(0));
    assert!(observer.warnings.iter().any(|text| text.contains("set-aside-1")), "{:?}", observer.warnings);
    assert_eq!(names(at), ["step-000002", "step-000004"]);
    for (path, bytes) in before.iter().filter(|(path, _)| path.starts_with(at.join("checkpoints"))) {
        let aside = at.join("set-aside-1").join(path.strip_prefix(at).unwrap());
        assert!(fs::read(&aside).unwrap() == *bytes, "{}", aside.display());
    }
    assert!(at.join("set-aside-1/metrics.jsonl").exists());
}

/// Damaged ones have higher numbers than those that are written next: they used to count as the newest.
#[test]
fn damaged_checkpoints_neither_count_nor_go() {
    let base = support::tiny_gpt("checkpoint.every=1 checkpoint.keep=2");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    base.set("checkpoint.keep=4").steps(5).run_in(at);
    assert_eq!(names(at), ["step-000002", "step-000003", "step-000004", "step-000005"]);
    damage(&at.join("checkpoints/step-000004"));
    let manifest = at.join("checkpoints/step-000005/manifest.json");
    fs::write(&manifest, "").unwrap();
    let (_, observer) = base.steps(6).resume_observed(at);
    assert_eq!(observer.resumed_after, Some(3));
    assert_eq!(observer.warnings.iter().filter(|text| text.contains("the one before it is used")).count(), 2);
    let expected = ["damaged-step-000004", "damaged-step-000005", "step-000005", "step-000006"];
    assert_eq!(names(at), expected);
    for step in &expected[2..] {
        Checkpoint::read(&at.join("checkpoints").join(step), &Ranks::single()).unwrap();
    }
    // One that is damaged while the run goes on neither pushes out an intact one nor goes itself.
    struct Damages(PathBuf);
    impl Observer for Damages {
        fn saved(&mut self, path: &Path) {
            if path.ends_with("step-000007") {
                fs::remove_file(self.0.join("checkpoints/step-000007/manifest.json")).unwrap();
            }
        }
    }
    base.steps(8).run_at(&resumed(at), &mut Damages(at.to_owned())).unwrap();
    assert_eq!(names(at)[2..], ["step-000006", "step-000007", "step-000008"]);
}

/// A manifest that says something else is damaged, not another run's: `step` used to be believed, and `model`
/// to end the run although the checkpoint before was intact.
#[test]
fn a_changed_manifest_is_a_damaged_one() {
    let base = support::tiny_gpt("checkpoint.every=2");
    for (old, new_text) in
        [("\"step\": 4", "\"step\": 5"), ("\"updates\": 4", "\"updates\": 6"), ("gpt", "gqt"), ("f32", "f22")]
    {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        base.steps(4).run_in(at);
        let manifest = at.join("checkpoints/step-000004/manifest.json");
        let text = fs::read_to_string(&manifest).unwrap();
        assert!(text.contains(old), "{text}");
        fs::write(&manifest, text.replacen(old, new_text, 1)).unwrap();
        let (_, observer) = base.steps(6).resume_observed(at);
        assert_eq!(observer.resumed_after, Some(2), "{new_text}: {:?}", observer.warnings);
    }
}

/// What a program before this one wrote: no hash of the manifest in it.
#[test]
fn a_checkpoint_of_an_older_program_is_gone_on_from() {
    let base = support::tiny_gpt("");
    let folder = tempfile::tempdir().unwrap();
    base.steps(2).run_in(folder.path());
    let manifest = folder.path().join("checkpoints/step-000002/manifest.json");
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    assert!(value.as_object_mut().unwrap().remove("blake3").is_some());
    fs::write(&manifest, value.to_string()).unwrap();
    let (_, observer) = base.steps(4).resume_observed(folder.path());
    assert_eq!(observer.resumed_after, Some(2));
}

/// That the folder cannot be read does not mean that it is empty.
#[test]
fn checkpoints_that_cannot_be_listed_are_an_error() {
    let base = support::tiny_gpt("");
    let folder = tempfile::tempdir().unwrap();
    base.steps(2).run_in(folder.path());
    let inside = folder.path().join("checkpoints");
    fs::rename(&inside, folder.path().join("elsewhere")).unwrap();
    fs::write(&inside, "not a folder").unwrap();
    let error = base.steps(4).fails(&resumed(folder.path())).to_string();
    assert!(error.contains("checkpoints: ") && !error.contains("no whole"), "{error}");
}

/// A fault of a moment used to put the newest checkpoint aside: that the system cannot read it does not say
/// that it is damaged.
#[test]
fn a_checkpoint_that_cannot_be_read_ends_the_run_and_keeps_its_name() {
    for ranks in [1, 2] {
        let base = support::tiny_gpt("checkpoint.every=2").replicas(ranks);
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        base.steps(4).run_in(at);
        let manifest = at.join("checkpoints/step-000004/manifest.json");
        let aside = at.join("manifest.json");
        fs::rename(&manifest, &aside).unwrap();
        // No rights of whoever runs the tests help against that.
        std::os::unix::fs::symlink(&manifest, &manifest).unwrap();
        let error = base.steps(6).fails(&resumed(at));
        assert!(matches!(error, Error::Disk { .. }), "{ranks} ranks: {error:?}");
        assert_says(error, &["step-000004: the checkpoint cannot be read, and is not known to be damaged"]);
        assert_eq!(names(at), ["step-000002", "step-000004"], "{ranks} ranks: nothing was changed");
        fs::rename(&aside, &manifest).unwrap();
        let (_, observer) = base.steps(6).resume_observed(at);
        assert_eq!((observer.resumed_after, observer.warnings), (Some(4), Vec::new()));
    }
}

/// A disk that takes nothing at step 4, and at step 6 where it `recovers`: there is a file where the folder
/// should be.
fn failing_disk(folder: &Path, recovers: bool) -> RecordingObserver<'static> {
    let (inside, aside) = (folder.join("checkpoints"), folder.join("aside"));
    RecordingObserver::each(move |step| {
        if step == 3 {
            fs::rename(&inside, &aside).unwrap();
            fs::write(&inside, "").unwrap();
        }
        if step == if recovers { 5 } else { 7 } {
            fs::remove_file(&inside).unwrap();
            fs::rename(&aside, &inside).unwrap();
        }
    })
}

/// A checkpoint that the disk does not take is reported; the run goes on, the ones before stay, the next is
/// tried; and where that was the last one, the run has failed.
#[test]
fn a_disk_that_fails_is_tried_again() {
    for ranks in [1, 2] {
        let base = support::tiny_gpt("checkpoint.every=2 checkpoint.keep=1 checkpoint.last=false");
        let base = base.replicas(ranks);
        for (recovers, steps, kept) in [(true, 7, "step-000006"), (false, 7, "step-000002")] {
            let folder = tempfile::tempdir().unwrap();
            let at = folder.path();
            let mut disk = failing_disk(at, recovers);
            let outcome = base.steps(steps).run_at(&RunDir::at(at), &mut disk);
            let warnings = &disk.warnings;
            assert!(warnings[0].contains("step-000004: the checkpoint cannot be written"), "{warnings:?}");
            assert!(warnings[0].contains("continues without it"), "{warnings:?}");
            assert_eq!(warnings.len(), if recovers { 1 } else { 2 }, "{warnings:?}");
            match outcome {
                Ok(_) => assert!(recovers),
                Err(error) => assert!(!recovers && matches!(error, Error::Disk { .. }), "{error}"),
            }
            assert_eq!(names(at), [kept], "{ranks} ranks: nothing else is left");
        }
    }
}

/// A rate at which the weights are beyond all numbers after the first step.
fn exploding(more: impl Display) -> Base {
    support::tiny_gpt("optimizer.name=sgd learning_rate.peak=1e38 learning_rate.warmup=0").set(more)
}

/// Skipped steps change nothing, so saving after them would only push out what was saved before.
#[test]
fn skipped_steps_push_no_checkpoint_out() {
    let base = exploding("checkpoint.every=1 checkpoint.keep=1 train.max_bad_steps=4");
    let folder = tempfile::tempdir().unwrap();
    let error = base.steps(20).fails(&RunDir::at(folder.path()));
    assert!(matches!(error, Error::Diverged { step: 5, .. }), "{error}");
    assert_eq!(names(folder.path()), ["step-000001"]);
}

/// Neither weights nor a validation loss that are not finite end well or are saved, with one rank and several.
#[test]
fn what_is_not_finite_is_neither_saved_nor_a_success() {
    for ranks in [1, 2] {
        let ranks = format!("parallel.data={ranks}");
        let folder = tempfile::tempdir().unwrap();
        let error = exploding(&ranks).steps(1).fails(&RunDir::at(folder.path()));
        assert!(matches!(error, Error::NotFinite { step: 1, .. }), "{error}");
        assert_says(&error, &["the validation loss is NaN or infinite after step 1"]);
        assert!(!folder.path().join("checkpoints").exists());

        // Nobody evaluates validation data: the weights themselves do, where they are saved and where they
        // are not.
        for last in ["checkpoint.last=true", "checkpoint.last=false"] {
            let folder = tempfile::tempdir().unwrap();
            let blind = "data.validation=0 train.eval_samples=0 optimizer.weight_decay=1e6";
            let error =
                exploding(format!("{blind} {last} {ranks}")).steps(1).fails(&RunDir::at(folder.path()));
            let message = error.to_string();
            assert!(
                matches!(error, Error::NotFinite { step: 1, .. }) && message.contains(".weight is NaN"),
                "{message}"
            );
            let inside = folder.path().join("checkpoints");
            assert!(!inside.exists() || names(folder.path()).is_empty(), "{last}");
        }
    }
}

//! Stopping and resuming gives the bits of never having stopped; a broken checkpoint is passed over; a wrong
//! one is refused.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use espalier_train::Error;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::run::RunDir;

use crate::support::{self, assert_goes_on, assert_says, hash, names, resumed};

/// Goes on in a folder. What the checkpoint itself does not fit is to be found, not what the run file says.
fn other_model(folder: &Path) -> RunDir {
    RunDir { allow: vec!["model".into(), "train.precision".into()], ..resumed(folder) }
}

const OPTIMIZERS: [&str; 7] = ["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"];

#[test]
fn two_halves_equal_the_uninterrupted_run_bit_for_bit() {
    for precision in ["f32", "bf16"] {
        for optimizer in OPTIMIZERS {
            let base = support::tiny_gpt("model.dropout=0.1 train.micro_batches=2")
                .set(format!("train.precision={precision} optimizer.name={optimizer}"));
            assert_goes_on(&base, [3, 6]);
        }
    }
}

#[test]
fn running_statistics_of_batch_norm_are_resumed_too() {
    assert_goes_on(&support::tiny_cnn(""), [3, 6]);
}

#[test]
fn a_damaged_checkpoint_is_reported_and_the_one_before_it_used() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("hash", |path| support::flip_a_bit(&path.join("model.safetensors"))),
        ("bytes instead of", |path| {
            let bytes = fs::read(path.join("optimizer.safetensors")).unwrap();
            fs::write(path.join("optimizer.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("manifest.json is damaged", |path| fs::write(path.join("manifest.json"), "{").unwrap()),
        ("manifest.json", |path| fs::remove_file(path.join("manifest.json")).unwrap()),
    ];
    let base = support::tiny_gpt("checkpoint.every=2");
    let expected = hash(base.steps(6).run());
    for (what, damage) in damages {
        let folder = tempfile::tempdir().unwrap();
        base.steps(4).run_in(folder.path());
        damage(&folder.path().join("checkpoints/step-000004"));
        let (summary, observer) = base.steps(6).resume_observed(folder.path());
        assert_eq!(hash(summary), expected, "{what}");
        assert!(observer.warnings.iter().any(|w| w.contains(what)), "{what}: {:?}", observer.warnings);
        assert_eq!(observer.resumed_after, Some(2), "{what}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    support::tiny_gpt("").steps(2).run_in(folder.path());
    let before = fs::read(folder.path().join("run.toml")).unwrap();
    for (change, message) in [("model.width=32", "wte.weight"), ("train.precision=bf16", "precision")] {
        let error = support::tiny_gpt(change).steps(4).fails(&other_model(folder.path())).to_string();
        assert!(error.contains(message), "{error}");
        assert_eq!(fs::read(folder.path().join("run.toml")).unwrap(), before, "the run folder is untouched");
    }
}

#[test]
fn a_used_folder_and_an_empty_one_are_told_apart() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let base = support::tiny_gpt("").steps(2).replicas(ranks);
        assert_says(base.fails(&resumed(folder.path())), &["no run here to resume"]);
        base.run_in(folder.path());
        let error = base.fails(&RunDir::at(folder.path()));
        assert!(matches!(&error, Error::File { why, .. } if why.contains("--resume")), "{error}");
    }
}

#[test]
fn only_the_last_checkpoints_are_kept_and_no_temporary_is_left() {
    let folder = tempfile::tempdir().unwrap();
    support::tiny_gpt("checkpoint.every=1 checkpoint.keep=2").steps(5).run_in(folder.path());
    assert_eq!(names(&folder.path().join("checkpoints")), ["step-000004", "step-000005"]);
}

#[test]
fn a_stop_saves_and_metrics_hold_each_step_once() {
    let folder = tempfile::tempdir().unwrap();
    let base = support::tiny_gpt("train.log_every=1");
    let stop = Arc::new(AtomicBool::new(true));
    let outcome = base.steps(6).run_until(&stop, &RunDir::at(folder.path()), &mut ()).unwrap();
    assert!(outcome.interrupted);
    assert_eq!(outcome.summary.steps, 1, "it finishes the step and stops");
    assert_eq!(hash(base.steps(6).run_in(folder.path())), hash(base.steps(6).run()));
    let metrics = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let steps: Vec<u64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|line| line.get("loss").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

/// What is known of the noise scale after a stop is what was known before it, to the bit.
#[test]
fn the_noise_scale_is_resumed_too() {
    let base = support::tiny_gpt("train.batch=16 train.micro_batches=4 train.noise_scale=true");
    let trainer = || base.set("train.steps=8").trainer(2);
    let (folder, mut uninterrupted) = (tempfile::tempdir().unwrap(), trainer());
    let checkpoints = Checkpoints::new(folder.path(), 1, "gpt", "f32");
    (0..4).for_each(|_| drop(uninterrupted.step().unwrap()));
    uninterrupted.save(&checkpoints).unwrap();
    let mut again = trainer();
    again.load(&checkpoints, |broken| panic!("{broken}")).unwrap().expect("a checkpoint");
    for _ in 0..4 {
        let (expected, resumed) = (uninterrupted.step().unwrap(), again.step().unwrap());
        assert!(expected.noise_scale.is_some());
        assert_eq!(resumed.noise_scale, expected.noise_scale, "after step {}", expected.step);
    }
}

/// A long evaluation does not keep a run that is to stop, and it is not lost either: at a step in the middle,
/// and at the last.
#[test]
fn an_evaluation_that_a_stop_interrupts_is_done_first_when_the_run_goes_on() {
    let layouts = ["", "parallel.data=2", "parallel.data=2 parallel.pipeline=2 train.micro_batches=2"];
    for (settings, last) in layouts.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let base = support::tiny_gpt("train.eval_every=3 train.steps=6").set(settings);
        let run_until = |folder: &Path, resume: bool, stop_at: u64| {
            let run_dir = RunDir { resume, ..RunDir::at(folder) };
            let (outcome, observer) = base.run_stopped_after(stop_at, &run_dir);
            (observer.evaluations, outcome.interrupted, outcome.summary)
        };
        let (uninterrupted, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (expected, interrupted, at_end) = run_until(uninterrupted.path(), false, u64::MAX);
        assert!(!interrupted && expected.len() == 2, "{settings}: {expected:?}");
        let stop_at = if last { 6 } else { 3 };
        let (first, interrupted, _) = run_until(halves.path(), false, stop_at);
        assert!(interrupted, "{settings}: stopped at {stop_at}");
        let (second, interrupted, resumed) = run_until(halves.path(), true, u64::MAX);
        assert!(!interrupted);
        assert_eq!(second[0].0, stop_at, "{settings}: what was interrupted is done first");
        assert_eq!([first, second].concat(), expected, "{settings}: each once, and the same");
        assert_eq!(resumed.weights_hash, at_end.weights_hash, "{settings}");
        assert_eq!(resumed.validation.best_loss, at_end.validation.best_loss, "{settings}");
        let (third, _, _) = run_until(halves.path(), true, u64::MAX);
        assert!(third.is_empty(), "{settings}: nothing is due any more: {third:?}");
    }
}

/// Between any two batches, not only before the first.
#[test]
fn an_evaluation_is_stopped_between_its_batches() {
    let mut trainer = support::tiny_gpt("train.eval_samples=16").trainer(2);
    let asked = Cell::new(0);
    let after = |batches: usize| {
        asked.set(0);
        move |asked: &Cell<usize>| asked.replace(asked.get() + 1) == batches
    };
    let third = after(2);
    assert!(trainer.evaluate_unless_stopped(&|| third(&asked)).unwrap().is_none());
    assert_eq!(asked.get(), 3, "two of four batches, and then no more");
    assert!(trainer.progress().evaluation_due);
    let never = after(usize::MAX);
    assert!(trainer.evaluate_unless_stopped(&|| never(&asked)).unwrap().is_some());
    assert_eq!((asked.get(), trainer.progress().evaluation_due), (4, false));
}

//! Stopping and resuming gives the bits of never having stopped; a broken checkpoint is passed over; a wrong one is refused.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use espalier_train::checkpoint::Checkpoints;
use espalier_train::run::{Observer, RunDir, run};
use espalier_train::trainer::{Evaluation, StepReport, Trainer};
use espalier_train::{Error, Rates};

use crate::support::{self, Base, Heard};

/// Runs a run file to `steps` steps in `folder` and returns the hash of its weights.
fn train(folder: &Path, base: &Base, steps: u64, resume: bool) -> Result<String, Error> {
    train_heard(folder, base, steps, resume, &mut ())
}

fn train_heard(
    folder: &Path,
    base: &Base,
    steps: u64,
    resume: bool,
    observer: &mut (dyn Observer + Send),
) -> Result<String, Error> {
    let (plan, dataset, device) = support::prepare(&base.set(format!("train.steps={steps}")), 2);
    // What the checkpoint itself does not fit is to be found, not what the run file says.
    let allow = vec!["model".into(), "train.precision".into()];
    let place = RunDir { resume, allow, ..RunDir::at(folder) };
    let outcome = run(plan, dataset, &device, &place, &Arc::default(), observer)?;
    Ok(outcome.summary.weights_hash.expect("a finished run has a hash"))
}

const OPTIMIZERS: [&str; 7] = ["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"];

#[test]
fn two_halves_equal_the_whole_bit_for_bit() {
    for precision in ["f32", "bf16"] {
        for optimizer in OPTIMIZERS {
            let base = support::tiny_gpt(&[
                &format!("train.precision={precision}"),
                &format!("optimizer.name={optimizer}"),
                "model.dropout=0.1",
                "train.micro_batches=2",
            ]);
            let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let expected = train(whole.path(), &base, 8, false).unwrap();
            let half = train(halves.path(), &base, 4, false).unwrap();
            assert_ne!(half, expected, "{optimizer} {precision}: the second half changes something");
            let resumed = train(halves.path(), &base, 8, true).unwrap();
            assert_eq!(resumed, expected, "{optimizer} {precision}");
        }
    }
}

#[test]
fn running_statistics_of_batch_norm_are_resumed_too() {
    let base = support::tiny_cnn(&[]);
    let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = train(whole.path(), &base, 6, false).unwrap();
    train(halves.path(), &base, 3, false).unwrap();
    assert_eq!(train(halves.path(), &base, 6, true).unwrap(), expected);
}

#[test]
fn a_damaged_checkpoint_is_reported_and_the_one_before_it_used() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("hash", |path| {
            let mut bytes = fs::read(path.join("model.safetensors")).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path.join("model.safetensors"), bytes).unwrap();
        }),
        ("bytes instead of", |path| {
            let bytes = fs::read(path.join("optimizer.safetensors")).unwrap();
            fs::write(path.join("optimizer.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("manifest.json is damaged", |path| fs::write(path.join("manifest.json"), "{").unwrap()),
        ("manifest.json", |path| fs::remove_file(path.join("manifest.json")).unwrap()),
    ];
    let base = support::tiny_gpt(&["checkpoint.every=2"]);
    let expected = train(tempfile::tempdir().unwrap().path(), &base, 6, false).unwrap();
    for (what, damage) in damages {
        let folder = tempfile::tempdir().unwrap();
        train(folder.path(), &base, 4, false).unwrap();
        damage(&folder.path().join("checkpoints/step-000004"));
        let mut heard = Heard::default();
        let resumed = train_heard(folder.path(), &base, 6, true, &mut heard).unwrap();
        assert_eq!(resumed, expected, "{what}");
        assert!(heard.warnings.iter().any(|w| w.contains(what)), "{what}: {:?}", heard.warnings);
        assert_eq!(heard.resumed_after, Some(2), "{what}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), &support::tiny_gpt(&[]), 2, false).unwrap();
    let before = fs::read(folder.path().join("run.toml")).unwrap();
    for (change, said) in [("model.width=32", "wte.weight"), ("train.precision=bf16", "precision")] {
        let error = train(folder.path(), &support::tiny_gpt(&[change]), 4, true).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        assert_eq!(fs::read(folder.path().join("run.toml")).unwrap(), before, "the run folder is untouched");
    }
}

#[test]
fn a_used_folder_and_an_empty_one_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let base = support::tiny_gpt(&[]);
    let error = train(folder.path(), &base, 2, true).unwrap_err().to_string();
    assert!(error.contains("no run here to resume"), "{error}");
    train(folder.path(), &base, 2, false).unwrap();
    let error = train(folder.path(), &base, 2, false).unwrap_err().to_string();
    assert!(error.contains("--resume"), "{error}");
}

#[test]
fn only_the_last_checkpoints_are_kept_and_no_temporary_is_left() {
    let folder = tempfile::tempdir().unwrap();
    train(folder.path(), &support::tiny_gpt(&["checkpoint.every=1", "checkpoint.keep=2"]), 5, false).unwrap();
    let mut names: Vec<String> = fs::read_dir(folder.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["step-000004", "step-000005"]);
}

#[test]
fn a_stop_saves_and_metrics_hold_each_step_once() {
    let folder = tempfile::tempdir().unwrap();
    let base = support::tiny_gpt(&["train.log_every=1"]);
    let (plan, dataset, device) = support::prepare(&base.set("train.steps=6"), 1);
    let place = RunDir::at(folder.path());
    let outcome = run(plan, dataset, &device, &place, &Arc::new(AtomicBool::new(true)), &mut ()).unwrap();
    assert!(outcome.interrupted);
    assert_eq!(outcome.summary.steps, 1, "it finishes the step and stops");
    let resumed = train(folder.path(), &base, 6, true).unwrap();
    assert_eq!(resumed, train(tempfile::tempdir().unwrap().path(), &base, 6, false).unwrap());
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
    let base = support::tiny_gpt(&["train.batch=16", "train.micro_batches=4", "train.noise_scale=true"]);
    let trainer = || {
        let (plan, dataset, device) = support::prepare(&base.set("train.steps=8"), 2);
        Trainer::new(plan, dataset, &device).unwrap()
    };
    let (folder, mut whole) = (tempfile::tempdir().unwrap(), trainer());
    let checkpoints = Checkpoints::new(folder.path(), 1, "gpt", "f32");
    (0..4).for_each(|_| drop(whole.step().unwrap()));
    whole.save(&checkpoints).unwrap();
    let mut again = trainer();
    again.load(&checkpoints, |broken| panic!("{broken}")).unwrap().expect("a checkpoint");
    for _ in 0..4 {
        let (expected, resumed) = (whole.step().unwrap(), again.step().unwrap());
        assert!(expected.noise_scale.is_some());
        assert_eq!(resumed.noise_scale, expected.noise_scale, "after step {}", expected.step);
    }
}

/// Asks to stop at a step, and notes which evaluations it hears of.
struct StopAt<'a> {
    step: u64,
    stop: &'a AtomicBool,
    evaluated: Vec<(u64, f64)>,
}

impl Observer for StopAt<'_> {
    fn step(&mut self, report: &StepReport, _: Rates, _: usize) {
        self.stop.store(report.step == self.step, Ordering::Relaxed);
    }

    fn evaluated(&mut self, step: u64, evaluation: Evaluation) {
        self.evaluated.push((step, evaluation.loss));
    }
}

/// A long evaluation does not keep a run that is to stop, and it is not lost either: at a step in the middle, and at the last.
#[test]
fn an_evaluation_that_a_stop_interrupts_is_done_first_when_the_run_goes_on() {
    let layouts: [&[&str]; 3] =
        [&[], &["parallel.data=2"], &["parallel.data=2", "parallel.pipeline=2", "train.micro_batches=2"]];
    for (settings, last) in layouts.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let base = settings
            .iter()
            .fold(support::tiny_gpt(&["train.eval_every=3", "train.steps=6"]), |base, more| base.set(more));
        let part = |folder: &Path, resume: bool, stop_at: u64| {
            let (plan, dataset, device) = support::prepare(&base, 2);
            let place = RunDir { resume, ..RunDir::at(folder) };
            let stop = Arc::<AtomicBool>::default();
            let mut observer = StopAt { step: stop_at, stop: &stop, evaluated: Vec::new() };
            let outcome = run(plan, dataset, &device, &place, &stop, &mut observer).unwrap();
            (observer.evaluated, outcome.interrupted, outcome.summary)
        };
        let (whole, halves) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (expected, interrupted, at_end) = part(whole.path(), false, u64::MAX);
        assert!(!interrupted && expected.len() == 2, "{settings:?}: {expected:?}");
        let stop_at = if last { 6 } else { 3 };
        let (first, interrupted, _) = part(halves.path(), false, stop_at);
        assert!(interrupted, "{settings:?}: stopped at {stop_at}");
        let (second, interrupted, resumed) = part(halves.path(), true, u64::MAX);
        assert!(!interrupted);
        assert_eq!(second[0].0, stop_at, "{settings:?}: what was interrupted is done first");
        assert_eq!([first, second].concat(), expected, "{settings:?}: each once, and the same");
        assert_eq!(resumed.weights_hash, at_end.weights_hash, "{settings:?}");
        assert_eq!(resumed.validation.best_loss, at_end.validation.best_loss, "{settings:?}");
        let (third, _, _) = part(halves.path(), true, u64::MAX);
        assert!(third.is_empty(), "{settings:?}: nothing is due any more: {third:?}");
    }
}

/// Between any two batches, not only before the first.
#[test]
fn an_evaluation_is_stopped_between_its_batches() {
    let (plan, dataset, device) = support::prepare(&support::tiny_gpt(&["train.eval_samples=16"]), 2);
    let mut trainer = Trainer::new(plan, dataset, &device).unwrap();
    let asked = Cell::new(0);
    let after = |batches: usize| {
        asked.set(0);
        move |asked: &Cell<usize>| asked.replace(asked.get() + 1) == batches
    };
    let third = after(2);
    assert!(trainer.evaluate_unless(&|| third(&asked)).unwrap().is_none());
    assert_eq!(asked.get(), 3, "two of four batches, and then no more");
    assert!(trainer.progress().evaluation_due);
    let never = after(usize::MAX);
    assert!(trainer.evaluate_unless(&|| never(&asked)).unwrap().is_some());
    assert_eq!((asked.get(), trainer.progress().evaluation_due), (4, false));
}

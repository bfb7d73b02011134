//! What holds of any run.

use std::fmt::Display;
use std::fs;

use espalier_tensor::Category;
use espalier_train::RunSummary;

use super::{Base, hash, on_every_rank, planned, take};

/// The most bytes of some categories that each rank has in so many steps: measured, and as the plan says.
pub fn peaks<const N: usize>(base: &Base, steps: usize, of: [Category; N]) -> [Vec<[u64; N]>; 2] {
    let plan = planned(base);
    let measured = on_every_rank(base, |mut trainer| {
        take(&mut trainer, steps)?;
        let device = trainer.device().clone();
        drop(trainer);
        // Of several ranks, another may still have a message.
        assert!(plan.mesh.size() > 1 || device.ledger().total() == 0, "something is left");
        Ok(of.map(|category| device.ledger().peak(category) as u64))
    });
    let predicted = |rank| {
        let memory = serde_json::to_value(plan.rank(rank).unwrap().memory).unwrap();
        of.map(|category| memory[category.name()].as_u64().expect("it is predicted"))
    };
    let predicted = (0..measured.len()).map(predicted).collect();
    [measured, predicted]
}

/// Both are the same on every rank.
#[track_caller]
pub fn assert_peaks<const N: usize>(base: &Base, steps: usize, of: [Category; N]) {
    let [measured, predicted] = peaks(base, steps, of);
    assert_eq!(measured, predicted, "{base}: {of:?} of every rank");
}

/// A run has measured what the plan says of some categories.
pub fn assert_predicted(of: &RunSummary, categories: &[&str], what: impl Display) {
    for category in categories {
        let bytes = of.memory[*category];
        assert_eq!(bytes.predicted, bytes.measured.map(|b| b as u64), "{what}: {category}");
    }
}

/// A run that goes on from its middle ends as it did without a stop.
#[track_caller]
pub fn assert_goes_on(base: &Base, [middle, steps]: [u64; 2]) {
    let base = base.steps(steps).set(format!("checkpoint.every={middle} checkpoint.keep=2"));
    let folder = tempfile::tempdir().unwrap();
    let expected = hash(base.run_in(folder.path()));
    fs::remove_dir_all(folder.path().join(format!("checkpoints/step-{steps:06}"))).unwrap();
    let (again, observer) = base.resume_observed(folder.path());
    assert_eq!((hash(again), observer.resumed_after), (expected, Some(middle)), "{base}");
}

/// An error, or a warning, has these words in it.
#[track_caller]
pub fn assert_says(said: impl Display, words: &[&str]) {
    let said = said.to_string();
    assert!(words.iter().all(|words| said.contains(words)), "{said}");
}

//! One run of a study: what it is started with, what is seen of it, and what becomes of it.
//!
//! A search knows trials by the two traits here, so that it is tested with landscapes that are known and take
//! no time.

use std::path::Path;
use std::time::Duration;

use espalier_plan::config::Override;
use espalier_train::Error;
use serde::{Deserialize, Serialize};

use crate::file::{Cell, Goal, MOST_SEEDS};
use crate::workload::{TrialSettings, of_pruning};

impl TrialSettings {
    /// The cell that it is a trial of.
    pub fn cell(&self) -> Cell {
        Cell { batch: self.batch, sparsity: self.sparsity }
    }

    /// The same as overrides of a run file.
    pub fn overrides(&self) -> Vec<Override> {
        let mut overrides = vec![Override::seed(self.seed), Override::batch(self.batch)];
        if self.sparsity > 0.0 {
            overrides.push(Override::sparsity(self.sparsity));
        }
        // What is dense has no method whose fields could be searched.
        let fields = self.fields.iter().filter(|(field, _)| self.sparsity > 0.0 || !of_pruning(field));
        overrides.extend(fields.map(|(field, value)| {
            // An integer may be a number of steps.
            let is_integer = value.fract() == 0.0 && value.abs() < 1e15;
            Override::new(field, if is_integer { (*value as i64).into() } else { (*value).into() })
        }));
        overrides
    }
}

/// What can run the trials of a study: opened once, shared by all workers.
pub trait TrialRunner: Sync {
    /// A trial before its first step, which the worker of this number, from 0, runs to its end.
    fn begin<'a>(
        &'a self,
        worker: usize,
        settings: &TrialSettings,
    ) -> Result<Box<dyn Trial + Send + 'a>, Error>;

    /// A trial that was saved in a folder ([`Trial::save`]), and how it stood; none where what is there is
    /// damaged or of another trial.
    fn resume<'a>(
        &'a self,
        _worker: usize,
        _settings: &TrialSettings,
        _folder: &Path,
    ) -> Result<Option<ResumedTrial<'a>>, Error> {
        Ok(None)
    }

    /// How long steps must have taken for a paused trial to be saved.
    fn min_unsaved_time(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// What the measure of a goal is of somebody who guesses.
    fn chance_level(&self, goal: Goal) -> f64;

    /// Samples to learn from: no batch can have more.
    fn training_samples(&self) -> usize;
}

/// A trial that resumes from where it was saved, and its record there.
pub type ResumedTrial<'a> = (Box<dyn Trial + Send + 'a>, TrialRecord);

/// A trial that has begun, and can be kept while others run.
pub trait Trial {
    /// Takes steps until so many were taken in all, and validates there. One that diverges on the way stops
    /// there, and says so.
    fn advance(&mut self, step: u64) -> Result<TrialCheck, Error>;

    /// The same where only an end is of interest: none may come back of a trial that has neither reached the
    /// goal nor diverged.
    fn advance_to_goal(&mut self, step: u64) -> Result<Option<TrialCheck>, Error> {
        self.advance(step).map(Some)
    }

    /// Writes to a folder all that it needs to go on from where it stands, and its record, instead of
    /// what it wrote there before.
    fn save(&mut self, _folder: &Path, _record: &TrialRecord) -> Result<(), Error> {
        Ok(())
    }
}

/// How far a trial has come, or what it came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrialStatus {
    /// It has reached a rung, where the trials of its cell are compared, and waits.
    Paused,
    /// It reached the goal, at its last step.
    Complete,
    /// It spent its steps.
    Incomplete,
    /// It diverged.
    Infeasible,
    /// Another trial of its cell has reached the goal by its next validation: whatever it would have come to,
    /// K* is the same.
    Cut,
    /// It was too far behind others of its cell to be worth more steps. It might have caught up.
    Stopped,
}

impl TrialStatus {
    /// Whether nothing more comes of it.
    pub(crate) fn is_final(self) -> bool {
        self != TrialStatus::Paused
    }
}

/// A point of a trial's way: validation after some step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationPoint {
    pub step: u64,
    /// The mean loss.
    pub loss: f64,
    /// The fraction of wrong predictions.
    pub error: f64,
}

impl ValidationPoint {
    /// What the goal is about.
    pub fn measure(&self, goal: Goal) -> f64 {
        match goal {
            Goal::Error(_) => self.error,
            Goal::Loss(_) => self.loss,
        }
    }
}

/// How a trial stands after a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrialCheck {
    /// Steps taken; of a trial that has diverged, the number of the step that could not be.
    pub step: u64,
    /// The mean loss over the validation split; of a trial that has diverged, that of the batch.
    pub loss: f64,
    /// The fraction of the validation samples that it gets wrong; 1 of a trial that has diverged.
    pub error: f64,
    /// Whether a loss or a gradient was not a finite number: it will not come back from there.
    pub diverged: bool,
    /// Whether the network is as sparse as its cell asks for: before that it has reached nothing.
    pub pruned: bool,
}

/// A line of results: where a trial stands. A later line about the same trial replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrialRecord {
    pub batch: usize,
    pub sparsity: f64,
    /// Its number in the cell, from 1, which is its seed.
    pub trial: u32,
    /// What became of it.
    pub status: TrialStatus,
    pub steps: u64,
    /// The least measure of the goal at a point of the curve; absent where it was never a number.
    pub best: Option<f64>,
    /// The hyperparameters, in the order of the ranges.
    pub fields: Vec<(String, f64)>,
    /// Validation on the way, at steps that grow by a factor.
    pub curve: Vec<ValidationPoint>,
}

/// Numbers of trials from here on are those of best trials that are run again with other seeds.
const REPEATS: u32 = 1 << 31;

/// The number of a trial's n-th repetition, from 1: below [`MOST_SEEDS`] of it, so that it is no other's.
pub(crate) fn repeat_number(trial: u32, n: u32) -> u32 {
    REPEATS + trial * MOST_SEEDS + n
}

/// The trial that one of this number repeats.
pub(crate) fn repeated_trial(number: u32) -> Option<u32> {
    number.checked_sub(REPEATS).map(|number| number / MOST_SEEDS)
}

impl TrialRecord {
    /// Whether it repeats a best trial with another seed.
    pub(crate) fn is_repeat(&self) -> bool {
        repeated_trial(self.trial).is_some()
    }

    /// The cell that it is a trial of.
    pub fn cell(&self) -> Cell {
        Cell { batch: self.batch, sparsity: self.sparsity }
    }

    /// The steps to the goal, where it was reached.
    pub fn result(&self) -> Option<u64> {
        (self.status == TrialStatus::Complete).then_some(self.steps)
    }
}

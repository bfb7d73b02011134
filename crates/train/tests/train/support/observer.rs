//! What a run tells its observer.

use espalier_train::Throughput;
use espalier_train::prune::PruneReport;
use espalier_train::run::Observer;
use espalier_train::trainer::{Evaluation, StepReport};

/// An observer that records what it is called with.
#[derive(Default)]
pub struct RecordingObserver<'a> {
    /// The steps done, as `started` was called.
    pub resumed_after: Option<u64>,
    /// All warnings,
    pub warnings: Vec<String>,
    /// and all notes.
    pub notes: Vec<String>,
    /// Of every step.
    pub losses: Vec<f64>,
    /// Losses of held-out data, each with its step.
    pub evaluations: Vec<(u64, f64)>,
    /// Step, prompt and text of every sample.
    pub samples: Vec<(u64, String, String)>,
    /// When something was pruned, what is kept, and of how many.
    pub prunings: Vec<(u64, u64, u64)>,
    /// What is done after each step.
    then: Option<Box<dyn Fn(u64) + Send + 'a>>,
}

impl<'a> RecordingObserver<'a> {
    /// One that does something after each step,
    pub fn each(then: impl Fn(u64) + Send + 'a) -> RecordingObserver<'a> {
        RecordingObserver { then: Some(Box::new(then)), ..RecordingObserver::default() }
    }

    /// or after one of them.
    pub fn then(step: u64, then: impl Fn() + Send + 'a) -> RecordingObserver<'a> {
        RecordingObserver::each(move |now| {
            if now == step {
                then()
            }
        })
    }
}

impl Observer for RecordingObserver<'_> {
    fn started(&mut self, done: u64, _: u64) {
        self.resumed_after = Some(done);
    }

    fn step(&mut self, report: &StepReport, _: Throughput, _: usize) {
        self.losses.push(report.loss);
        if let Some(then) = &self.then {
            then(report.step);
        }
    }

    fn evaluated(&mut self, step: u64, evaluation: Evaluation) {
        self.evaluations.push((step, evaluation.loss));
    }

    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        self.samples.push((step, prompt.into(), text.into()));
    }

    fn pruned(&mut self, step: u64, report: &PruneReport) {
        self.prunings.push((step, report.kept, report.of));
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }

    fn warning(&mut self, text: &str) {
        self.warnings.push(text.into());
    }
}

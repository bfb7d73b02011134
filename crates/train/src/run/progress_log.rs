//! The log of a run's progress (`tracing`), on every rank: what an [`Observer`] is called with on rank 0
//! alone.

use std::path::Path;

use tracing::{info, warn};

use super::Observer;
use crate::prune::{Observation, PruneReport};
use crate::summary::Throughput;
use crate::trainer::{Evaluation, StepReport};

/// Logs what it passes on.
pub(super) struct ProgressLog<'a>(pub(super) &'a mut dyn Observer);

impl Observer for ProgressLog<'_> {
    fn started(&mut self, done: u64, steps: u64) {
        info!("the run begins after {done} of {steps} steps");
        self.0.started(done, steps);
    }

    fn step(&mut self, report: &StepReport, rates: Throughput, memory: usize) {
        self.0.step(report, rates, memory);
    }

    fn evaluated(&mut self, step: u64, evaluation: Evaluation) {
        info!("evaluated after step {step}: validation loss {}", evaluation.loss);
        self.0.evaluated(step, evaluation);
    }

    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        info!("generated {} characters after step {step}", text.chars().count());
        self.0.sampled(step, prompt, text);
    }

    fn observed(&mut self, step: u64, observation: &Observation) {
        info!("the pruning method does not prune before step {step} yet");
        self.0.observed(step, observation);
    }

    fn pruned(&mut self, step: u64, pruned: &PruneReport) {
        info!("pruned before step {step}: {} of {} prunable weights are kept", pruned.kept, pruned.of);
        self.0.pruned(step, pruned);
    }

    fn saved(&mut self, path: &Path) {
        info!("checkpoint {} is written", path.display());
        self.0.saved(path);
    }

    fn begins(&mut self) {
        self.0.begins();
    }

    fn note(&mut self, text: &str) {
        info!("{text}");
        self.0.note(text);
    }

    fn warning(&mut self, text: &str) {
        warn!("{text}");
        self.0.warning(text);
    }
}

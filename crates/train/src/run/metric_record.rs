//! A line of `metrics.jsonl`: written from these types, and read back into them. `docs/outputs.md` has every
//! field.
//!
//! JSON has no NaN: what need not be finite is an `Option`, and none is written as null.

use serde::{Deserialize, Serialize};

use crate::prune::{Observation, PruneReport};
use crate::summary::{Throughput, Validation};
use crate::trainer::StepReport;

/// What happened at a step; which fields there are says what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MetricRecord {
    /// A step was tried.
    Step(StepRecord),
    /// The model was evaluated.
    Evaluation(EvaluationRecord),
    /// Weights were pruned before the step.
    Pruned(PruneRecord),
    /// The pruning method compared masks before the step and pruned nothing yet.
    Observed(ObservationRecord),
    /// The run ended, since it had diverged.
    Diverged(DivergedRecord),
}

/// A step that was tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Its number, from 1.
    pub step: u64,
    /// The mean loss over the batch, before the step.
    pub loss: Option<f64>,
    /// The learning rate.
    pub lr: f64,
    /// The norm of the gradient before clipping.
    pub grad_norm: Option<f64>,
    /// The fraction of right predictions in the batch.
    pub accuracy: Option<f64>,
    /// The fraction of candidates that is pruned.
    pub sparsity: f64,
    /// Seconds since the run began.
    pub time: f64,
    /// Of the last steps, for text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Of the last steps, for images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images_per_s: Option<f64>,
    /// The gradient noise scale, where it is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
    /// Whether the weights stayed as they were, since loss or gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Steps done.
    pub step: u64,
    /// Loss and accuracy on validation samples.
    pub validation: Validation,
    /// When it was done: what lies between it and the step's own `time` was spent on it.
    pub time: f64,
}

/// Weights that were pruned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PruneRecord {
    /// The step that is next.
    pub step: u64,
    /// What was pruned, by which method.
    pub pruned: PruneReport,
}

/// An observation of the pruning method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ObservationRecord {
    /// The step that is next.
    pub step: u64,
    /// What it saw, without pruning.
    pub pruner: Observation,
}

/// The end of a run that diverged: the last line of it, until it goes on from before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DivergedRecord {
    /// The last step that was tried.
    pub step: u64,
    /// The sentence with which the run ended.
    pub diverged: String,
}

impl MetricRecord {
    /// The line of a step.
    pub(super) fn of_step(report: &StepReport, rates: Throughput, time: f64) -> MetricRecord {
        MetricRecord::Step(StepRecord {
            step: report.step,
            loss: finite(report.loss),
            lr: report.lr,
            grad_norm: finite(report.grad_norm),
            accuracy: finite(report.accuracy),
            sparsity: report.sparsity,
            time,
            tokens_per_s: rates.tokens_per_s,
            images_per_s: rates.tokens_per_s.is_none().then_some(rates.samples_per_s),
            noise_scale: report.noise_scale,
            skipped: !report.taken,
        })
    }
}

fn finite(number: f64) -> Option<f64> {
    number.is_finite().then_some(number)
}

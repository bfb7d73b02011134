//! Lines that a model writes in the course of its run, so that a person sees what it has learnt.

use serde::{Deserialize, Serialize};

use crate::intervals::TrainIntervals;

/// What is asked of the model, and when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleConfig {
    /// The prompt.
    pub prompt: String,
    /// How many tokens it writes, unless its context ends before.
    pub tokens: usize,
    /// What logits are divided by; 0: the likeliest token, always.
    pub temperature: f64,
    /// How many of the likeliest tokens can be drawn; 0: all.
    pub top_k: usize,
    /// Nucleus sampling: the fraction of probability that can be sampled (top-p).
    pub top_p: f64,
    /// Evaluations between two samples; 0: only at the end.
    pub every: usize,
}

impl SampleConfig {
    /// Whether one is written behind the evaluation after a step.
    pub fn is_due(&self, step: u64, last: bool, intervals: &TrainIntervals) -> bool {
        let every = intervals.eval_every.map_or(0, |steps| steps * self.every as u64);
        last || (every > 0 && step.is_multiple_of(every))
    }
}

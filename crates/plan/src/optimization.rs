//! From gradients to steps: the rule, its rate, and what is done with gradients that are too long or no numbers.

use crate::learning_rate::LearningRate;
use crate::optimizer::OptimizerSpec;

/// What is done with the gradient of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimization {
    /// The rule of a step.
    pub optimizer: OptimizerSpec,
    /// The size of a step, with the peak for the run's batch.
    pub learning_rate: LearningRate,
    /// Gradients longer than this are scaled down to it.
    pub clip: Option<f64>,
    /// So many steps in a row without a finite gradient end the run.
    pub max_bad_steps: u64,
    /// Whether the gradient noise scale is estimated from the micro-batches.
    pub noise_scale: bool,
}

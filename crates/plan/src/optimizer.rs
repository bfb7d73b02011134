//! The rule that turns a gradient into a step, and what it remembers of each weight.

use serde::{Deserialize, Serialize};

/// A rule with its decay, and the forms of exact weights and of moments.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    /// Which, with its own fields.
    #[serde(flatten)]
    pub rule: OptimizerRule,
    /// Pulls weights towards 0: added to the gradient, or applied beside it by `adamw` and `lamb`.
    pub weight_decay: f64,
    /// Whether biases and norm parameters are left out of the decay.
    pub exclude_from_decay: bool,
    /// How the exact value of a bf16 weight is kept.
    pub master: MasterForm,
    /// In which type velocities and moments are stored.
    pub moments: MomentDtype,
}

/// The exact value of a bf16 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MasterForm {
    /// As a number of its own.
    F32,
    /// As the 16 bits that the weight lost: the same numbers in half the memory.
    LowBits,
}

impl MasterForm {
    /// Bytes for each bf16 weight.
    pub fn bytes(self) -> u64 {
        match self {
            MasterForm::F32 => 4,
            MasterForm::LowBits => 2,
        }
    }
}

/// The type in which velocities and moments are stored; arithmetic is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentDtype {
    /// As they are computed.
    F32,
    /// Rounded at random, up with the probability that keeps the mean.
    Bf16,
}

impl MomentDtype {
    /// Bytes of each number.
    pub fn bytes(self) -> u64 {
        match self {
            MomentDtype::F32 => 4,
            MomentDtype::Bf16 => 2,
        }
    }
}

/// The fields of each optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum OptimizerRule {
    /// w -= lr g
    Sgd,
    /// v = m v + g; w -= lr v
    Momentum {
        /// m
        momentum: f64,
    },
    /// v = m v + g; w -= lr (g + m v)
    Nesterov {
        /// m
        momentum: f64,
    },
    /// Kingma & Ba 2015.
    Adam {
        /// Memory of the mean.
        beta1: f64,
        /// Memory of the mean square.
        beta2: f64,
        /// Added to the root.
        eps: f64,
    },
    /// Loshchilov & Hutter 2019: Adam with the decay beside the step.
    AdamW {
        /// Memory of the mean.
        beta1: f64,
        /// Memory of the mean square.
        beta2: f64,
        /// Added to the root.
        eps: f64,
    },
    /// You, Gitman & Ginsburg 2017: momentum with a rate for each layer.
    Lars {
        /// Memory of the velocity.
        momentum: f64,
        /// eta: how much of its own length a layer may move.
        trust: f64,
        /// Whether the rate multiplies what enters the velocity, as published, or the velocity.
        rate_in_velocity: bool,
        /// Whether biases and norm parameters move at the plain rate.
        exclude_from_trust: bool,
    },
    /// You et al. 2020: Adam with a rate for each layer.
    Lamb {
        /// Memory of the mean.
        beta1: f64,
        /// Memory of the mean square.
        beta2: f64,
        /// Added to the root.
        eps: f64,
        /// The upper end of phi: a longer layer counts as one of this norm; 0: any norm counts.
        max_weight_norm: f64,
        /// Whether biases and norm parameters move at the plain rate.
        exclude_from_trust: bool,
    },
}

impl OptimizerSpec {
    /// Whether a layer's own norms scale its steps, and biases and norm parameters are left out of that.
    pub fn excludes_from_trust(&self) -> bool {
        match self.rule {
            OptimizerRule::Lars { exclude_from_trust, .. }
            | OptimizerRule::Lamb { exclude_from_trust, .. } => exclude_from_trust,
            _ => false,
        }
    }

    /// Numbers kept for each parameter: velocity, or mean and mean square.
    pub fn moments(&self) -> u64 {
        match self.rule {
            OptimizerRule::Sgd => 0,
            OptimizerRule::Momentum { .. } | OptimizerRule::Nesterov { .. } | OptimizerRule::Lars { .. } => 1,
            OptimizerRule::Adam { .. } | OptimizerRule::AdamW { .. } | OptimizerRule::Lamb { .. } => 2,
        }
    }

    /// The learning rate where none is written.
    pub(crate) fn usual_rate(&self) -> f64 {
        match self.rule {
            OptimizerRule::Sgd => 0.1,
            OptimizerRule::Momentum { .. } | OptimizerRule::Nesterov { .. } => 0.05,
            OptimizerRule::Adam { .. } | OptimizerRule::AdamW { .. } => 0.001,
            OptimizerRule::Lars { .. } => 1.0,
            OptimizerRule::Lamb { .. } => 0.002,
        }
    }
}

//! `[optimizer]`: the rule that turns a gradient into a step. The name decides which other fields there are.
//!
//! Defaults are those published with each method: beta2 = 0.999 for all of the Adam family (Kingma & Ba; language
//! models often use 0.95, which forgets a bad batch sooner), eps = 1e-8, or 1e-6 for LAMB; trust = 0.001 for LARS.

use serde::Serialize;

use super::Error;
use super::fields;
use super::reader::{Choice, Section};

/// `[optimizer]`
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Optimizer {
    /// Which, with its own fields.
    #[serde(flatten)]
    pub rule: Rule,
    /// Pulls weights towards 0: added to the gradient, or applied beside it by `adamw` and `lamb`.
    pub weight_decay: f64,
    /// Whether biases and norm parameters are left out of the decay.
    pub exclude_from_decay: bool,
    /// How the exact value of a bf16 weight is kept.
    pub master: Master,
}

/// The exact value of a bf16 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Master {
    /// As a number of its own.
    F32,
    /// As the 16 bits that the weight lost: the same numbers in half the memory.
    LowBits,
}

impl Choice for Master {
    const ALL: &'static [(&'static str, Self)] = &[("f32", Master::F32), ("low-bits", Master::LowBits)];
}

impl Master {
    /// Bytes for each bf16 weight.
    pub fn bytes(self) -> u64 {
        match self {
            Master::F32 => 4,
            Master::LowBits => 2,
        }
    }
}

/// The fields of each optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Rule {
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

/// `optimizer.name` alone.
#[derive(Clone, Copy, PartialEq)]
enum Name {
    Sgd,
    Momentum,
    Nesterov,
    Adam,
    AdamW,
    Lars,
    Lamb,
}

impl Choice for Name {
    const ALL: &'static [(&'static str, Self)] = &[
        ("sgd", Name::Sgd),
        ("momentum", Name::Momentum),
        ("nesterov", Name::Nesterov),
        ("adam", Name::Adam),
        ("adamw", Name::AdamW),
        ("lars", Name::Lars),
        ("lamb", Name::Lamb),
    ];
}

impl Optimizer {
    /// `optimizer.name` as written.
    pub fn name(&self) -> &'static str {
        match self.rule {
            Rule::Sgd => "sgd",
            Rule::Momentum { .. } => "momentum",
            Rule::Nesterov { .. } => "nesterov",
            Rule::Adam { .. } => "adam",
            Rule::AdamW { .. } => "adamw",
            Rule::Lars { .. } => "lars",
            Rule::Lamb { .. } => "lamb",
        }
    }

    /// Whether a layer's own norms scale its steps, and biases and norm parameters are left out of that.
    pub fn excludes_from_trust(&self) -> bool {
        match self.rule {
            Rule::Lars { exclude_from_trust, .. } | Rule::Lamb { exclude_from_trust, .. } => {
                exclude_from_trust
            }
            _ => false,
        }
    }

    /// f32 numbers kept for each parameter: velocity, or mean and mean square.
    pub fn moments(&self) -> u64 {
        match self.rule {
            Rule::Sgd => 0,
            Rule::Momentum { .. } | Rule::Nesterov { .. } | Rule::Lars { .. } => 1,
            Rule::Adam { .. } | Rule::AdamW { .. } | Rule::Lamb { .. } => 2,
        }
    }

    /// The learning rate where none is written.
    pub fn usual_rate(&self) -> f64 {
        match self.rule {
            Rule::Sgd => 0.1,
            Rule::Momentum { .. } | Rule::Nesterov { .. } => 0.05,
            Rule::Adam { .. } | Rule::AdamW { .. } => 0.001,
            Rule::Lars { .. } => 1.0,
            Rule::Lamb { .. } => 0.002,
        }
    }

    pub(super) fn read(section: &mut Section) -> Result<Optimizer, Error> {
        let name = section.choice("name", Name::AdamW)?;
        let rule = match name {
            Name::Sgd => Rule::Sgd,
            Name::Momentum => Rule::Momentum { momentum: memory(section, "momentum", 0.9)? },
            Name::Nesterov => Rule::Nesterov { momentum: memory(section, "momentum", 0.9)? },
            Name::Lars => Rule::Lars {
                momentum: memory(section, "momentum", 0.9)?,
                trust: section.number("trust", 0.001, "a number above 0", |x| x > 0.0)?,
                rate_in_velocity: section.boolean("rate_in_velocity", true)?,
                exclude_from_trust: section.boolean("exclude_from_trust", true)?,
            },
            Name::Adam | Name::AdamW | Name::Lamb => {
                let beta1 = memory(section, "beta1", 0.9)?;
                let beta2 = memory(section, "beta2", 0.999)?;
                let usual = if name == Name::Lamb { 1e-6 } else { 1e-8 };
                let eps = section.number("eps", usual, "a number above 0", |x| x > 0.0)?;
                match name {
                    Name::Adam => Rule::Adam { beta1, beta2, eps },
                    Name::AdamW => Rule::AdamW { beta1, beta2, eps },
                    _ => Rule::Lamb {
                        beta1,
                        beta2,
                        eps,
                        max_weight_norm: section.number(
                            "max_weight_norm",
                            0.0,
                            "a number of at least 0 (0: no limit)",
                            |x| x >= 0.0,
                        )?,
                        exclude_from_trust: section.boolean("exclude_from_trust", true)?,
                    },
                }
            }
        };
        let usual = if name == Name::AdamW { 0.01 } else { 0.0 };
        let weight_decay = section.number("weight_decay", usual, "a number of at least 0", |x| x >= 0.0)?;
        let exclude_from_decay = section.boolean("exclude_from_decay", true)?;
        let master = section.choice("master", Master::F32)?;
        let optimizer = Optimizer { rule, weight_decay, exclude_from_decay, master };
        section.finish_variant("name", optimizer.name(), fields::OPTIMIZER)?;
        if weight_decay == 0.0 && !exclude_from_decay {
            let why = "with `optimizer.weight_decay` = 0".into();
            return Err(Error::NoEffect { field: section.field("exclude_from_decay"), why });
        }
        Ok(optimizer)
    }
}

/// The share that a running mean keeps of itself.
fn memory(section: &mut Section, key: &'static str, default: f64) -> Result<f64, Error> {
    section.number(key, default, "a number in [0, 1)", |x| (0.0..1.0).contains(&x))
}

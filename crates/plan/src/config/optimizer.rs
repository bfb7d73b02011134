//! `[optimizer]`: the rule that turns a gradient into a step. The name decides which other fields there are.
//!
//! Defaults are those published with each method: beta2 = 0.999 for all of the Adam family (Kingma & Ba; language
//! models often use 0.95, which forgets a bad batch sooner), eps = 1e-8, or 1e-6 for LAMB; trust = 0.001 for LARS.

use super::Error;
use super::fields;
use super::reader::{Choice, Section};
use crate::optimizer::{Master, Optimizer, Rule};

impl Choice for Master {
    const ALL: &'static [(&'static str, Self)] = &[("f32", Master::F32), ("low-bits", Master::LowBits)];
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

//! `[prune]`: which weights go, when, and what is kept of their state. Without the section nothing is pruned.
//!
//! Defaults are those of each method's paper, where it names one: SNIP and GraSP score a batch before the first step;
//! Early-Bird compares the last five masks at a tolerance of 0.1; a lottery round removes a fifth; SET and RigL move 0.3 of
//! the kept weights at first, every 100 steps, until three quarters of the run.
//!
//! Magnitudes are compared within a layer, as Zhu & Gupta do: layers differ in the scale that they are initialised with (a
//! GPT's output projections are smaller by the root of twice its depth), which says nothing of what they are worth, and
//! one threshold for all would empty the smaller ones. A lottery, which has trained the weights to the end, has one for all,
//! as published for deep networks.

use serde::Serialize;

use super::reader::{Choice, LARGEST, MOST, Section};
use super::{DeviceKind, Error, Precision, RunFile, fields};
use crate::pruning::{Distribution, FlowScore, Kernels, Method, Moving, Scope, TicketForm};

/// How far apart masks of weights may be for Early-Bird: four fifths of what is kept must have stayed the same over the whole
/// window. Random masks at 90 % are 0.9 apart. At 0.5, which there is the published 0.1 of all places, a GPT-2 124M drew its
/// ticket after a sixth of its run and ended at twice the perplexity (LOG.md).
const WEIGHTS_TOLERANCE: f64 = 0.2;

/// `[prune]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prune {
    /// Which, with its own fields.
    #[serde(flatten)]
    pub method: Method,
    /// The share of the candidates that goes.
    pub sparsity: f64,
    /// Whether tables of tokens and positions are candidates.
    pub embeddings: bool,
    /// Whether biases are candidates beside weights.
    pub biases: bool,
    /// Parameters whose names contain one of these are not candidates.
    pub exclude: Vec<String>,
    /// Whether gradients and optimizer state hold kept weights alone.
    pub state: StateForm,
    /// How linear layers multiply with pruned weights.
    pub kernels: Kernels,
}

impl Choice for Distribution {
    const ALL: &'static [(&'static str, Self)] =
        &[("uniform", Distribution::Uniform), ("erdos-renyi-kernel", Distribution::ErdosRenyiKernel)];
}

impl Choice for Scope {
    const ALL: &'static [(&'static str, Self)] =
        &[("global", Scope::Global), ("layer", Scope::Layer), ("row", Scope::Row)];
}

impl Choice for TicketForm {
    const ALL: &'static [(&'static str, Self)] =
        &[("weights", TicketForm::Weights), ("channels", TicketForm::Channels)];
}

impl Choice for FlowScore {
    const ALL: &'static [(&'static str, Self)] =
        &[("signed", FlowScore::Signed), ("magnitude", FlowScore::Magnitude)];
}

/// What gradients and optimizer state are kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StateForm {
    /// Kept weights alone where that is smaller.
    Auto,
    /// Gradients and state are those of kept weights alone.
    Compressed,
    /// Gradients and state are of all weights, zeros where they are pruned.
    Dense,
}

impl Choice for StateForm {
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", StateForm::Auto), ("compressed", StateForm::Compressed), ("dense", StateForm::Dense)];
}

impl Choice for Kernels {
    const ALL: &'static [(&'static str, Self)] = &[("dense", Kernels::Dense), ("sparse", Kernels::Sparse)];
}

/// `prune.method` alone.
#[derive(Clone, Copy, PartialEq)]
enum Name {
    Random,
    Magnitude,
    Gradual,
    Snip,
    Grasp,
    EarlyBird,
    Lottery,
    Set,
    Rigl,
    TwoOfFour,
}

impl Choice for Name {
    const ALL: &'static [(&'static str, Self)] = &[
        ("random", Name::Random),
        ("magnitude", Name::Magnitude),
        ("gradual", Name::Gradual),
        ("snip", Name::Snip),
        ("grasp", Name::Grasp),
        ("early-bird", Name::EarlyBird),
        ("lottery", Name::Lottery),
        ("set", Name::Set),
        ("rigl", Name::Rigl),
        ("2:4", Name::TwoOfFour),
    ];
}

impl Prune {
    /// Sparse products are f32's on a processor, and make gradients of kept weights alone.
    pub(super) fn check_kernels(&self, run: &RunFile) -> Result<(), Error> {
        if self.kernels == Kernels::Dense {
            return Ok(());
        }
        let field = String::from("prune.kernels");
        if run.train.precision != Precision::F32 {
            let why = "with `train.precision` = \"bf16\": dense products are faster there".into();
            return Err(Error::NoEffect { field, why });
        }
        if run.device.kind == DeviceKind::Cuda {
            let why = "with `device.kind` = \"cuda\": dense products are faster there".into();
            return Err(Error::NoEffect { field, why });
        }
        if !run.storage().compressed {
            let problem = "is \"sparse\", which makes gradients of kept weights alone, but `prune.state` holds those of all";
            return Err(Error::Conflict { field, problem: problem.into() });
        }
        Ok(())
    }

    /// Whether state is compressed, when optimizer state and gradient take `beside` bytes a weight.
    pub fn compresses(&self, beside: u64) -> bool {
        match self.state {
            StateForm::Compressed => true,
            StateForm::Dense => false,
            // A mask costs at most 1/8 + 1/128 byte a weight.
            StateForm::Auto => self.sparsity * beside as f64 > 0.125 + 0.0078125,
        }
    }

    pub(super) fn read(section: &mut Section) -> Result<Option<Prune>, Error> {
        if section.is_empty() {
            return Ok(None);
        }
        if !section.has("method") {
            let expected = "\"magnitude\", \"snip\", \"early-bird\" or another method".into();
            return Err(Error::Missing { field: section.field("method"), expected });
        }
        let name = section.choice("method", Name::Magnitude)?;
        let at = |section: &mut Section| section.whole("at", 0, 0, MOST);
        let scope = |section: &mut Section| section.choice("scope", Scope::Layer);
        let moving = |section: &mut Section| -> Result<Moving, Error> {
            Ok(Moving {
                every: section.whole("every", 100, 1, MOST)?,
                fraction: section.number("fraction", 0.3, "a number in (0, 1)", |x| x > 0.0 && x < 1.0)?,
                until: section
                    .number("until", 0.75, "a share of the run, in (0, 1]", |x| x > 0.0 && x <= 1.0)?,
                distribution: section.choice("distribution", Distribution::Uniform)?,
                dense_first: section.boolean("dense_first", false)?,
            })
        };
        let method = match name {
            Name::Random => Method::Random { scope: scope(section)?, at: at(section)? },
            Name::Magnitude => Method::Magnitude { scope: scope(section)?, at: at(section)? },
            Name::Gradual => Method::Gradual {
                scope: scope(section)?,
                initial: share(section, "initial", 0.0)?,
                start: section.whole("start", 0, 0, MOST)?,
                end: section.whole("end", 0, 0, MOST)?,
                every: section.whole("every", 10, 1, MOST)?,
            },
            Name::Snip => Method::Snip {
                samples: section.whole("samples", 128, 0, MOST)?,
                score_batch: section.whole("score_batch", 0, 0, LARGEST)?,
            },
            Name::Grasp => Method::Grasp {
                samples: section.whole("samples", 0, 0, MOST)?,
                score_batch: section.whole("score_batch", 0, 0, LARGEST)?,
                temperature: section.number("temperature", 200.0, "a number above 0", |x| x > 0.0)?,
                score: section.choice("score", FlowScore::Signed)?,
            },
            Name::EarlyBird => {
                let form = section.choice("form", TicketForm::Weights)?;
                let usual = if form == TicketForm::Channels { 1e-4 } else { 0.0 };
                let tolerance = if form == TicketForm::Channels { 0.1 } else { WEIGHTS_TOLERANCE };
                let l1 = section.number("l1", usual, "a number of at least 0", |x| x >= 0.0)?;
                if form == TicketForm::Weights && l1 != 0.0 {
                    let why = "with `prune.form` = \"weights\": it pulls at batch-norm scales".into();
                    return Err(Error::NoEffect { field: section.field("l1"), why });
                }
                let usual = if form == TicketForm::Channels { Scope::Global } else { Scope::Layer };
                let scope = section.choice("scope", usual)?;
                if form == TicketForm::Channels && scope != Scope::Global {
                    let why = "with `prune.form` = \"channels\", which have one threshold for all".into();
                    return Err(Error::NoEffect { field: section.field("scope"), why });
                }
                Method::EarlyBird {
                    form,
                    scope,
                    every: section.whole("every", 0, 0, MOST)?,
                    window: section.whole("window", 5, 2, 100)?,
                    tolerance: section
                        .number("tolerance", tolerance, "a number in (0, 1)", |x| x > 0.0 && x < 1.0)?,
                    l1,
                    latest: section.whole("latest", 0, 0, MOST)?,
                }
            }
            Name::Lottery => Method::Lottery {
                rate: section.number("rate", 0.2, "a number in (0, 1)", |x| x > 0.0 && x < 1.0)?,
                rewind: section.whole("rewind", 0, 0, MOST)?,
            },
            Name::Set => Method::Set(moving(section)?),
            Name::Rigl => Method::Rigl(moving(section)?),
            Name::TwoOfFour => Method::TwoOfFour { at: at(section)? },
        };
        let sparsity = share(section, "sparsity", if name == Name::TwoOfFour { 0.5 } else { 0.9 })?;
        if name == Name::TwoOfFour && sparsity != 0.5 {
            let why = "with `prune.method` = \"2:4\", which is 0.5 by definition".into();
            return Err(Error::NoEffect { field: section.field("sparsity"), why });
        }
        let prune = Prune {
            method,
            sparsity,
            embeddings: section.boolean("embeddings", false)?,
            biases: section.boolean("biases", false)?,
            exclude: section
                .texts("exclude", "a part of a parameter's name, or a list of them")?
                .into_iter()
                .map(String::from)
                .collect(),
            state: section.choice("state", StateForm::Auto)?,
            kernels: section.choice("kernels", Kernels::Dense)?,
        };
        section.finish_variant("method", prune.method.name(), fields::PRUNE)?;
        if prune.biases {
            let of = match prune.method {
                Method::TwoOfFour { .. } => Some("rows of weights, which biases are not"),
                Method::EarlyBird { form: TicketForm::Channels, .. } => {
                    Some("channels, which take their biases with them")
                }
                _ => None,
            };
            if let Some(of) = of {
                let problem =
                    format!("is true, but `prune.method` = \"{}\" prunes {of}", prune.method.name());
                return Err(Error::Conflict { field: section.field("biases"), problem });
            }
        }
        if let Method::Gradual { initial, start, end, .. } = prune.method {
            if initial > prune.sparsity {
                let problem = format!("is {initial}, above `prune.sparsity` = {}", prune.sparsity);
                return Err(Error::Conflict { field: section.field("initial"), problem });
            }
            if end > 0 && end <= start {
                let problem = format!("is {end}, which is not after `prune.start` = {start}");
                return Err(Error::Conflict { field: section.field("end"), problem });
            }
        }
        Ok(Some(prune))
    }
}

/// A share of weights that goes.
fn share(section: &mut Section, key: &'static str, default: f64) -> Result<f64, Error> {
    section.number(key, default, "a number in [0, 1): the share of weights that goes", |x| {
        (0.0..1.0).contains(&x)
    })
}

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

use super::reader::{Choice, MOST, Section};
use super::{DeviceKind, Error, Precision, RunFile, fields};
use crate::spec::{Parameter, ScaledChannels};

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
    /// Parameters whose names contain one of these are not candidates.
    pub exclude: Vec<String>,
    /// Whether gradients and optimizer state hold kept weights alone.
    pub state: StateForm,
    /// How linear layers multiply with pruned weights.
    pub kernels: Kernels,
}

/// The fields of each method. `at` is the number of steps taken before it prunes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "method", rename_all = "kebab-case")]
pub enum Method {
    /// Any, all alike.
    Random {
        /// Over what the threshold is.
        scope: Scope,
        /// When.
        at: usize,
    },
    /// The smallest go.
    Magnitude {
        /// Over what the threshold is.
        scope: Scope,
        /// When.
        at: usize,
    },
    /// Zhu & Gupta 2017: the smallest go, a few at a time, on a cubic schedule.
    Gradual {
        /// Over what the threshold is.
        scope: Scope,
        /// The sparsity at `start`.
        initial: f64,
        /// The first step that prunes.
        start: usize,
        /// The step at which the sparsity is reached; 0: three quarters of the run.
        end: usize,
        /// Steps between.
        every: usize,
    },
    /// Lee, Ajanthan & Torr 2019: those that change the loss least, at the start.
    Snip {
        /// Training samples scored.
        samples: usize,
    },
    /// Wang, Zhang & Grosse 2020: those that the flow of gradients needs least, at the start.
    Grasp {
        /// Training samples scored; 0: ten of each class.
        samples: usize,
        /// The logits are divided by this.
        temperature: f64,
        /// What of the scores counts.
        score: FlowScore,
    },
    /// You et al. 2020: the smallest, as soon as it is settled which these are.
    EarlyBird {
        /// What is drawn.
        form: TicketForm,
        /// Over what the threshold is; channels have one for all.
        scope: Scope,
        /// Steps between draws; 0: an epoch.
        every: usize,
        /// How many masks must agree.
        window: usize,
        /// How far apart they may be: of weights, differing places over twice the kept ones; of channels, over all.
        tolerance: f64,
        /// The pull of batch-norm scales towards 0 until then; for channels.
        l1: f64,
        /// Prunes after so many steps even if not settled; 0: half of the run.
        latest: usize,
    },
    /// Frankle & Carbin 2019: train, prune a few, rewind, repeat.
    Lottery {
        /// The share of what is left that goes after a round.
        rate: f64,
        /// The weights go back to what they were after so many steps of the first round.
        rewind: usize,
    },
    /// Mocanu et al. 2018: the smallest go, as many grow anywhere.
    Set(Moving),
    /// Evci et al. 2020: the smallest go, as many grow where the gradient is largest.
    Rigl(Moving),
    /// Two of each four neighbours along a row stay: what sparse tensor cores multiply.
    #[serde(rename = "2:4")]
    TwoOfFour {
        /// When.
        at: usize,
    },
}

/// How a sparse network moves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Moving {
    /// Steps between moves.
    pub every: usize,
    /// The share of kept weights that moves at first.
    pub fraction: f64,
    /// The last move is before this share of the run.
    pub until: f64,
    /// How many weights each layer keeps.
    pub distribution: Distribution,
    /// Whether the first candidate keeps all of them.
    pub dense_first: bool,
}

/// How kept weights are distributed over layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// The same share of each.
    Uniform,
    /// Of a weight of extents n_i a share in proportion to `sum n_i / product n_i`, at most all of it: small layers keep
    /// more (Mocanu et al. 2018; with the extents of kernels, Evci et al. 2020).
    ErdosRenyiKernel,
}

impl Choice for Distribution {
    const ALL: &'static [(&'static str, Self)] =
        &[("uniform", Distribution::Uniform), ("erdos-renyi-kernel", Distribution::ErdosRenyiKernel)];
}

impl Moving {
    /// The share that each candidate keeps, where together they keep so much of all; a first layer that is dense comes on top.
    fn shares(&self, shapes: &[&[usize]], kept: f64) -> Vec<f64> {
        let first = usize::from(self.dense_first).min(shapes.len());
        let mut shares = vec![1.0; shapes.len()];
        shares[first..].copy_from_slice(&match self.distribution {
            Distribution::Uniform => vec![kept; shapes.len() - first],
            Distribution::ErdosRenyiKernel => erdos_renyi_kernel(&shapes[first..], kept),
        });
        shares
    }
}

/// Shares in proportion to `sum n_i / product n_i`. Layers that would keep more than there is keep all, and the others share
/// out what is left, until none is above 1.
fn erdos_renyi_kernel(shapes: &[&[usize]], kept: f64) -> Vec<f64> {
    let elements = |shape: &[usize]| shape.iter().product::<usize>() as f64;
    let raw = |shape: &[usize]| shape.iter().sum::<usize>() as f64 / elements(shape);
    let mut dense = vec![false; shapes.len()];
    loop {
        let of = |wanted: bool| (0..shapes.len()).filter(|i| dense[*i] == wanted).collect::<Vec<usize>>();
        let all: f64 = shapes.iter().map(|shape| elements(shape)).sum();
        let left = kept * all - of(true).iter().map(|i| elements(shapes[*i])).sum::<f64>();
        let weight: f64 = of(false).iter().map(|i| raw(shapes[*i]) * elements(shapes[*i])).sum();
        let factor = if weight > 0.0 { left / weight } else { 0.0 };
        let above: Vec<usize> = of(false).into_iter().filter(|i| factor * raw(shapes[*i]) > 1.0).collect();
        if above.is_empty() {
            let share = |i: usize| if dense[i] { 1.0 } else { factor * raw(shapes[i]) };
            return (0..shapes.len()).map(share).collect();
        }
        above.into_iter().for_each(|i| dense[i] = true);
    }
}

/// Over what a threshold is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All candidates together.
    Global,
    /// Each parameter by itself.
    Layer,
}

impl Choice for Scope {
    const ALL: &'static [(&'static str, Self)] = &[("global", Scope::Global), ("layer", Scope::Layer)];
}

/// What Early-Bird draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TicketForm {
    /// Weights by magnitude, for any network.
    Weights,
    /// Channels by the scale of their batch norm, as in the paper.
    Channels,
}

impl Choice for TicketForm {
    const ALL: &'static [(&'static str, Self)] =
        &[("weights", TicketForm::Weights), ("channels", TicketForm::Channels)];
}

/// What GraSP keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FlowScore {
    /// What the flow of gradients would miss most, as in the paper.
    Signed,
    /// What would change it most, either way (Frankle et al. 2021).
    Magnitude,
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
    /// Kept weights alone.
    Compressed,
    /// All weights.
    Dense,
}

impl Choice for StateForm {
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", StateForm::Auto), ("compressed", StateForm::Compressed), ("dense", StateForm::Dense)];
}

/// How linear layers multiply with pruned weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Zeros and all: with the very bits of a dense network under a mask, on every device.
    Dense,
    /// Kept weights alone, where so few are kept that this is faster: in f32 on a processor.
    Sparse,
}

impl Kernels {
    /// The largest share of kept weights at which sparse products are used.
    pub const MOST_KEPT: f64 = 0.4;
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
    /// `prune.method` as written.
    pub fn name(&self) -> &'static str {
        let name = match self.method {
            Method::Random { .. } => Name::Random,
            Method::Magnitude { .. } => Name::Magnitude,
            Method::Gradual { .. } => Name::Gradual,
            Method::Snip { .. } => Name::Snip,
            Method::Grasp { .. } => Name::Grasp,
            Method::EarlyBird { .. } => Name::EarlyBird,
            Method::Lottery { .. } => Name::Lottery,
            Method::Set(_) => Name::Set,
            Method::Rigl(_) => Name::Rigl,
            Method::TwoOfFour { .. } => Name::TwoOfFour,
        };
        Name::ALL.iter().find(|(_, one)| *one == name).expect("every method has a name").0
    }

    /// Whether it draws its masks once, at a step of one's choice, and so can prune a checkpoint by itself.
    pub fn prunes_once(&self) -> bool {
        use Method::*;
        matches!(
            self.method,
            Random { .. } | Magnitude { .. } | Snip { .. } | Grasp { .. } | TwoOfFour { .. }
        )
    }

    /// Whether linear layers will skip the zeros of weights that are pruned to the share asked for.
    pub fn multiplies_sparsely(&self) -> bool {
        self.kernels == Kernels::Sparse && 1.0 - self.sparsity <= Kernels::MOST_KEPT
    }

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
        if !run.compresses() {
            let problem = "is \"sparse\", which makes gradients of kept weights alone, but `prune.state` holds those of all";
            return Err(Error::Conflict { field, problem: problem.into() });
        }
        Ok(())
    }

    /// Whether a parameter is a candidate.
    pub fn covers(&self, parameter: &Parameter) -> bool {
        let named = |part: &String| parameter.name.contains(part.as_str());
        parameter.prunable && (self.embeddings || !parameter.embedding) && !self.exclude.iter().any(named)
    }

    /// Whether the channels of a convolution are candidates: its weight decides.
    pub fn covers_channels(&self, channels: &ScaledChannels) -> bool {
        let weight = format!("{}.weight", channels.conv);
        !self.exclude.iter().any(|part| weight.contains(part.as_str()))
    }

    /// Steps taken before a method that draws once does so.
    pub fn at(&self) -> u64 {
        match self.method {
            Method::Random { at, .. } | Method::Magnitude { at, .. } | Method::TwoOfFour { at } => at as u64,
            _ => 0,
        }
    }

    /// Whether it prunes before the first step, so that dense state never exists.
    pub fn at_start(&self) -> bool {
        match self.method {
            Method::Random { at, .. } | Method::Magnitude { at, .. } | Method::TwoOfFour { at } => at == 0,
            Method::Snip { .. } | Method::Grasp { .. } | Method::Set(_) | Method::Rigl(_) => true,
            Method::Gradual { .. } | Method::EarlyBird { .. } | Method::Lottery { .. } => false,
        }
    }

    /// The share of the candidates' weights that goes; none where what is counted are channels.
    pub fn share_of_weights(&self) -> Option<f64> {
        let channels = matches!(self.method, Method::EarlyBird { form: TicketForm::Channels, .. });
        (!channels).then_some(self.sparsity)
    }

    /// Whether each candidate keeps a share that is known before anything is scored.
    pub fn is_by_layer(&self) -> bool {
        match self.method {
            Method::Random { scope, .. }
            | Method::Magnitude { scope, .. }
            | Method::Gradual { scope, .. }
            | Method::EarlyBird { scope, .. } => scope == Scope::Layer,
            Method::Set(_) | Method::Rigl(_) | Method::TwoOfFour { .. } => true,
            Method::Snip { .. } | Method::Grasp { .. } | Method::Lottery { .. } => false,
        }
    }

    /// How many weights of a candidate of so many stay; where one threshold is over all candidates, its even share.
    pub fn kept_of(&self, elements: u64) -> u64 {
        ((1.0 - self.sparsity) * elements as f64).round() as u64
    }

    /// How many weights of each parameter of a model stay, none for those that are no candidates; where one threshold is over
    /// all candidates, their even share.
    pub fn kept_by_parameter(&self, parameters: &[Parameter]) -> Vec<Option<u64>> {
        let covered: Vec<usize> = (0..parameters.len()).filter(|i| self.covers(&parameters[*i])).collect();
        let shapes: Vec<&[usize]> = covered.iter().map(|i| &parameters[*i].shape[..]).collect();
        let shares = match self.method {
            Method::Set(moving) | Method::Rigl(moving) => moving.shares(&shapes, 1.0 - self.sparsity),
            _ => vec![1.0 - self.sparsity; covered.len()],
        };
        let mut kept = vec![None; parameters.len()];
        for (place, share) in covered.into_iter().zip(shares) {
            kept[place] = Some((share * parameters[place].elements() as f64).round() as u64);
        }
        kept
    }

    /// An error where a run of so many steps ends before the method would have pruned anything.
    pub fn check_length(&self, steps: usize) -> Result<(), Error> {
        let (field, first) = match self.method {
            Method::Random { at, .. } | Method::Magnitude { at, .. } | Method::TwoOfFour { at } => {
                ("prune.at", at)
            }
            Method::Gradual { start, .. } => ("prune.start", start),
            _ => return Ok(()),
        };
        if first < steps {
            return Ok(());
        }
        let problem = format!("is {first}, but the run has {steps} steps: nothing would ever be pruned");
        Err(Error::Conflict { field: field.into(), problem })
    }

    /// Whether masks change after the first step too.
    pub fn goes_on(&self) -> bool {
        !self.at_start() || matches!(self.method, Method::Set(_) | Method::Rigl(_))
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
            Name::Snip => Method::Snip { samples: section.whole("samples", 128, 1, MOST)? },
            Name::Grasp => Method::Grasp {
                samples: section.whole("samples", 0, 0, MOST)?,
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
                if form == TicketForm::Channels && scope == Scope::Layer {
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
            exclude: section
                .texts("exclude", "a part of a parameter's name, or a list of them")?
                .into_iter()
                .map(String::from)
                .collect(),
            state: section.choice("state", StateForm::Auto)?,
            kernels: section.choice("kernels", Kernels::Dense)?,
        };
        section.finish_variant("method", prune.name(), fields::PRUNE)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: weights of 4 x 10 and 30 x 40 and a kernel of 8 x 4 x 3 x 3 have 14 / 40, 70 / 1200 and 18 / 288.
    #[test]
    fn small_layers_keep_more_and_none_more_than_all() {
        let shapes: [&[usize]; 3] = [&[4, 10], &[30, 40], &[8, 4, 3, 3]];
        let shares = erdos_renyi_kernel(&shapes, 0.05);
        // 0.05 1528 = 76.4 in proportion 14 : 70 : 18.
        let factor = 76.4 / 102.0;
        for (share, raw) in shares.iter().zip([14.0 / 40.0, 70.0 / 1200.0, 18.0 / 288.0]) {
            assert!((share - factor * raw).abs() < 1e-12, "{shares:?}");
        }
        // 0.3 1528 = 458.4: a factor of 4.49 would give the first 1.57, so it keeps its 40, and 418.4 go to 70 : 18.
        let shares = erdos_renyi_kernel(&shapes, 0.3);
        let factor = 418.4 / 88.0;
        assert_eq!(shares[0], 1.0);
        assert!(
            (shares[1] - factor * 70.0 / 1200.0).abs() < 1e-12
                && (shares[2] - factor * 18.0 / 288.0).abs() < 1e-12
        );
        assert_eq!(erdos_renyi_kernel(&shapes, 1.0), [1.0; 3]);
        let first = Moving {
            every: 1,
            fraction: 0.3,
            until: 1.0,
            distribution: Distribution::Uniform,
            dense_first: true,
        };
        assert_eq!(first.shares(&shapes, 0.1), [1.0, 0.1, 0.1]);
    }
}

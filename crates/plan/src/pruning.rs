//! Which weights go, and when: the methods with what each needs to know, and how much every parameter keeps.

mod distribution;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::intervals::RunLength;
use crate::spec::{Parameter, ScaledChannels};

pub use distribution::{Distribution, DynamicSparsity};

/// What is pruned, how and to what sparsity: `[prune]` of a run file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pruning {
    /// By which rule weights are chosen, with its own fields.
    #[serde(flatten)]
    pub method: PruneMethod,
    /// The fraction of the candidates that goes.
    pub sparsity: f64,
    /// Whether tables of tokens and positions are candidates.
    pub embeddings: bool,
    /// Whether biases are candidates beside weights.
    pub biases: bool,
    /// Parameters whose names contain one of these are not candidates.
    pub exclude: Vec<String>,
    /// Whether gradients and optimizer state are to hold kept weights alone; what came of it is the plan's
    /// storage.
    pub state: StateForm,
    /// In which form pruned weights rest while the block that uses them does not run.
    pub weights: WeightForm,
    /// How linear layers multiply with pruned weights.
    pub kernels: PrunedKernels,
}

/// The fields of each method. `at` is the number of steps taken before it prunes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "kebab-case")]
pub enum PruneMethod {
    /// Each candidate is as likely to go as any other.
    Random {
        /// Over what the threshold is.
        scope: Scope,
        /// Steps taken before it prunes.
        at: usize,
    },
    /// The candidates nearest to zero go.
    Magnitude {
        /// Over what the threshold is.
        scope: Scope,
        /// Steps taken before it prunes.
        at: usize,
    },
    /// Zhu & Gupta 2017: the smallest go, a few at a time, on a cubic schedule.
    Gradual {
        /// Over what the threshold is.
        scope: Scope,
        /// The sparsity at `start`.
        initial: f64,
        /// When it prunes.
        #[serde(flatten)]
        span: PruneSpan,
        /// Steps from one pruning to the next.
        every: usize,
    },
    /// Lee et al. 2026: ADMM on the true loss, which pulls the weights towards a sparse network; it prunes at
    /// the end of its span.
    Elsa {
        /// While it pulls.
        #[serde(flatten)]
        span: PruneSpan,
        /// Steps from one sparse network to the next.
        every: usize,
        /// How strongly it pulls: lambda.
        penalty: f64,
    },
    /// Sun et al. 2024: the smallest products of a weight and the norm of its input go, which samples show on
    /// one pass forward.
    Wanda {
        /// Over what the threshold is.
        scope: Scope,
        /// Training samples whose activations are measured; 0: all.
        samples: usize,
        /// Steps taken before it prunes.
        at: usize,
    },
    /// Lee, Ajanthan & Torr 2019: those that change the loss least, at the start.
    Snip {
        /// Training samples scored; 0: all.
        samples: usize,
        /// How many of them run at a time; 0: a micro-batch.
        score_batch: usize,
    },
    /// Wang, Zhang & Grosse 2020: those that the flow of gradients needs least, at the start.
    Grasp {
        /// Training samples scored; 0: ten of each class.
        samples: usize,
        /// How many of them run at a time; 0: a micro-batch.
        score_batch: usize,
        /// The logits are divided by this.
        temperature: f64,
        /// What of the scores counts.
        score: FlowScore,
    },
    /// You et al. 2020: the smallest, as soon as it is settled which these are.
    EarlyBird {
        /// Whether masks are of weights or of channels.
        form: TicketForm,
        /// Over what the threshold is; channels have one for all.
        scope: Scope,
        /// Steps between draws; 0: an epoch.
        every: usize,
        /// How many masks must agree.
        window: usize,
        /// How far apart they may be: of weights, differing positions over twice the kept ones; of channels,
        /// over all.
        tolerance: f64,
        /// The pull of batch-norm scales towards 0 until then; for channels.
        l1: f64,
        /// Prunes after so many steps even if not settled; 0: half of the run.
        latest: usize,
    },
    /// Frankle & Carbin 2019: train, prune a few, rewind, repeat.
    Lottery {
        /// The fraction of what is left that goes after a round.
        rate: f64,
        /// The weights go back to what they were after so many steps of the first round.
        rewind: usize,
    },
    /// Mocanu et al. 2018: the smallest go, as many grow anywhere.
    Set(DynamicSparsity),
    /// Evci et al. 2020: the smallest go, as many grow where the gradient is largest.
    Rigl(DynamicSparsity),
    /// Two of each four neighbours along a row stay: what sparse tensor cores multiply.
    #[serde(rename = "2:4")]
    TwoOfFour {
        /// Steps taken before it prunes.
        at: usize,
    },
    /// Nothing goes but what has gone: weights that are zero in what the run starts from stay so.
    Keep,
}

/// The steps in which a method prunes bit by bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PruneSpan {
    /// Its first step; none: a third of its end, which is a quarter of the run where that is three.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<usize>,
    /// The step at which the sparsity is reached; 0: three quarters of the run.
    pub end: usize,
}

impl PruneSpan {
    /// The first and the last step in a run of so many.
    pub fn of_run(&self, steps: u64) -> (u64, u64) {
        let first = self.start.map(|start| start as u64);
        let end = match self.end {
            0 => (steps * 3 / 4).max(first.unwrap_or(0) + 1),
            end => end as u64,
        };
        (first.unwrap_or(end / 3), end)
    }
}

/// The sparsity of gradual pruning before a step (Zhu & Gupta 2017):
/// `s_f + (s_i - s_f) (1 - (t - start) / (end - start))^3`.
pub fn cubic(initial: f64, last: f64, step: u64, start: u64, end: u64) -> f64 {
    let left = 1.0 - (step - start) as f64 / (end - start) as f64;
    last + (initial - last) * left.powi(3)
}

/// Over what a threshold is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All candidates together.
    Global,
    /// Each parameter by itself.
    Layer,
    /// The weights of each output of a parameter.
    Row,
}

/// What the masks that Early-Bird compares are drawn of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TicketForm {
    /// Weights by magnitude, for any network.
    Weights,
    /// Channels by the scale of their batch norm, as in the paper.
    Channels,
}

/// Which weights GraSP keeps, by what their loss would do to the flow of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FlowScore {
    /// What the flow of gradients would miss most, as in the paper.
    Signed,
    /// What would change it most, up or down (Frankle et al. 2021).
    Magnitude,
}

/// What gradients and optimizer state are kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateForm {
    /// Kept weights alone where that is smaller.
    Auto,
    /// Gradients and state are those of kept weights alone.
    Compressed,
    /// Gradients and state are of all weights, zeros where they are pruned.
    Dense,
}

/// In which form pruned weights rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightForm {
    /// As kernels read them, zeros where they are pruned.
    Dense,
    /// Kept values alone; those of a block are expanded into scratch memory while it runs.
    Compressed,
}

/// How linear layers multiply with pruned weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrunedKernels {
    /// Zeros and all: with the very bits of a dense network under a mask, on every device.
    Dense,
    /// Kept weights alone, where so few are kept that this is faster: in f32 on a processor.
    Sparse,
}

impl PrunedKernels {
    /// The largest fraction of kept weights at which sparse products are used.
    pub const MOST_KEPT: f64 = 0.4;
}

impl PruneMethod {
    /// `prune.method` as written.
    pub fn name(&self) -> &'static str {
        match self {
            PruneMethod::Random { .. } => "random",
            PruneMethod::Magnitude { .. } => "magnitude",
            PruneMethod::Gradual { .. } => "gradual",
            PruneMethod::Elsa { .. } => "elsa",
            PruneMethod::Wanda { .. } => "wanda",
            PruneMethod::Snip { .. } => "snip",
            PruneMethod::Grasp { .. } => "grasp",
            PruneMethod::EarlyBird { .. } => "early-bird",
            PruneMethod::Lottery { .. } => "lottery",
            PruneMethod::Set(_) => "set",
            PruneMethod::Rigl(_) => "rigl",
            PruneMethod::TwoOfFour { .. } => "2:4",
            PruneMethod::Keep => "keep",
        }
    }

    /// Whether it draws its masks once, at a step of one's choice, and so can prune a checkpoint by itself.
    pub fn prunes_once(&self) -> bool {
        use PruneMethod::*;
        matches!(
            self,
            Random { .. } | Magnitude { .. } | Wanda { .. } | Snip { .. } | Grasp { .. } | TwoOfFour { .. }
        )
    }

    /// Steps taken before a method that draws once does so.
    pub fn at(&self) -> u64 {
        match *self {
            PruneMethod::Random { at, .. }
            | PruneMethod::Magnitude { at, .. }
            | PruneMethod::Wanda { at, .. }
            | PruneMethod::TwoOfFour { at } => at as u64,
            _ => 0,
        }
    }

    /// Whether it prunes before the first step, so that dense state never exists.
    pub fn at_start(&self) -> bool {
        match *self {
            PruneMethod::Random { at, .. }
            | PruneMethod::Magnitude { at, .. }
            | PruneMethod::Wanda { at, .. }
            | PruneMethod::TwoOfFour { at } => at == 0,
            PruneMethod::Snip { .. }
            | PruneMethod::Grasp { .. }
            | PruneMethod::Set(_)
            | PruneMethod::Rigl(_)
            | PruneMethod::Keep => true,
            PruneMethod::Gradual { .. }
            | PruneMethod::Elsa { .. }
            | PruneMethod::EarlyBird { .. }
            | PruneMethod::Lottery { .. } => false,
        }
    }

    /// Whether its masks before the first step follow from the weights' first values, or from chance, with no
    /// pass of the network over them: then a weight need not exist before it is pruned.
    pub fn needs_no_pass(&self) -> bool {
        let passes =
            matches!(self, PruneMethod::Snip { .. } | PruneMethod::Grasp { .. } | PruneMethod::Wanda { .. });
        self.at_start() && !passes
    }

    /// Steps of a run of so many after which all has gone that is to go, at the latest; 0 before the first
    /// one. A lottery's rounds say it themselves.
    pub fn pruned_after(&self, steps: u64) -> u64 {
        match *self {
            PruneMethod::Gradual { span, .. } | PruneMethod::Elsa { span, .. } => span.of_run(steps).1,
            PruneMethod::EarlyBird { latest: 0, .. } => (steps / 2).max(1),
            PruneMethod::EarlyBird { latest, .. } => latest as u64,
            _ => self.at(),
        }
    }

    /// Bytes that it keeps for each candidate on a device while it pulls weights towards a sparse network: both
    /// of ADMM's vectors in one of f32.
    pub(crate) fn pull_bytes(&self) -> u64 {
        if matches!(self, PruneMethod::Elsa { .. }) { 4 } else { 0 }
    }

    /// Whether that may also be earlier.
    pub fn may_prune_earlier(&self) -> bool {
        matches!(self, PruneMethod::EarlyBird { .. })
    }

    /// Samples that run at a time where gradients are scored, in a run whose steps take `micro_batch`.
    pub(crate) fn scored_at_once(&self, micro_batch: usize) -> usize {
        match *self {
            PruneMethod::Snip { score_batch, .. } | PruneMethod::Grasp { score_batch, .. }
                if score_batch > 0 =>
            {
                score_batch
            }
            _ => micro_batch,
        }
    }

    /// Over what its thresholds are, where that can be chosen.
    pub fn scope(&self) -> Option<Scope> {
        match *self {
            PruneMethod::Random { scope, .. }
            | PruneMethod::Magnitude { scope, .. }
            | PruneMethod::Gradual { scope, .. }
            | PruneMethod::Wanda { scope, .. }
            | PruneMethod::EarlyBird { scope, .. } => Some(scope),
            _ => None,
        }
    }

    /// Whether each candidate keeps a fraction that is known before anything is scored.
    pub fn is_by_layer(&self) -> bool {
        match self.scope() {
            Some(scope) => scope != Scope::Global,
            None => {
                use PruneMethod::*;
                matches!(self, Set(_) | Rigl(_) | TwoOfFour { .. } | Elsa { .. })
            }
        }
    }

    /// An error where a run of so many steps ends before the method would have pruned anything.
    pub fn check_length(&self, steps: usize) -> Result<(), Error> {
        let (field, first) = match *self {
            PruneMethod::Random { at, .. }
            | PruneMethod::Magnitude { at, .. }
            | PruneMethod::TwoOfFour { at } => ("prune.at", at),
            PruneMethod::Gradual { span: PruneSpan { start: Some(start), .. }, .. } => ("prune.start", start),
            PruneMethod::Elsa { span: PruneSpan { end, .. }, .. } => ("prune.end", end),
            _ => return Ok(()),
        };
        if first < steps {
            return Ok(());
        }
        let problem = format!("is {first}, but the run has {steps} steps: nothing would ever be pruned");
        Err(Error::conflict(field, problem))
    }

    /// Whether masks change after the first step too.
    pub fn goes_on(&self) -> bool {
        !self.at_start() || matches!(self, PruneMethod::Set(_) | PruneMethod::Rigl(_))
    }
}

impl Pruning {
    /// The same fraction of every weight of two dimensions that is no embedding.
    pub fn evenly(sparsity: f64) -> Pruning {
        Pruning {
            method: PruneMethod::Magnitude { scope: Scope::Layer, at: 0 },
            sparsity,
            embeddings: false,
            biases: false,
            exclude: Vec::new(),
            state: StateForm::Auto,
            weights: WeightForm::Dense,
            kernels: PrunedKernels::Dense,
        }
    }

    /// Whether state is compressed, when optimizer state and gradient take `beside` bytes a weight.
    pub fn compresses(&self, beside: u64) -> bool {
        match self.state {
            StateForm::Compressed => true,
            StateForm::Dense => false,
            StateForm::Auto if self.weights == WeightForm::Compressed => true,
            // A mask costs at most 1/8 + 1/128 byte a weight.
            StateForm::Auto => self.sparsity * beside as f64 > 0.125 + 0.0078125,
        }
    }

    /// The fraction that has gone once some has, in a run of such a length. Where that is not known before the
    /// data is, the least it can be.
    pub(crate) fn first_sparsity(&self, length: RunLength) -> f64 {
        match self.method {
            PruneMethod::Gradual { initial, span, every, .. } if initial == 0.0 => {
                let (start, last) = match length {
                    RunLength::Steps(steps) => span.of_run(steps as u64),
                    RunLength::Epochs(_) if span.end == 0 => return 0.0,
                    RunLength::Epochs(_) => span.of_run(0),
                };
                cubic(initial, self.sparsity, (start + every as u64).min(last), start, last)
            }
            PruneMethod::Gradual { initial, .. } => initial,
            PruneMethod::Lottery { rate, .. } => rate.min(self.sparsity),
            _ => self.sparsity,
        }
    }

    /// Whether linear layers will skip the zeros of weights that are pruned to the sparsity asked for.
    pub(crate) fn multiplies_sparsely(&self) -> bool {
        self.kernels == PrunedKernels::Sparse && 1.0 - self.sparsity <= PrunedKernels::MOST_KEPT
    }

    /// Whether a parameter is a candidate.
    pub fn covers(&self, parameter: &Parameter) -> bool {
        let named = |part: &String| parameter.name.contains(part.as_str());
        let candidate = parameter.prunable || (self.biases && parameter.is_bias());
        candidate && (self.embeddings || !parameter.embedding) && !self.exclude.iter().any(named)
    }

    /// Whether the channels of a convolution are candidates: its weight decides.
    pub fn covers_channels(&self, channels: &ScaledChannels) -> bool {
        let weight = format!("{}.weight", channels.conv);
        !self.exclude.iter().any(|part| weight.contains(part.as_str()))
    }

    /// The fraction of the candidates' weights that goes; none where what is counted are channels.
    pub fn share_of_weights(&self) -> Option<f64> {
        let channels = matches!(self.method, PruneMethod::EarlyBird { form: TicketForm::Channels, .. });
        (!channels).then_some(self.sparsity)
    }

    /// How many weights of a candidate of so many stay; where one threshold is over all candidates, its even
    /// fraction.
    pub fn kept_of(&self, elements: u64) -> u64 {
        ((1.0 - self.sparsity) * elements as f64).round() as u64
    }

    /// How many weights of each parameter of a model stay, none for those that are no candidates; where one
    /// threshold is over all candidates, their even fraction.
    pub fn kept_by_parameter(&self, parameters: &[Parameter]) -> Vec<Option<u64>> {
        let covered: Vec<usize> = (0..parameters.len()).filter(|i| self.covers(&parameters[*i])).collect();
        let shapes: Vec<&[usize]> = covered.iter().map(|i| &parameters[*i].shape[..]).collect();
        let fractions = match self.method {
            PruneMethod::Set(moving) | PruneMethod::Rigl(moving) => {
                moving.fractions(&shapes, 1.0 - self.sparsity)
            }
            _ => vec![1.0 - self.sparsity; covered.len()],
        };
        let mut kept = vec![None; parameters.len()];
        for (id, fraction) in covered.into_iter().zip(fractions) {
            let (rows, each) = match self.method.scope() {
                Some(Scope::Row) => parameters[id].output_rows(),
                _ => (1, parameters[id].elements()),
            };
            kept[id] = Some(rows * (fraction * each as f64).round() as u64);
        }
        kept
    }
}

#[cfg(test)]
mod tests;

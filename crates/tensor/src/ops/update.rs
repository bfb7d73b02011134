//! Optimizer steps: one pass over a weight, its gradient and its state. Any shape; state is f32, or bf16 that is
//! [rounded at random](Rounding).
//!
//! Each reads g (times `gradient_scale`, which is how clipping arrives), updates the exact weight w and,
//! where that is not the weight itself, writes the rounded weight. Formulas are those of PyTorch; LARS (You,
//! Gitman & Ginsburg 2017) and LAMB (You et al. 2020) scale a layer's step by a ratio of norms. A layer may
//! be sharded over several ranks, so its squared norms can also be taken apart, for the caller to add up.
//!
//! Under a [`Mask`] only kept weights are read and written, whether the gradient and the state are dense or
//! compressed: both walk over the same weights in the same order with the same arithmetic, so both give the
//! same bits, norms included.
//!
//! An exact weight that is not the weight itself is a *master*: f32, or the 16 low bits that a bf16 weight
//! lost. For the second to be possible, a tie is rounded away from zero: then the weight and the low bits
//! determine the f32 number.

pub(crate) mod cuda;
mod host;
mod rounding;
mod rule;
#[cfg(test)]
mod tests;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::mask::Mask;
use crate::tensor::Tensor;

pub use host::{join, split};
pub use rounding::{Positions, Rounding};

/// A parameter with all that a step reads and writes.
#[derive(Debug)]
pub struct ParamUpdate<'a> {
    /// The weight that the kernels read: dense, zero where it is not kept; or its kept elements, where all
    /// else is compressed too.
    pub weight: &'a mut Tensor,
    /// Its exact value, which the step updates; none where the weight itself is f32.
    pub master: Option<&'a mut Tensor>,
    /// The gradient, of either float type.
    pub gradient: &'a Tensor,
    /// Velocity, or first and second moment: as many as [`UpdateRule::states`], all f32 or all bf16.
    pub states: Vec<&'a mut Tensor>,
    /// How states in bf16 are rounded; none where they are f32.
    pub rounding: Option<Rounding<'a>>,
    /// Which weights are kept; none where all are. Master, gradient and states are all dense or all compressed.
    pub mask: Option<&'a Mask>,
    /// wd in the formulas.
    pub weight_decay: f32,
    /// Whether a trust ratio applies; biases and norm parameters have none (r = 1).
    pub adapt: bool,
}

impl<'a> ParamUpdate<'a> {
    /// How many numbers of each kind the step goes over.
    fn steps_over(&self) -> usize {
        self.mask.map_or(self.weight.len(), Mask::kept)
    }

    /// Whether the weight is its kept elements; what is all kept is the same either way.
    fn weight_is_compressed(&self) -> bool {
        self.mask.is_some_and(|mask| mask.kept() == self.weight.len())
    }

    /// How states are rounded, and by which mask it is known where kept values stand, if the weight is no
    /// more than these.
    fn placed_rounding(&self) -> Option<Rounding<'a>> {
        let mask = self.mask.filter(|_| self.weight_is_compressed() && self.is_compressed());
        self.rounding.map(|rounding| Rounding { kept_by: rounding.kept_by.or(mask), ..rounding })
    }

    /// Whether gradient and state hold the kept elements alone.
    fn is_compressed(&self) -> bool {
        self.mask.is_some() && self.gradient.len() == self.steps_over()
    }

    /// Panics unless lengths and types fit each other.
    fn check(&self, rule: &UpdateRule) {
        let len = self.mask.map_or(self.weight.len(), Mask::len);
        let stored = if self.is_compressed() { self.steps_over() } else { len };
        let lengths = self.states.iter().map(|state| state.len()).chain(self.master.iter().map(|m| m.len()));
        assert!(
            lengths.chain([self.gradient.len()]).all(|n| n == stored),
            "update: lengths differ from the weight's {len} or what is kept of it"
        );
        assert!(
            self.weight.len() == len || self.weight_is_compressed() && self.is_compressed(),
            "update: a mask for another weight"
        );
        assert_eq!(self.states.len(), rule.states(), "update: states of {rule:?}");
        let types = (self.weight.dtype(), self.master.as_ref().map(|master| master.dtype()));
        assert!(
            matches!(types, (DType::F32, None) | (DType::Bf16, Some(DType::F32 | DType::U16))),
            "update: a weight and a master of {types:?}"
        );
        let expected = if self.rounding.is_some() { DType::Bf16 } else { DType::F32 };
        assert!(
            self.states.iter().all(|state| state.dtype() == expected),
            "update: states that are not {expected:?}"
        );
        if let Some(Rounding { kept_by: Some(mask), first, .. }) = self.rounding {
            assert!(self.mask.is_none(), "update: a mask, and another one that says where kept values stand");
            assert!(first + len <= mask.kept(), "update: {len} values from {first} on of {}", mask.kept());
        }
    }
}

/// What a step does to each weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// w -= lr (g + wd w).
    Sgd,
    /// d = g + wd w; v = momentum v + d; w -= lr v, or lr (d + momentum v) for Nesterov's.
    Momentum {
        /// How much of the velocity stays.
        momentum: f32,
        /// Whether to look ahead.
        nesterov: bool,
    },
    /// m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr m_hat / (sqrt(v_hat) + eps),
    /// where m_hat = m / (1 - b1^step) and v_hat = v / (1 - b2^step).
    Adam {
        beta1: f32,
        beta2: f32,
        /// Added to the root.
        eps: f32,
        /// AdamW: first w *= 1 - lr wd. Otherwise g += wd w.
        decoupled: bool,
    },
    /// v = momentum v + lr r (g + wd w); w -= v, with r = trust |w| / (|g| + wd |w| + eps). Or with the rate
    /// outside: v = momentum v + r (g + wd w); w -= lr v. Both are the same while the rate stays; when it
    /// changes, only the second scales what the velocity has gathered.
    Lars {
        /// How much of the velocity stays.
        momentum: f32,
        /// The trust coefficient, eta in the paper.
        trust: f32,
        /// Added to the denominator of r.
        eps: f32,
        /// Whether the rate is inside the velocity, as published.
        rate_in_velocity: bool,
    },
    /// u = m_hat / (sqrt(v_hat) + eps) + wd w, with Adam's moments; w -= lr r u, with r = min(|w|, max_norm)
    /// / |u|.
    Lamb {
        beta1: f32,
        beta2: f32,
        /// Added to the root.
        eps: f32,
        /// The largest |w| that counts; infinite where all do.
        max_norm: f32,
    },
}

impl UpdateRule {
    /// Numbers that it keeps for each weight.
    pub fn states(&self) -> usize {
        match self {
            UpdateRule::Sgd => 0,
            UpdateRule::Momentum { .. } | UpdateRule::Lars { .. } => 1,
            UpdateRule::Adam { .. } | UpdateRule::Lamb { .. } => 2,
        }
    }

    /// Whether a layer's norms enter the step.
    pub fn adapts(&self) -> bool {
        matches!(self, UpdateRule::Lars { .. } | UpdateRule::Lamb { .. })
    }
}

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepParams {
    pub lr: f32,
    /// A factor on the gradient.
    pub gradient_scale: f32,
    /// The number of this step; the first is 1.
    pub number: u64,
}

/// Squared norms of a layer. A layer in shards adds up those of its shards.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SquaredNorms {
    /// |w|^2.
    pub weight: f64,
    /// For LARS |g|^2, without the gradient's scale; for LAMB |u|^2.
    pub direction: f64,
}

/// Where a step with a trust ratio has its norms from.
#[derive(Debug, Clone, Copy)]
pub enum TrustNorms<'a> {
    /// Each target is a full layer: its norms are taken here and, on a GPU, stay there.
    Measured,
    /// One for each target.
    Given(&'a [SquaredNorms]),
}

/// A step of all targets, which are on one device; a GPU takes them all in one launch.
pub fn step(
    rule: UpdateRule,
    step: StepParams,
    targets: Vec<ParamUpdate<'_>>,
    norms: TrustNorms<'_>,
) -> Result<()> {
    targets.iter().for_each(|target| target.check(&rule));
    if let TrustNorms::Given(norms) = norms {
        assert_eq!(norms.len(), targets.len(), "update: norms and targets");
    }
    match targets.first().map(|target| target.weight.device()) {
        None => Ok(()),
        Some(Device::Cpu(cpu)) => host::step(&cpu, rule, step, targets, norms),
        Some(Device::Cuda(cuda)) => cuda::step(&cuda, rule, step, targets, norms),
    }
}

/// The norms that a rule with a trust ratio takes, of each target, with the state as it is before the step. A GPU
/// is waited for once.
pub fn squared_norms(
    rule: UpdateRule,
    step: StepParams,
    targets: &[ParamUpdate<'_>],
) -> Result<Vec<SquaredNorms>> {
    targets.iter().for_each(|target| target.check(&rule));
    match targets.first().map(|target| target.weight.device()) {
        None => Ok(Vec::new()),
        Some(Device::Cpu(cpu)) => {
            targets.iter().map(|target| host::norms(&cpu, rule, step, target)).collect()
        }
        Some(Device::Cuda(cuda)) => cuda::norms(&cuda, rule, step, targets),
    }
}

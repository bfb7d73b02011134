//! Optimizers: which state each keeps for a parameter, and the step over all of them.
//!
//! In f32 the weight is its own master; in bf16 each parameter has an f32 master (or the 16 bits that the
//! weight lost), and the weight is its rounding. Moments are f32, or bf16 that is rounded at random. Under a
//! mask that compresses, master and moments hold kept weights alone. Ranks may split them (ZeRO): then each
//! has its shard of these vectors.

use espalier_nn::weights::name_key;
use espalier_plan::optimizer::{self, MasterForm, MomentDtype};
use espalier_plan::{ParamPlan, Plan, Shard};
use espalier_tensor::mask::ones;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::update::{ParamUpdate, Positions, Rounding, UpdateRule, split};
use espalier_tensor::{Category, DType, Mask, Tensor, random};

use super::{Param, ParamStore};
use crate::Result;

/// Says in keys of random numbers that they round moments.
const PURPOSE: u64 = 0x6d6f_6d65_6e74_7300;

/// LARS adds this to its denominator; the method's own paper leaves it open.
const LARS_EPS: f32 = 1e-9;

/// The rule of a run's steps; what it remembers of each parameter is with the parameter.
#[derive(Debug, Clone, Copy)]
pub struct Optimizer {
    /// What a step does.
    pub rule: UpdateRule,
    master: MasterForm,
    moments: MomentDtype,
    seed: u64,
    weight_decay: f32,
    /// Whether weight decay applies to biases and norm parameters too,
    decays_all: bool,
    /// and trust ratios do.
    adapts_all: bool,
}

impl Optimizer {
    /// That of a plan.
    pub fn new(plan: &Plan) -> Optimizer {
        let config = &plan.optimization.optimizer;
        Optimizer {
            rule: rule_of(config.rule),
            master: config.master,
            moments: config.moments,
            seed: plan.seed,
            weight_decay: config.weight_decay as f32,
            decays_all: !config.exclude_from_decay,
            adapts_all: !config.excludes_from_trust(),
        }
    }

    /// Fresh state for all parameters that are here, under their masks.
    pub fn make_state(&self, params: &mut ParamStore) -> Result<()> {
        for (_, param) in params.iter_mut() {
            (param.master, param.moments) = (None, Vec::new());
            let (device, dtype) = (param.device(), param.dtype());
            let shape = match param.plan.zero.is_single() {
                true => param.state_shape(),
                false => vec![param.plan.zero.split(param.state_len()).len()],
            };
            let zeros = |dtype| Tensor::zeros(&device, &shape, dtype, Category::Optimizer);
            let moment = match self.moments {
                MomentDtype::F32 => DType::F32,
                MomentDtype::Bf16 => DType::Bf16,
            };
            param.moments = (0..self.rule.states()).map(|_| zeros(moment)).collect::<Result<_, _>>()?;
            param.master = match (dtype, self.master) {
                (DType::F32, _) => None,
                // A fresh weight is a bf16 number: no bit was lost.
                (_, MasterForm::LowBits) => Some(zeros(DType::U16)?),
                (_, MasterForm::F32) if param.plan.zero.is_single() => {
                    Some(cast(&param.values()?, DType::F32, Category::Optimizer)?)
                }
                (_, MasterForm::F32) => Some(cast(&param.local_values()?, DType::F32, Category::Optimizer)?),
            };
        }
        Ok(())
    }

    /// Tensors of state for each parameter, where weights are of this type.
    pub(crate) fn tensors(&self, dtype: DType) -> usize {
        self.rule.states() + usize::from(dtype != DType::F32)
    }

    /// What a step of a parameter reads and writes, where it has a gradient. A rank that steps a shard of it
    /// gives that shard, unless it has no more of the weight anyway.
    pub(crate) fn target<'a>(
        &self,
        param: &'a mut Param,
        weight_shard: Option<&'a mut Tensor>,
    ) -> Option<ParamUpdate<'a>> {
        let kept = param.state_len();
        let compressed = param.compressing_mask().is_some();
        let is_shard = weight_shard.is_some() || param.is_weight_sharded();
        let tensors = param.step_tensors()?;
        let ParamPlan { decays, zero, .. } = *tensors.plan;
        let rounding = (self.moments == MomentDtype::Bf16 && self.rule.states() > 0).then(|| Rounding {
            key: random::key(random::key(self.seed, PURPOSE), name_key(&tensors.plan.name)),
            kept_by: tensors.mask.filter(|_| is_shard && compressed),
            first: if is_shard { zero.split(kept).start } else { 0 },
            positions: positions(&tensors.plan.shard),
        });
        Some(ParamUpdate {
            rounding,
            mask: if is_shard { None } else { tensors.mask },
            weight: weight_shard.unwrap_or(tensors.weight),
            master: tensors.master,
            gradient: tensors.gradient,
            states: tensors.moments.iter_mut().collect(),
            weight_decay: if decays || self.decays_all { self.weight_decay } else { 0.0 },
            adapt: decays || self.adapts_all,
        })
    }
}

/// Where the elements of a shard stand in the full tensor. A shard in more ranges than the kernels know has
/// positions of its own: as good random bits, but other ones than the full tensor has.
fn positions(shard: &Shard) -> Positions {
    let full = shard.full_shape();
    let is_split = |dim: &usize| shard.ranges(*dim)[..] != [0..full[*dim]];
    let split_dims: Vec<usize> = (0..full.len()).filter(is_split).collect();
    let &[dim] = &split_dims[..] else { return Positions::FULL };
    let inner: usize = full[dim + 1..].iter().product();
    let mut end = 0;
    let range = |range: &std::ops::Range<usize>| {
        let shift = range.start - end;
        end += range.len();
        ((end * inner) as u64, (shift * inner) as u64)
    };
    let ranges: Vec<(u64, u64)> = shard.ranges(dim).iter().map(range).collect();
    match ranges.last() {
        Some(last) if ranges.len() <= Positions::MOST_RANGES => Positions {
            row: (end * inner) as u64,
            full_row: (full[dim] * inner) as u64,
            ranges: std::array::from_fn(|i| *ranges.get(i).unwrap_or(last)),
        },
        _ => Positions::FULL,
    }
}

impl ParamStore {
    /// Has fresh masters begin at what `exact` says of a parameter's name and of the shard of it that is
    /// here, where a bf16 run starts from more digits than it has itself; where that is nothing, they stay at
    /// the weight.
    pub(crate) fn start_masters(
        &mut self,
        exact: impl Fn(&str, &Shard) -> Result<Option<Vec<f32>>>,
    ) -> Result<()> {
        for (_, param) in self.iter_mut().filter(|(_, param)| param.master.is_some()) {
            if let Some(exact) = exact(&param.plan.name, &param.plan.shard)? {
                param.start_master(exact)?;
            }
        }
        Ok(())
    }
}

impl Param {
    fn start_master(&mut self, mut exact: Vec<f32>) -> Result<()> {
        let bits = self.mask().map(Mask::read_words).transpose()?;
        if let Some(bits) = &bits {
            let pruned = |index: &usize| bits[index / 32] >> (index % 32) & 1 == 0;
            (0..exact.len()).filter(pruned).for_each(|index| exact[index] = 0.0);
        }
        let low_bits = self.master.as_ref().is_some_and(|master| master.dtype() == DType::U16);
        if low_bits {
            // Low bits say how a number was rounded, and ties are rounded another way than where weights are read.
            let rounded: Vec<u8> = exact.iter().flat_map(|number| split(*number).0.to_le_bytes()).collect();
            self.write(&rounded)?;
        }
        let stored: Vec<f32> = match bits.filter(|_| self.compressing_mask().is_some()) {
            Some(bits) => ones(&bits).map(|index| exact[index]).collect(),
            None => exact,
        };
        let local = &stored[self.plan.zero.split(stored.len())];
        let bytes: Vec<u8> = match low_bits {
            true => local.iter().flat_map(|number| split(*number).1.to_le_bytes()).collect(),
            false => local.iter().flat_map(|number| number.to_le_bytes()).collect(),
        };
        match &mut self.master {
            Some(master) => Ok(master.copy_from_host(&bytes)?),
            None => Ok(()),
        }
    }
}

/// The rule of a run file, in the precision of the kernels.
fn rule_of(rule: optimizer::OptimizerRule) -> UpdateRule {
    let (f, nesterov) = (|x: f64| x as f32, matches!(rule, optimizer::OptimizerRule::Nesterov { .. }));
    match rule {
        optimizer::OptimizerRule::Sgd => UpdateRule::Sgd,
        optimizer::OptimizerRule::Momentum { momentum } | optimizer::OptimizerRule::Nesterov { momentum } => {
            UpdateRule::Momentum { momentum: f(momentum), nesterov }
        }
        optimizer::OptimizerRule::Adam { beta1, beta2, eps } => {
            UpdateRule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: false }
        }
        optimizer::OptimizerRule::AdamW { beta1, beta2, eps } => {
            UpdateRule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: true }
        }
        optimizer::OptimizerRule::Lars { momentum, trust, rate_in_velocity, .. } => {
            UpdateRule::Lars { momentum: f(momentum), trust: f(trust), eps: LARS_EPS, rate_in_velocity }
        }
        optimizer::OptimizerRule::Lamb { beta1, beta2, eps, max_weight_norm, .. } => {
            let max_norm = if max_weight_norm > 0.0 { f(max_weight_norm) } else { f32::INFINITY };
            UpdateRule::Lamb { beta1: f(beta1), beta2: f(beta2), eps: f(eps), max_norm }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, columns, some heads' queries, keys and values, fewer keys than queries, and filters.
    #[test]
    fn positions_are_those_of_the_shard() {
        let linear = || Shard::full(&[6, 24]);
        for shard in [
            linear(),
            linear().narrow(0, &[2..5]),
            linear().narrow(1, &[6..12]),
            linear().narrow(1, &[2..4, 10..12, 18..20]),
            linear().narrow(1, &[4..12, 16..18, 20..22]),
            linear().narrow(1, &[0..4, 16..20]),
            Shard::full(&[4, 3, 3, 6]).narrow(0, &[1..3]),
            Shard::full(&[24]).narrow(0, &[8..16]),
        ] {
            let positions = positions(&shard);
            for at in 0..shard.len() {
                assert_eq!(positions.in_full(at as u64), shard.in_full(at) as u64, "{shard:?}");
            }
        }
        let both = linear().narrow(0, &[2..5]).narrow(1, &[6..12]);
        assert_eq!(positions(&both), Positions::FULL, "two dimensions are more than kernels know");
    }
}

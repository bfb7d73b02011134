//! Optimizers: which state each keeps for a parameter, and the step over all of them.
//!
//! In f32 the weight is its own master; in bf16 each parameter has an f32 master (or the 16 bits that the weight
//! lost), and the weight is its rounding. Under a mask that compresses, master and moments hold kept weights alone.

use espalier_plan::Plan;
use espalier_plan::config::{self, Master};
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::compress::{apply, compress, expand};
use espalier_tensor::ops::update::{self, Norms, Rule, Step, Target};
use espalier_tensor::{Category, DType, Mask, Tensor};

use super::{Gradients, Masks};
use crate::Result;
use crate::weights::{ParameterId, Weights};

/// LARS adds this to its denominator; the method's own paper leaves it open.
const LARS_EPS: f32 = 1e-9;

/// The state of all parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    weight_decay: f32,
    /// None where a parameter is another stage's.
    slots: Vec<Option<Slot>>,
}

/// The state of one parameter.
#[derive(Debug)]
struct Slot {
    name: String,
    master: Option<Tensor>,
    moments: Vec<Tensor>,
    /// Biases and norm parameters may be left out of weight decay,
    decays: bool,
    /// and are always left out of trust ratios.
    adapts: bool,
}

impl Optimizer {
    /// Fresh state for a model's weights.
    pub fn new(plan: &Plan, weights: &Weights, masks: &Masks) -> Result<Optimizer> {
        let config = &plan.run.optimizer;
        let rule = rule_of(config.rule);
        let parameters = plan.model.parameters().into_iter().enumerate();
        let slots = parameters
            .map(|(place, parameter)| (ParameterId(place), parameter))
            .map(|(id, parameter)| {
                if !weights.holds(id) {
                    return Ok(None);
                }
                let (weight, mask) = (weights.get(id), masks.compressing(id));
                let shape = mask.map_or(weight.shape().to_vec(), |mask| vec![mask.kept()]);
                let zeros = |dtype| Tensor::zeros(&weight.device(), &shape, dtype, Category::Optimizer);
                let moments = (0..rule.states()).map(|_| zeros(DType::F32)).collect::<Result<_, _>>()?;
                Ok(Some(Slot {
                    master: match (weight.dtype(), config.master, mask) {
                        (DType::F32, ..) => None,
                        // A fresh weight is a bf16 number: no bit was lost.
                        (_, Master::LowBits, _) => Some(zeros(DType::U16)?),
                        (_, Master::F32, None) => Some(cast(weight, DType::F32, Category::Optimizer)?),
                        (_, Master::F32, Some(mask)) => {
                            let kept = compress(weight, mask, Category::Workspace)?;
                            Some(cast(&kept, DType::F32, Category::Optimizer)?)
                        }
                    },
                    moments,
                    decays: parameter.decays || !config.exclude_from_decay,
                    adapts: parameter.decays,
                    name: parameter.name,
                }))
            })
            .collect::<Result<_>>()?;
        Ok(Optimizer { rule, weight_decay: config.weight_decay as f32, slots })
    }

    /// Takes a step: one pass over all parameters, which on a card is one launch.
    pub fn step(
        &mut self,
        weights: &mut Weights,
        masks: &Masks,
        gradients: &Gradients<'_>,
        step: Step,
    ) -> Result<()> {
        let targets = weights.all_mut().zip(&mut self.slots).filter_map(|((id, weight), slot)| {
            let (weight, slot) = weight.zip(slot.as_mut())?;
            Some(Target {
                weight,
                master: slot.master.as_mut(),
                gradient: gradients.get(id)?,
                states: slot.moments.iter_mut().collect(),
                mask: masks.get(id),
                weight_decay: if slot.decays { self.weight_decay } else { 0.0 },
                adapt: slot.adapts,
            })
        });
        Ok(update::step(self.rule, step, targets.collect(), Norms::Measured)?)
    }

    /// Puts a parameter's state under a mask in the place of an older one: what is no longer kept is let go, and what
    /// comes back starts at zero. One tensor at a time, so that there is never a second copy of the state.
    pub fn remask(
        &mut self,
        id: ParameterId,
        old: Option<&Mask>,
        new: &Mask,
        compressed: bool,
    ) -> Result<()> {
        let slot = self.slots[id.0].as_mut().expect("a parameter of this stage");
        for state in slot.master.iter_mut().chain(&mut slot.moments) {
            if !compressed {
                apply(state, new)?;
                continue;
            }
            let dense = match old {
                Some(old) => expand(state, old, &[old.len()], Category::Workspace)?,
                None => state.clone(),
            };
            *state = compress(&dense, new, Category::Optimizer)?;
        }
        Ok(())
    }

    /// Bytes held for a parameter.
    pub fn bytes(&self, id: ParameterId) -> usize {
        let Some(slot) = &self.slots[id.0] else { return 0 };
        slot.master.iter().chain(&slot.moments).map(Tensor::byte_len).sum()
    }

    /// The tensors of the state with the names that a checkpoint gives them: `master/NAME`, `moment0/NAME`.
    pub fn named(&self) -> impl Iterator<Item = (String, &Tensor)> {
        self.slots.iter().flatten().flat_map(|slot| {
            let master = slot.master.iter().map(|tensor| (format!("master/{}", slot.name), tensor));
            let moment = |(i, tensor)| (format!("moment{i}/{}", slot.name), tensor);
            master.chain(slot.moments.iter().enumerate().map(moment))
        })
    }

    /// The same, to be changed.
    pub fn named_mut(&mut self) -> impl Iterator<Item = (String, &mut Tensor)> {
        self.slots.iter_mut().flatten().flat_map(|slot| {
            let name = &slot.name;
            let master = slot.master.iter_mut().map(move |tensor| (format!("master/{name}"), tensor));
            let moment = move |(i, tensor)| (format!("moment{i}/{name}"), tensor);
            master.chain(slot.moments.iter_mut().enumerate().map(moment))
        })
    }
}

/// The rule of a run file, in the precision of the kernels.
fn rule_of(rule: config::Rule) -> Rule {
    let (f, nesterov) = (|x: f64| x as f32, matches!(rule, config::Rule::Nesterov { .. }));
    match rule {
        config::Rule::Sgd => Rule::Sgd,
        config::Rule::Momentum { momentum } | config::Rule::Nesterov { momentum } => {
            Rule::Momentum { momentum: f(momentum), nesterov }
        }
        config::Rule::Adam { beta1, beta2, eps } => {
            Rule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: false }
        }
        config::Rule::AdamW { beta1, beta2, eps } => {
            Rule::Adam { beta1: f(beta1), beta2: f(beta2), eps: f(eps), decoupled: true }
        }
        config::Rule::Lars { momentum, trust } => {
            Rule::Lars { momentum: f(momentum), trust: f(trust), eps: LARS_EPS }
        }
        config::Rule::Lamb { beta1, beta2, eps } => {
            Rule::Lamb { beta1: f(beta1), beta2: f(beta2), eps: f(eps) }
        }
    }
}

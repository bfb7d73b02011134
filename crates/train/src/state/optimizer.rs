//! Optimizers: which state each keeps for a parameter, and the step over all of them.
//!
//! In f32 the weight is its own master; in bf16 each parameter has an f32 master, and the weight is its rounding.

use espalier_plan::Plan;
use espalier_plan::config::Rule;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::update::{self, Adam, Lamb, Lars, Momentum, Sgd, Target};
use espalier_tensor::{Category, DType, Tensor};

use super::Gradients;
use crate::Result;
use crate::weights::Weights;

/// LARS adds this to its denominator; the method's own paper leaves it open.
const LARS_EPS: f32 = 1e-9;

/// The state of all parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    weight_decay: f32,
    slots: Vec<Slot>,
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
    pub fn new(plan: &Plan, weights: &Weights) -> Result<Optimizer> {
        let config = &plan.run.optimizer;
        let slots = weights
            .ids()
            .zip(plan.model.parameters())
            .map(|(id, parameter)| {
                let weight = weights.get(id);
                let zeros = || {
                    let device = weight.device();
                    Ok(Tensor::zeros(&device, weight.shape(), DType::F32, Category::Optimizer)?)
                };
                Ok(Slot {
                    master: match weight.dtype() {
                        DType::F32 => None,
                        _ => Some(cast(weight, DType::F32, Category::Optimizer)?),
                    },
                    moments: (0..config.moments()).map(|_| zeros()).collect::<Result<_>>()?,
                    decays: parameter.decays || !config.exclude_from_decay,
                    adapts: parameter.decays,
                    name: parameter.name,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Optimizer { rule: config.rule, weight_decay: config.weight_decay as f32, slots })
    }

    /// Takes step number `step` (from 1) at rate `lr`, with the gradients times `gradient_scale`: one pass over all
    /// parameters, which on a card is one launch.
    pub fn step(
        &mut self,
        weights: &mut Weights,
        gradients: &Gradients,
        step: u64,
        lr: f64,
        gradient_scale: f32,
    ) {
        let (lr, weight_decay) = (lr as f32, self.weight_decay);
        let ready = weights.all_mut().zip(&mut self.slots).filter_map(|((id, weight), slot)| {
            let target = Target { weight, master: slot.master.as_mut(), gradient: gradients.get(id)? };
            let decay = if slot.decays { weight_decay } else { 0.0 };
            Some((target, &mut slot.moments[..], decay, slot.adapts))
        });
        match self.rule {
            Rule::Sgd => {
                let all = ready.map(|(target, _, decay, _)| (target, decay)).collect();
                update::sgd_all(all, Sgd { lr, weight_decay, gradient_scale });
            }
            Rule::Momentum { momentum } | Rule::Nesterov { momentum } => {
                let (momentum, nesterov) = (momentum as f32, matches!(self.rule, Rule::Nesterov { .. }));
                let all = ready
                    .map(|(target, moments, decay, _)| {
                        let [v] = exactly(moments);
                        (target, v, decay)
                    })
                    .collect();
                update::momentum_all(all, Momentum { lr, momentum, nesterov, weight_decay, gradient_scale });
            }
            Rule::Adam { beta1, beta2, eps } | Rule::AdamW { beta1, beta2, eps } => {
                let decoupled = matches!(self.rule, Rule::AdamW { .. });
                let (beta1, beta2, eps) = (beta1 as f32, beta2 as f32, eps as f32);
                let all = ready.map(|(target, moments, decay, _)| {
                    let [m, v] = exactly(moments);
                    (target, m, v, decay)
                });
                let rule = Adam { lr, beta1, beta2, eps, weight_decay, decoupled, step, gradient_scale };
                update::adam_all(all.collect(), rule);
            }
            Rule::Lars { momentum, trust } => {
                let (momentum, trust) = (momentum as f32, trust as f32);
                let all = ready.map(|(target, moments, decay, adapt)| {
                    let [v] = exactly(moments);
                    (target, v, decay, adapt)
                });
                let rule =
                    Lars { lr, momentum, trust, eps: LARS_EPS, weight_decay, gradient_scale, adapt: true };
                update::lars_all(all.collect(), rule);
            }
            Rule::Lamb { beta1, beta2, eps } => {
                let (beta1, beta2, eps) = (beta1 as f32, beta2 as f32, eps as f32);
                let all = ready.map(|(target, moments, decay, adapt)| {
                    let [m, v] = exactly(moments);
                    (target, m, v, decay, adapt)
                });
                let rule = Lamb { lr, beta1, beta2, eps, weight_decay, step, gradient_scale, adapt: true };
                update::lamb_all(all.collect(), rule);
            }
        }
    }

    /// The tensors of the state with the names that a checkpoint gives them: `master/NAME`, `moment0/NAME`.
    pub fn named(&self) -> impl Iterator<Item = (String, &Tensor)> {
        self.slots.iter().flat_map(|slot| {
            let master = slot.master.iter().map(|tensor| (format!("master/{}", slot.name), tensor));
            let moment = |(i, tensor)| (format!("moment{i}/{}", slot.name), tensor);
            master.chain(slot.moments.iter().enumerate().map(moment))
        })
    }

    /// The same, to be changed.
    pub fn named_mut(&mut self) -> impl Iterator<Item = (String, &mut Tensor)> {
        self.slots.iter_mut().flat_map(|slot| {
            let name = &slot.name;
            let master = slot.master.iter_mut().map(move |tensor| (format!("master/{name}"), tensor));
            let moment = move |(i, tensor)| (format!("moment{i}/{name}"), tensor);
            master.chain(slot.moments.iter_mut().enumerate().map(moment))
        })
    }
}

/// The moments of a slot, as many as its rule asked for.
fn exactly<const N: usize>(moments: &mut [Tensor]) -> [&mut Tensor; N] {
    let all: Vec<&mut Tensor> = moments.iter_mut().collect();
    all.try_into().expect("a slot has the moments that its rule asked for")
}

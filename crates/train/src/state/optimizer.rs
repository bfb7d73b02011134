//! Optimizers: which state each keeps for a parameter, and the step over all of them.
//!
//! In f32 the weight is its own master; in bf16 each parameter has an f32 master, and the weight is its rounding.

use espalier_plan::Plan;
use espalier_plan::config::Optimizer as Rule;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::update::{self, Adam, Lamb, Lars, Momentum, Sgd, Target};
use espalier_tensor::{Category, DType, Tensor};

use super::Gradients;
use crate::Result;
use crate::weights::Weights;

/// The state of all parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    slots: Vec<Slot>,
}

/// The state of one parameter.
#[derive(Debug)]
struct Slot {
    name: String,
    master: Option<Tensor>,
    moments: Vec<Tensor>,
    /// Weight decay and trust ratios are for matrices: biases and norm parameters are left out where the run says so.
    decays: bool,
}

impl Optimizer {
    /// Fresh state for a model's weights.
    pub fn new(plan: &Plan, weights: &Weights) -> Result<Optimizer> {
        let rule = plan.run.optimizer.clone();
        let moments = moment_names(&rule).len();
        let slots = weights
            .ids()
            .zip(plan.model.parameters())
            .map(|(id, parameter)| {
                let weight = weights.get(id);
                let zeros =
                    || Tensor::zeros(&weight.device(), weight.shape(), DType::F32, Category::Optimizer);
                Ok(Slot {
                    name: parameter.name,
                    master: match weight.dtype() {
                        DType::F32 => None,
                        _ => Some(cast(weight, DType::F32, Category::Optimizer)?),
                    },
                    moments: (0..moments).map(|_| zeros()).collect::<std::result::Result<_, _>>()?,
                    decays: parameter.decays,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Optimizer { rule, slots })
    }
}

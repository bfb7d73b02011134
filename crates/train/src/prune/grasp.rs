//! GraSP (Wang, Zhang & Grosse 2020): before the first step, keep the weights that the flow of gradients needs.
//!
//! With g the gradient of the loss over a class-balanced set, its logits divided by a temperature, and H the Hessian,
//! removing weight w changes `|g|^2` by about `-w (H g)`. Those with the highest such score go: their removal takes
//! least from the flow, or adds to it.
//!
//! H g is a central difference of two gradients along g,
//!
//! ```text
//! H g = (g(w + e g) - g(w - e g)) / 2 e + O(e^2)        e = STEP |w| / |g|
//! ```
//!
//! with norms over all candidates, so that the weights move by the same share whatever the scale of the loss. The error
//! of the difference grows with STEP^2, that of rounding to f32 (2^-24) with 1 / STEP; their sum is smallest near the
//! cube root of 2^-24, 4e-3, and half of that leaves fewer ReLUs on the other side of their kink. In bf16 the
//! difference would drown (2^-9), so the passes run on an f32 copy of the weights, whatever the run's precision. The
//! copy is what moves: the weights themselves are never touched.

use espalier_plan::config::Scope;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::ops::reduce::squared_norm_all;
use espalier_tensor::{Category, DType, Tensor, random};
use rayon::prelude::*;

use super::gradient::{Scored, gradient};
use super::{Decision, Draw, Network, Pruner, select};
use crate::Result;
use crate::data::Split;
use crate::pass::Pass;
use crate::weights::{ParameterId, Weights};

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"grasp   ");
/// How far the weights move, as a share of their norm.
const STEP: f64 = 2e-3;
/// Samples of each class, or of text, where the run file leaves it open.
const USUAL: usize = 10;

/// Pruning that preserves the flow of gradients.
#[derive(Debug)]
pub struct Grasp {
    /// The share that goes.
    pub sparsity: f64,
    /// Training samples scored; 0: ten of each class, or ten of text.
    pub samples: usize,
    /// The logits are divided by this.
    pub temperature: f32,
}

impl Pruner for Grasp {
    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        if network.step != 0 {
            return Ok(Decision::Wait);
        }
        let flow = self.hessian_gradient(network)?;
        let at = |id| network.candidates.iter().position(|other| *other == id).expect("a candidate");
        // The lowest of `-w (H g)` stay, which is the highest of `w (H g)`.
        let keys = |id: ParameterId| {
            let weight = network.weights.get(id).to_f32();
            Ok(weight.par_iter().zip(flow[at(id)].to_f32()).map(|(w, hg)| select::key(w * hg)).collect())
        };
        Ok(Draw::of(network.keep_best(self.sparsity, Scope::Global, keys)?))
    }
}

impl Grasp {
    /// H g for every candidate, in their order.
    pub fn hessian_gradient(&self, network: &Network<'_>) -> Result<Vec<Tensor>> {
        let samples = self.chosen(network);
        let scored = Scored {
            samples: &samples,
            micro_batch: network.plan.micro_batch,
            random: random::key(network.plan.run.seed, PURPOSE),
            temperature: self.temperature,
        };
        let ids = network.candidates;
        let mut copy = network.weights.widened()?;
        let at =
            |weights: &Weights| gradient(Pass { weights, dtype: DType::F32, ..network.pass() }, ids, scored);
        let direction = at(&copy)?;
        let norm = |tensors: Vec<&Tensor>| squared_norm_all(&tensors).sqrt();
        let length = norm(direction.iter().collect());
        let step = STEP * norm(ids.iter().map(|id| copy.get(*id)).collect()) / length;
        if !step.is_normal() {
            // Without weights or without a gradient there is no flow to preserve.
            return direction.iter().map(zeros_like).collect();
        }
        move_by(&mut copy, ids, &direction, step as f32)?;
        let mut difference = at(&copy)?;
        for id in ids {
            *copy.get_mut(*id) = network.weights.widened_one(*id)?;
        }
        move_by(&mut copy, ids, &direction, -step as f32)?;
        for (up, mut down) in difference.iter_mut().zip(at(&copy)?) {
            scale_into(&mut down, -1.0);
            add_into(up, &down);
            scale_into(up, (0.5 / step) as f32);
        }
        Ok(difference)
    }

    /// The samples scored, in the order in which the run will meet them: for images as many of each class (the first
    /// classes have one more where the number does not divide), fewer of those with fewer images.
    pub fn chosen(&self, network: &Network<'_>) -> Vec<(u64, usize)> {
        let dataset = network.parts.dataset;
        let all = dataset.len(Split::Train);
        let Some(classes) = dataset.facts().classes else {
            let count = if self.samples == 0 { USUAL } else { self.samples };
            return network.order.indices(0, count.min(all));
        };
        let share = |class: usize| match self.samples {
            0 => USUAL,
            samples => samples / classes + usize::from(class < samples % classes),
        };
        let mut missing: Vec<usize> = (0..classes).map(share).collect();
        let mut rest: usize = missing.iter().sum();
        let mut chosen = Vec::with_capacity(rest);
        for sample in network.order.indices(0, all) {
            if rest == 0 {
                break;
            }
            let class = dataset.label(Split::Train, sample.1).expect("images have labels") as usize;
            if missing[class] > 0 {
                missing[class] -= 1;
                rest -= 1;
                chosen.push(sample);
            }
        }
        chosen
    }
}

fn move_by(weights: &mut Weights, ids: &[ParameterId], direction: &[Tensor], by: f32) -> Result<()> {
    for (id, direction) in ids.iter().zip(direction) {
        let mut shift = direction.duplicate(Category::Workspace)?;
        scale_into(&mut shift, by);
        add_into(weights.get_mut(*id), &shift);
    }
    Ok(())
}

fn zeros_like(tensor: &Tensor) -> Result<Tensor> {
    Ok(Tensor::zeros(&tensor.device(), tensor.shape(), tensor.dtype(), Category::Workspace)?)
}

//! GraSP (Wang, Zhang & Grosse 2020): before the first step, keep the weights that the flow of gradients needs.
//!
//! With g the gradient of the loss over a class-balanced set, its logits divided by a temperature, and H the
//! Hessian, removing weight w changes `|g|^2` by about `-2 w (H g)`. Those with the highest score `-w (H g)`
//! go: their removal takes least from the flow, or adds to it. Frankle, Dziugaite, Roy & Carbin (2021) found
//! that what adds most to the flow is not what a network can do without, and keep the scores of the largest
//! magnitude instead: both are offered.
//!
//! H g is a difference of gradients ([`Curvature`]).

use espalier_data::DataSplit;
use espalier_nn::weights::ParameterId;
use espalier_plan::pruning::FlowScore;
use espalier_tensor::ops::select::ScoreOrder;
use espalier_tensor::{Tensor, random};

use super::gradient::ScoringSamples;
use super::hessian::Curvature;
use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"grasp   ");
/// Samples of each class, or of text, where the run file leaves it open.
const USUAL: usize = 10;

/// Pruning that preserves the flow of gradients.
#[derive(Debug)]
pub struct Grasp {
    /// The fraction of weights to prune.
    pub sparsity: f64,
    /// Training samples scored; 0: ten of each class, or ten of text.
    pub samples: usize,
    /// The logits are divided by this.
    pub temperature: f32,
    /// What of the scores counts.
    pub score: FlowScore,
}

impl Pruner for Grasp {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == 0
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let samples = self.chosen(network);
        let mut curvature = self.curvature(network, &samples)?;
        let mut direction = None;
        let flow = |ids: &[ParameterId]| {
            let direction = match &direction {
                Some(direction) => direction,
                None => direction.insert(curvature.gradient()?),
            };
            curvature.hessian_product_of(direction, ids)
        };
        // The lowest of `-w (H g)` stay, which is the highest of `w (H g)`; or those furthest from 0.
        let score = match self.score {
            FlowScore::Signed => ScoreOrder::Signed,
            FlowScore::Magnitude => ScoreOrder::Magnitude,
        };
        Ok(NewMasks::of(network.keep_scored(self.sparsity, flow, score)?))
    }
}

impl Grasp {
    /// H g for every candidate, in their order.
    pub fn hessian_gradient(&self, network: &Network<'_>) -> Result<Vec<Tensor>> {
        let samples = self.chosen(network);
        let mut curvature = self.curvature(network, &samples)?;
        let direction = curvature.gradient()?;
        curvature.hessian_product(&direction)
    }

    fn curvature<'a>(&self, network: &'a Network<'a>, samples: &'a [(u64, usize)]) -> Result<Curvature<'a>> {
        let random = random::key(network.context.plan.seed, PURPOSE);
        let scored = ScoringSamples { random, temperature: self.temperature, ..network.scored(samples) };
        Curvature::new(network.params, network.candidates, scored)
    }

    /// The samples scored, in the order in which the run will meet them: for images as many of each class
    /// (the first classes have one more where the number does not divide), fewer of those with fewer images.
    pub fn chosen(&self, network: &Network<'_>) -> Vec<(u64, usize)> {
        let dataset = &network.context.dataset;
        let all = dataset.len(DataSplit::Train);
        let Some(classes) = dataset.facts().classes else {
            let count = if self.samples == 0 { USUAL } else { self.samples };
            return network.context.order.indices(0, count.min(all));
        };
        let count_of = |class: usize| match self.samples {
            0 => USUAL,
            samples => samples / classes + usize::from(class < samples % classes),
        };
        let mut missing: Vec<usize> = (0..classes).map(count_of).collect();
        let mut rest: usize = missing.iter().sum();
        let mut chosen = Vec::with_capacity(rest);
        for sample in network.context.order.indices(0, all) {
            if rest == 0 {
                break;
            }
            let class = dataset.label(DataSplit::Train, sample.1).expect("images have labels") as usize;
            if missing[class] > 0 {
                missing[class] -= 1;
                rest -= 1;
                chosen.push(sample);
            }
        }
        chosen
    }
}

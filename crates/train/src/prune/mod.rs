//! Pruning methods, one file each: scores in, masks out.
//!
//! Before every step the run asks its [`Pruner`] whether it is time. A method reads the [`Network`] (and may change its
//! weights, which only rewinding does) and draws new masks; what these do to weights and state is the trainer's.
//! Everything is chosen on the host from scores of the device, so the same scores give the same masks everywhere.

pub mod gradual;
pub mod magnitude;
pub mod random;
pub mod select;

use std::collections::BTreeMap;
use std::fmt::Debug;

use espalier_plan::Plan;
use espalier_plan::config::{Method, Scope};
use espalier_tensor::mask::ones;

use crate::Result;
use crate::data::Order;
use crate::pass::Pass;
use crate::state::Masks;
use crate::weights::{ParameterId, Weights};
pub use select::Words;

/// A pruning method in the course of a run.
pub trait Pruner: Debug + Send {
    /// Whether it draws masks before the next step, `network.step` steps having been taken. Asked once before each step.
    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Option<Draw>>;

    /// Where step `step` of `steps` stands in the schedule of the learning rate, and how long that is.
    fn position(&self, step: u64, steps: u64) -> (u64, u64) {
        (step, steps)
    }

    /// What it must remember to go on from a checkpoint, by name.
    fn save(&self) -> BTreeMap<String, Vec<u32>> {
        BTreeMap::new()
    }

    /// Goes on from what was saved.
    fn load(&mut self, _saved: BTreeMap<String, Vec<u32>>) {}
}

/// New masks.
#[derive(Debug, Default)]
pub struct Draw {
    /// Bits for each parameter that has a mask from now on.
    pub masks: Vec<(ParameterId, Words)>,
    /// Whether optimizer state starts afresh.
    pub reset_state: bool,
    /// What a person should know about it.
    pub note: String,
}

/// A model as a method sees it.
#[derive(Debug)]
pub struct Network<'a> {
    /// The run.
    pub plan: &'a Plan,
    /// Steps taken.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps of one pass over the training data.
    pub epoch: u64,
    /// What may be pruned.
    pub candidates: &'a [ParameterId],
    /// What is kept now.
    pub masks: &'a Masks,
    /// The weights.
    pub weights: &'a mut Weights,
    /// The model, its data and its device, to take gradients.
    pub parts: Parts<'a>,
    /// The order in which training samples are met.
    pub order: &'a Order,
}

/// What a [`Pass`] needs beside the weights.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// The layers.
    pub model: &'a crate::model::Model,
    /// Where samples come from.
    pub dataset: &'a crate::data::Dataset,
    /// Where it runs.
    pub device: &'a espalier_tensor::Device,
    /// The type that kernels compute in.
    pub dtype: espalier_tensor::DType,
}

impl Network<'_> {
    /// For passes over samples with the weights as they are now.
    pub fn pass(&self) -> Pass<'_> {
        let Parts { model, dataset, device, dtype } = self.parts;
        Pass { model, weights: self.weights, dataset, device, dtype }
    }

    /// Elements of a candidate.
    pub fn len(&self, id: ParameterId) -> usize {
        self.weights.get(id).len()
    }

    /// Elements of all candidates.
    pub fn total(&self) -> usize {
        self.candidates.iter().map(|id| self.len(*id)).sum()
    }

    /// How many weights stay of so many.
    pub fn kept_of(elements: usize, sparsity: f64) -> usize {
        ((1.0 - sparsity) * elements as f64).round() as usize
    }

    /// The masks that keep the best candidates at a sparsity: `keys` gives those of a parameter, in which larger is better.
    pub fn keep_best(
        &self,
        sparsity: f64,
        scope: Scope,
        mut keys: impl FnMut(ParameterId) -> Result<Vec<u32>>,
    ) -> Result<Vec<(ParameterId, Words)>> {
        let ids = self.candidates;
        let words = match scope {
            Scope::Global => {
                let keep = Self::kept_of(self.total(), sparsity);
                select::best_of_all(ids.len(), keep, |i| keys(ids[i]))?
            }
            Scope::Layer => ids
                .iter()
                .map(|id| Ok(select::best(&keys(*id)?, Self::kept_of(self.len(*id), sparsity))))
                .collect::<Result<_>>()?,
        };
        Ok(ids.iter().copied().zip(words).collect())
    }

    /// The magnitudes of a candidate's weights as keys; those that are gone already come last.
    pub fn magnitudes(&self, id: ParameterId) -> Vec<u32> {
        use rayon::prelude::*;
        let mut keys: Vec<u32> =
            self.weights.get(id).to_f32().par_iter().map(|w| select::key(w.abs())).collect();
        if let Some(mask) = self.masks.get(id) {
            let kept = mask.words();
            keys.iter_mut()
                .enumerate()
                .filter(|(i, _)| kept[i / 32] >> (i % 32) & 1 == 0)
                .for_each(|(_, key)| *key = 0);
        }
        keys
    }
}

/// The method of a plan.
pub fn pruner(plan: &Plan) -> Option<Box<dyn Pruner>> {
    let prune = plan.run.prune.as_ref()?;
    let sparsity = prune.sparsity;
    Some(match prune.method {
        Method::Random { scope, at } => Box::new(random::Random { sparsity, scope, at: at as u64 }),
        Method::Magnitude { scope, at } => Box::new(magnitude::Magnitude { sparsity, scope, at: at as u64 }),
        Method::Gradual { scope, initial, start, end, every } => Box::new(gradual::Gradual {
            initial,
            sparsity,
            scope,
            start: start as u64,
            end: end as u64,
            every: every as u64,
        }),
        _ => todo!("the other methods"),
    })
}

/// The share of places in which two masks of one parameter differ counts as `differing / all`.
pub fn differing(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones() as usize).sum()
}

/// How many places a mask keeps.
pub fn count(words: &[u32]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// The places that a mask keeps.
pub fn places(words: &[u32]) -> Vec<usize> {
    ones(words).collect()
}

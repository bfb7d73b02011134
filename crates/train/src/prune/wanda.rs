//! Wanda (Sun et al. 2024): a weight is worth its magnitude times the norm of the input that it is multiplied
//! with.
//!
//! ```text
//! score = |w_ij| |x_j|        x_j: the j-th input of the layer, over all positions of the samples
//! ```
//!
//! Scores are compared within each output, as published. One pass forward measures all layers, with the
//! weights as they are: those of a layer are not those that remain of the layers before it, which the paper
//! prunes one after the other.

use std::collections::HashMap;

use espalier_comm::Reduce;
use espalier_data::DataSplit;
use espalier_nn::layers::InputObserver;
use espalier_nn::weights::ParameterId;
use espalier_plan::pruning::Scope;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add_into, mul};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::ops::select::{ScoreOrder, product_keys};
use espalier_tensor::{Category, DType, Tensor};

use super::{Decision, Network, NewMasks, Pruner, StepClock};
use crate::Result;
use crate::step::PassMicroBatch;

/// Pruning by weights and activations.
#[derive(Debug)]
pub struct Wanda {
    /// The fraction of weights to prune.
    pub sparsity: f64,
    /// What is compared with each other.
    pub scope: Scope,
    /// Training samples measured: the first that the run will meet; 0: all of them.
    pub samples: usize,
    /// After so many steps.
    pub at: u64,
}

impl Pruner for Wanda {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == self.at
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let norms = self.input_norms(network)?;
        let parameters = network.context.plan.model.parameters();
        let keys = |id: ParameterId| {
            let weight = network.params.param(id).dense()?;
            let norms = broadcast(&norms[&id], weight.shape(), parameters[id.0].output_dim);
            let norms =
                Tensor::from_f32(&weight.device(), weight.shape(), DType::F32, &norms, Category::Workspace)?;
            Ok(product_keys(&weight, &norms, ScoreOrder::Magnitude)?)
        };
        Ok(NewMasks::of(network.keep_best(self.sparsity, self.scope, keys)?))
    }
}

impl Wanda {
    /// Of each candidate the norms of its inputs, over the samples of all ranks. The plan has checked that
    /// each is a weight of a linear layer.
    fn input_norms(&self, network: &Network<'_>) -> Result<HashMap<ParameterId, Vec<f32>>> {
        let context = network.context;
        let all = context.dataset.len(DataSplit::Train);
        let count = if self.samples == 0 { all } else { self.samples.min(all) };
        let samples = context.order.indices(0, count);
        let mut squares = InputSquares::default();
        let local = &samples[context.ranks.batch_range(count)];
        let micro_batches = PassMicroBatch::of_replica(context, local, count, context.plan.batch.micro_batch);
        network.no_update_pass().observe(&micro_batches, &mut squares)?;
        let parameters = context.plan.model.parameters();
        let norms = network.candidates.iter().map(|id| {
            let plan = context.param(*id);
            // How many ranks have seen it, and the squares: another copy of this layer was run, or there were
            // fewer samples than ranks.
            let mut totals = match squares.0.remove(id) {
                Some(sum) => [vec![1.0], sum.read_f32()?].concat(),
                None => match plan.shard.shape()[..] {
                    [rows, columns] => vec![0.0; 1 + [columns, rows][parameters[id.0].output_dim]],
                    _ => vec![0.0],
                },
            };
            if let Some(group) = context.groups.of(plan.group) {
                let local = totals.iter().map(|square| f64::from(*square)).collect();
                totals =
                    group.all_reduce::<Vec<f64>>(local, Reduce::Sum)?.iter().map(|sum| *sum as f32).collect();
            }
            assert!(totals[0] > 0.0, "the plan has checked that {} is read by a linear layer", plan.name);
            Ok((*id, totals[1..].iter().map(|square| square.sqrt()).collect()))
        });
        norms.collect()
    }
}

/// Sums of squares of each input of linear layers, in f32.
#[derive(Default)]
struct InputSquares(HashMap<ParameterId, Tensor>);

impl InputObserver for InputSquares {
    fn observe(&mut self, weight: ParameterId, x: &Tensor) -> espalier_nn::Result<()> {
        let x = cast(x, DType::F32, Category::Workspace)?;
        let squares = sum_rows(&mul(&x, &x)?, Category::Scoring)?;
        match self.0.get_mut(&weight) {
            Some(sum) => add_into(sum, &squares)?,
            None => drop(self.0.insert(weight, squares)),
        }
        Ok(())
    }
}

/// A number for each weight, from one for each input.
fn broadcast(inputs: &[f32], shape: &[usize], output_dim: usize) -> Vec<f32> {
    match output_dim {
        0 => (0..shape[0]).flat_map(|_| inputs.iter().copied()).collect(),
        _ => inputs.iter().flat_map(|norm| std::iter::repeat_n(*norm, shape[1])).collect(),
    }
}

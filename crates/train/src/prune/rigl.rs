//! RigL (Evci et al. 2020): the smallest weights of each layer go, as many grow where the gradient is largest.
//!
//! The gradient is that of the step to come: of its full batch, on all ranks. Where a rank has one
//! micro-batch, each layer's is dense for the moment in which its growth is chosen and then let go, so that a
//! dense gradient of the model never exists; one of a tied parameter comes in parts, and is held until the
//! pass is over. Over several micro-batches gradients must be added up: for a quarter of the candidates at a
//! time, in f32, so that a quarter of the dense gradient is held and the batch is passed four times.

use std::collections::{BTreeMap, HashMap};

use espalier_data::DataSplit;
use espalier_nn::layers::{BatchSlice, GradientElements, GradientSink, NormGroup, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::scoring::growth_chunks;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::select::{ScoreOrder, keys};
use espalier_tensor::{Tensor, random};

use super::drop_and_grow::{DropAndGrow, best_free, moving};
use super::gradient::{ScoringSamples, all_reduce_gradient, gradient};
use super::{Decision, MaskBits, Network, Pruner, StepClock};
use crate::Result;
use crate::step::LossConfig;

/// The rigged lottery.
#[derive(Debug)]
pub struct Rigl(pub DropAndGrow);

impl Pruner for Rigl {
    fn should_run(&self, at: StepClock) -> bool {
        self.0.should_run(at)
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        self.0.decide(network, |fraction| {
            let mut growth = growth(network, fraction)?;
            DropAndGrow::update_masks(network, fraction, |id, _| Ok(growth.remove(&id).expect("it moves")))
        })
    }
}

/// The positions that grow in each layer that moves.
fn growth(network: &Network<'_>, fraction: f64) -> Result<HashMap<ParameterId, MaskBits>> {
    let (batch, seed) = (network.context.plan.batch, network.context.plan.seed);
    if batch.micro_batches > 1 {
        return growth_over_micro_batches(network, fraction);
    }
    let each = batch.micro_batch;
    let data = network.context.ranks.data();
    let (all, first) = (each * data.size(), each * data.rank());
    let samples = network.context.order.indices(network.step * batch.samples as u64 + first as u64, each);
    let batch_slice = BatchSlice { first, samples: each, norms: NormGroup::Step };
    let moving = network.candidates.iter().map(|id| Ok((*id, moving(network, *id, fraction)?)));
    let moving = moving.collect::<Result<_>>()?;
    let mut sink = GrowthSink { network, moving, chosen: HashMap::new(), tied_sums: BTreeMap::new() };
    // Dropout drops what it will drop in the step itself.
    let random = random::key(random::key(seed, network.step), 0);
    // The other replicas have the rest of the batch, and its loss is the mean over all of it.
    let step = network.context.order.indices(network.step * batch.samples as u64, all);
    let ignored = network.context.dataset.ignored(DataSplit::Train, &step);
    let loss = LossConfig { random, samples: all, ignored, temperature: 1.0 };
    network.no_update_pass().train(&samples, loss, &batch_slice, &mut Vec::new(), &mut sink)?;
    for (id, sum) in std::mem::take(&mut sink.tied_sums) {
        sink.choose(id, sum)?;
    }
    Ok(sink.chosen)
}

/// The same from gradients that are accumulated over micro-batches.
fn growth_over_micro_batches(network: &Network<'_>, fraction: f64) -> Result<HashMap<ParameterId, MaskBits>> {
    let (batch, seed) = (network.context.plan.batch, network.context.plan.seed);
    let samples = network.context.order.indices(network.step * batch.samples as u64, batch.samples);
    let scored = ScoringSamples {
        random: random::key(random::key(seed, network.step), 0),
        norms: NormGroup::Step,
        ..ScoringSamples::new(&samples, batch.micro_batch, network.context)
    };
    let moves = network.candidates.iter().map(|id| Ok((*id, moving(network, *id, fraction)?)));
    let mut moves: Vec<(ParameterId, usize)> = moves.collect::<Result<_>>()?;
    moves.retain(|(_, count)| *count > 0);
    // By the length of the full tensor: all that hold a shard choose in the same pass.
    let lengths: Vec<u64> = moves.iter().map(|(id, _)| network.full_len(*id) as u64).collect();
    let mut chosen = HashMap::new();
    // Every stage passes as often, whatever it holds.
    for range in growth_chunks(&lengths) {
        let wanted: Vec<ParameterId> = moves[range.clone()].iter().map(|(id, _)| *id).collect();
        let sums = gradient(network.no_update_pass(), &wanted, scored)?;
        for ((id, count), sum) in moves[range].iter().zip(sums) {
            chosen.insert(*id, best_free(network, *id, keys(&sum, ScoreOrder::Magnitude)?, *count)?);
        }
    }
    Ok(chosen)
}

/// A sink that keeps of a gradient where it is largest.
struct GrowthSink<'a> {
    network: &'a Network<'a>,
    /// How many weights of each candidate.
    moving: HashMap<ParameterId, usize>,
    chosen: HashMap<ParameterId, MaskBits>,
    /// Gradients of tied parameters so far: the other use may be yet to come.
    tied_sums: BTreeMap<ParameterId, Tensor>,
}

impl GrowthSink<'_> {
    fn moving(&self, id: ParameterId) -> usize {
        self.moving.get(&id).copied().unwrap_or(0)
    }

    fn choose(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        let gradient = all_reduce_gradient(self.network.context, id, gradient)?;
        let bits = best_free(self.network, id, keys(&gradient, ScoreOrder::Magnitude)?, self.moving(id))?;
        self.chosen.insert(id, bits);
        Ok(())
    }
}

impl GradientSink for GrowthSink<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        if parameters.iter().all(|id| self.moving(*id) == 0) {
            return Ok(());
        }
        for (&id, gradient) in parameters.iter().zip(gradients.make(GradientElements::All)?) {
            if self.moving(id) == 0 {
                continue;
            }
            if !self.network.context.stage.model(0).tied().contains(&id) {
                self.choose(id, gradient)?;
            } else if let Some(sum) = self.tied_sums.get_mut(&id) {
                add_into(sum, &gradient)?;
            } else {
                self.tied_sums.insert(id, gradient);
            }
        }
        Ok(())
    }
}

//! RigL (Evci et al. 2020): the smallest weights of each layer go, as many grow where the gradient is largest.
//!
//! The gradient is that of the step to come: of its whole batch, on all ranks. Where a rank has one micro-batch, each layer's is
//! dense for the moment in which its growth is chosen and then let go, so that a dense gradient of the model never exists;
//! one of a tied parameter comes in parts, and is held until the pass is over. Over several micro-batches gradients must be
//! added up: for a quarter of the candidates at a time, in f32, so that a quarter of the dense gradient is held and the batch is
//! passed four times.

use std::collections::{BTreeMap, HashMap};

use espalier_nn::layers::{BatchSlice, GradientSink, NormGroup, Wanted, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::scoring::growth_parts;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::select::{Score, keys};
use espalier_tensor::{Tensor, random};

use super::gradient::{Scored, gradient, sum_over_ranks};
use super::moving::{Moves, best_free, moving};
use super::{Decision, Moment, Network, Pruner, Words};
use crate::Result;
use crate::step::Loss;

/// The rigged lottery.
#[derive(Debug)]
pub struct Rigl(pub Moves);

impl Pruner for Rigl {
    fn looks(&self, at: Moment) -> bool {
        self.0.looks(at)
    }

    fn before_step(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        if network.step == 0 {
            return Ok(Decision::Prune(self.0.start(network)?));
        }
        let Some(share) = self.0.due(network.step, network.context.steps) else { return Ok(Decision::Wait) };
        let mut growth = growth(network, share)?;
        Moves::draw(network, share, |id, _| Ok(growth.remove(&id).expect("it moves")))
    }
}

/// The places that grow in each layer that moves.
fn growth(network: &Network<'_>, share: f64) -> Result<HashMap<ParameterId, Words>> {
    let (batch, seed) = (network.context.plan.batch, network.context.plan.seed);
    if batch.micro_batches > 1 {
        return growth_of_sums(network, share);
    }
    let each = batch.micro_batch;
    let data = network.context.ranks.data();
    let (all, first) = (each * data.size(), each * data.rank());
    let samples = network.context.order.indices(network.step * batch.samples as u64 + first as u64, each);
    let place = BatchSlice { first, samples: each, norms: NormGroup::Step };
    let moving = network.candidates.iter().map(|id| Ok((*id, moving(network, *id, share)?)));
    let moving = moving.collect::<Result<_>>()?;
    let mut sink = Growth { network, moving, chosen: HashMap::new(), parts: BTreeMap::new() };
    // Dropout drops what it will drop in the step itself.
    let random = random::key(random::key(seed, network.step), 0);
    let loss = Loss { random, samples: all, temperature: 1.0 };
    network.sweep().train(&samples, loss, &place, &mut Vec::new(), &mut sink)?;
    for (id, sum) in std::mem::take(&mut sink.parts) {
        sink.choose(id, sum)?;
    }
    Ok(sink.chosen)
}

/// The same from gradients that are summed over micro-batches.
fn growth_of_sums(network: &Network<'_>, share: f64) -> Result<HashMap<ParameterId, Words>> {
    let (batch, seed) = (network.context.plan.batch, network.context.plan.seed);
    let samples = network.context.order.indices(network.step * batch.samples as u64, batch.samples);
    let scored = Scored {
        random: random::key(random::key(seed, network.step), 0),
        norms: NormGroup::Step,
        ..Scored::new(&samples, batch.micro_batch, network.context)
    };
    let moves = network.candidates.iter().map(|id| Ok((*id, moving(network, *id, share)?)));
    let mut moves: Vec<(ParameterId, usize)> = moves.collect::<Result<_>>()?;
    moves.retain(|(_, count)| *count > 0);
    // By the length of the whole: all that hold a piece choose in the same pass.
    let lengths: Vec<u64> = moves.iter().map(|(id, _)| network.whole_len(*id) as u64).collect();
    let mut chosen = HashMap::new();
    // Every stage passes as often, whatever it holds.
    for part in growth_parts(&lengths) {
        let wanted: Vec<ParameterId> = moves[part.clone()].iter().map(|(id, _)| *id).collect();
        let sums = gradient(network.sweep(), &wanted, scored)?;
        for ((id, count), sum) in moves[part].iter().zip(sums) {
            chosen.insert(*id, best_free(network, *id, keys(&sum, Score::Magnitude)?, *count)?);
        }
    }
    Ok(chosen)
}

/// A sink that keeps of a gradient where it is largest.
struct Growth<'a> {
    network: &'a Network<'a>,
    /// How many weights of each candidate.
    moving: HashMap<ParameterId, usize>,
    chosen: HashMap<ParameterId, Words>,
    /// Gradients of tied parameters so far: the other use may be yet to come.
    parts: BTreeMap<ParameterId, Tensor>,
}

impl Growth<'_> {
    fn moving(&self, id: ParameterId) -> usize {
        self.moving.get(&id).copied().unwrap_or(0)
    }

    fn choose(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        let gradient = sum_over_ranks(self.network.context, id, gradient)?;
        let words = best_free(self.network, id, keys(&gradient, Score::Magnitude)?, self.moving(id))?;
        self.chosen.insert(id, words);
        Ok(())
    }
}

impl GradientSink for Growth<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        if parameters.iter().all(|id| self.moving(*id) == 0) {
            return Ok(());
        }
        for (&id, gradient) in parameters.iter().zip(gradients.make(Wanted::All)?) {
            if self.moving(id) == 0 {
                continue;
            }
            if !self.network.context.stage.model(0).tied().contains(&id) {
                self.choose(id, gradient)?;
            } else if let Some(sum) = self.parts.get_mut(&id) {
                add_into(sum, &gradient)?;
            } else {
                self.parts.insert(id, gradient);
            }
        }
        Ok(())
    }
}

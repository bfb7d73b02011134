//! RigL (Evci et al. 2020): the smallest weights of each layer go, as many grow where the gradient is largest.
//!
//! The gradient is that of the first micro-batch of the step to come, over all ranks. Each layer's is dense for the moment in which
//! its growth is chosen and then let go, so that a dense gradient of the model never exists; one of a tied parameter
//! comes in parts, and is held until the pass is over.

use std::collections::{BTreeMap, HashMap};

use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::{Tensor, random};

use super::moving::{Moves, best_free, moving};
use super::{Decision, Moment, Network, Pruner, Words, select};
use crate::Result;
use crate::layers::{GradientSink, Share, Wanted, WeightGradients};
use crate::parallel::Ranks;
use crate::pass::Loss;
use crate::weights::ParameterId;

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
        let Some(share) = self.0.due(network.step, network.steps) else { return Ok(Decision::Wait) };
        let mut growth = growth(network, share)?;
        Moves::draw(network, share, |id, _| Ok(growth.remove(&id).expect("it moves")))
    }
}

/// The places that grow in each layer that moves.
fn growth(network: &Network<'_>, share: f64) -> Result<HashMap<ParameterId, Words>> {
    let run = &network.plan.run;
    let each = network.plan.micro_batch;
    // What one rank would have as its first micro-batch, shared out.
    let (all, first) = match network.ranks.map(Ranks::data) {
        Some(data) => (each * data.size(), each * data.rank()),
        None => (each, 0),
    };
    let samples = network.order.indices(network.step * run.train.batch as u64 + first as u64, each);
    let place = Share { first, samples: each, norm_group: None };
    let mut sink = Growth { network, share, chosen: HashMap::new(), parts: BTreeMap::new() };
    // Dropout drops what it will drop in the step itself.
    let random = random::key(random::key(run.seed, network.step), 0);
    let loss = Loss { random, samples: all, temperature: 1.0 };
    network.pass().train_share(&samples, loss, &place, &mut Vec::new(), &mut sink)?;
    for (id, sum) in std::mem::take(&mut sink.parts) {
        sink.choose(id, sum)?;
    }
    Ok(sink.chosen)
}

/// A sink that keeps of a gradient where it is largest.
struct Growth<'a> {
    network: &'a Network<'a>,
    share: f64,
    chosen: HashMap<ParameterId, Words>,
    /// Of tied parameters.
    parts: BTreeMap<ParameterId, Tensor>,
}

impl Growth<'_> {
    fn moving(&self, id: ParameterId) -> usize {
        if self.network.candidates.contains(&id) { moving(self.network, id, self.share) } else { 0 }
    }

    fn choose(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        let gradient = match self.network.sharing() {
            Some(sharing) => sharing.sum(id, gradient)?,
            None => gradient,
        };
        let gradient = gradient.read_f32()?;
        let words = best_free(self.network, id, |i| select::key(gradient[i].abs()), self.moving(id))?;
        self.chosen.insert(id, words);
        Ok(())
    }
}

impl GradientSink for Growth<'_> {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        if parameters.iter().all(|id| self.moving(*id) == 0) {
            return Ok(());
        }
        for (&id, gradient) in parameters.iter().zip(gradients(Wanted::All)?) {
            if self.moving(id) == 0 {
                continue;
            }
            if !self.network.parts.stage.model(0).tied().contains(&id) {
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

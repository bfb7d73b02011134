//! The passes of a batch through a whole model and back, on a card: a small network's take longer to launch than to run, so they
//! are recorded ([`Repeated`]). They give the bits that they give one by one.

use espalier_nn::layers::BatchStatistics;
use espalier_nn::weights::{ParameterId, WeightStore};
use espalier_tensor::ops::cross_entropy::Summed;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Device, Tensor};

use crate::Result;
use crate::context::Context;
use crate::repeated::Repeated;
use crate::state::ParamStore;

/// Passes over the same weights, under the same masks.
#[derive(Debug, Default)]
pub(crate) struct WholePasses {
    /// Where they read a batch: what the model sees, and what it should say.
    batch: Option<[Tensor; 2]>,
    passes: Repeated<Passed>,
    /// Where weights and masks lay when they were made.
    places: Vec<u64>,
}

/// What they come to.
#[derive(Debug, Clone)]
pub(crate) struct Passed {
    pub gradients: Vec<(ParameterId, Tensor)>,
    /// The sum of the losses, and their number.
    pub total: (Summed, usize),
    pub statistics: Vec<BatchStatistics>,
}

impl WholePasses {
    /// Whether each step of a rank queues the same work: it is alone on a card that keeps the data, takes a batch at once, and
    /// nothing of it is drawn by chance or measured on the way.
    pub fn suit(context: &Context) -> bool {
        let Context { plan, ranks, stage, device, dataset, .. } = context;
        let mut by_chance = false;
        plan.model.for_each(&mut |layer| by_chance |= layer.properties().is_random);
        matches!(device, Device::Cuda(_))
            && dataset.is_on(device)
            && ranks.is_alone()
            && stage.chunks().len() == 1
            && plan.batch.micro_batches == 1
            && !plan.optimization.noise_scale
            && !by_chance
    }

    /// Whether the last ones were a run of what was recorded.
    pub fn are_recorded(&self) -> bool {
        self.passes.is_recorded()
    }

    /// Takes the batch that the next passes read.
    pub fn take(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let [here_inputs, here_targets] = match &mut self.batch {
            Some(batch) => batch,
            none => {
                let like = |tensor: &Tensor| tensor.empty_like(Category::Transient);
                none.insert([like(inputs)?, like(targets)?])
            }
        };
        rows::put(here_inputs, 0, inputs)?;
        Ok(rows::put(here_targets, 0, targets)?)
    }

    /// Runs them; `pass` makes them of a batch.
    pub fn run(
        &mut self,
        params: &ParamStore,
        mut pass: impl FnMut(Tensor, Tensor) -> Result<Passed>,
    ) -> Result<Passed> {
        let [inputs, targets] = self.batch.as_ref().expect("a batch was taken before");
        if params.ids().any(|id| params.sparse(id).is_some()) {
            // What products without zeros read is made anew at times.
            return pass(inputs.clone(), targets.clone());
        }
        let masks = params.masks().flat_map(|(_, mask)| mask.tensors());
        let tensors = params.iter().filter_map(|(_, param)| param.at_rest()).chain(masks);
        let places = tensors.filter_map(Tensor::cuda_address).collect();
        if self.places != places {
            (self.passes, self.places) = (Repeated::New, places);
        }
        self.passes.run(&inputs.device(), || pass(inputs.clone(), targets.clone()))
    }
}

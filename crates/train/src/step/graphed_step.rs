//! The passes of a batch through an unsharded model and back, on a GPU: a small network's take longer to
//! launch than to run, so they are captured as a CUDA graph ([`Graphed`]). They give the bits that they give
//! one by one.

use espalier_nn::layers::BatchStatistics;
use espalier_nn::weights::{ParameterId, WeightStore};
use espalier_plan::MemoryPlan;
use espalier_tensor::ops::cross_entropy::BatchLoss;
use espalier_tensor::ops::rows;
use espalier_tensor::{Category, Device, Tensor};

use crate::Result;
use crate::context::TrainContext;
use crate::graphed::Graphed;
use crate::state::ParamStore;

/// A graph holds what its passes work on as long as it lives: at most one part in so many of a GPU's memory,
/// since a study has a hundred trials there. Passes that take more take longer than their launches anyway.
const LARGEST_SHARE: usize = 512;

/// Passes over the same weights, under the same masks.
#[derive(Debug, Default)]
pub(crate) struct GraphedStep {
    /// Where they read a batch: what the model sees, and what it should say.
    batch: Option<[Tensor; 2]>,
    passes: Graphed<PassOutput>,
    /// Where weights and masks lay when they were made.
    addresses: Vec<u64>,
}

/// What they come to.
#[derive(Debug, Clone)]
pub(crate) struct PassOutput {
    pub gradients: Vec<(ParameterId, Tensor)>,
    /// The sum of the losses, and their number.
    pub total: (BatchLoss, usize),
    pub statistics: Vec<BatchStatistics>,
}

impl GraphedStep {
    /// Whether each step of a rank queues the same work: it is the only one, on a GPU, takes a batch at once, and
    /// nothing in it is random or depends on the samples.
    pub(crate) fn is_supported(context: &TrainContext) -> bool {
        let TrainContext { plan, ranks, stage, device, dataset, .. } = context;
        let MemoryPlan { gradients, activations, .. } = plan.memory;
        // They hold what lies between two operations too. How much that is shows once they are captured, for
        // which there must be room.
        gradients + activations <= most_bytes(device) as u64
            && plan.model.can_capture(ranks.world().size(), plan.batch.micro_batches)
            && stage.chunks().len() == 1
            && !dataset.ignores_targets()
            && !dataset.has_positions()
    }

    /// Whether the last ones were a replay of the graph.
    pub(crate) fn is_captured(&self) -> bool {
        self.passes.is_captured()
    }

    /// Copies the batch that the next passes read.
    pub fn load_batch(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
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
        mut pass: impl FnMut(Tensor, Tensor) -> Result<PassOutput>,
    ) -> Result<PassOutput> {
        let [inputs, targets] = self.batch.as_ref().expect("a batch was loaded before");
        // What products without zeros read is made anew at times; a profile is of single kernels.
        let is_sparse = params.ids().any(|id| params.sparse(id).is_some());
        if is_sparse || inputs.device().is_profiled() {
            return pass(inputs.clone(), targets.clone());
        }
        let masks = params.masks().flat_map(|(_, mask)| mask.tensors());
        let tensors = params.iter().filter_map(|(_, param)| param.at_rest()).chain(masks);
        let addresses = tensors.filter_map(Tensor::cuda_address).collect();
        if self.addresses != addresses {
            (self.passes, self.addresses) = (Graphed::New, addresses);
        }
        let device = inputs.device();
        self.passes.run(&device, most_bytes(&device), || pass(inputs.clone(), targets.clone()))
    }
}

/// Bytes that a graph may hold; on a processor, which has none, nothing.
fn most_bytes(device: &Device) -> usize {
    match device {
        Device::Cuda(cuda) => cuda.gpu().memory / LARGEST_SHARE,
        Device::Cpu(_) => 0,
    }
}

//! A micro-batch on its way through a chunk: what its forward leaves for its backward.

use espalier_nn::layers::{
    BackwardContext, BatchSlice, BatchStatistics, DeferredGradients, ForwardContext, GradientSink,
    HeadOutput, Mode, Stash,
};
use espalier_nn::model::Model;
use espalier_nn::weights::WeightStore;
use espalier_tensor::ops::cross_entropy::BatchLoss;
use espalier_tensor::{StashedTensor, Tensor};

use super::LossConfig;
use crate::Result;

/// Between the forward of a chunk and the end of its backward.
#[derive(Debug)]
pub(super) struct InFlightMicroBatch {
    stash: Stash,
    batch_slice: BatchSlice,
    random: u64,
    /// Where documents begin, where several lie in a sequence.
    positions: Option<Tensor>,
    /// What the head reads, where the chunk has it, and what it should say.
    read: Option<(StashedTensor, Tensor)>,
    /// What batch norms have measured.
    pub statistics: Vec<BatchStatistics>,
    /// Gradients of weights that are made later.
    pub deferred: Option<DeferredGradients>,
}

/// What a backward makes.
pub(super) struct BackwardOutput {
    /// The gradient of the chunk's input, for the chunk before.
    pub gradient: Option<Tensor>,
    /// The sum of the losses and their number, where the model ends here: on a GPU, yet to be read.
    pub total: Option<(BatchLoss, usize)>,
}

impl InFlightMicroBatch {
    /// Runs a chunk forward in training. What comes second is for the next chunk; `targets` are there where
    /// the model ends, `positions` where several documents lie in a sequence.
    pub fn forward(
        model: &Model,
        weights: &dyn WeightStore,
        inputs: Tensor,
        targets: Option<Tensor>,
        positions: Option<Tensor>,
        batch_slice: BatchSlice,
        random: u64,
    ) -> Result<(InFlightMicroBatch, Option<Tensor>)> {
        let mut pass = ForwardContext::new(weights, Mode::Train, random, batch_slice);
        pass.positions = positions.as_ref();
        let x = model.forward(inputs, &mut pass)?;
        let ForwardContext { stash, statistics, .. } = pass;
        let (read, sent) = match targets.filter(|_| model.is_last()) {
            Some(targets) => (Some((StashedTensor::new(x), targets)), None),
            None => (None, Some(x)),
        };
        let deferred = None;
        Ok((InFlightMicroBatch { stash, batch_slice, random, positions, read, statistics, deferred }, sent))
    }

    /// Runs it backward, from the loss where the model ends and from the gradient of its output elsewhere.
    pub fn backward(
        &mut self,
        model: &Model,
        weights: &dyn WeightStore,
        gradient: Option<Tensor>,
        loss: LossConfig,
        sink: &mut dyn GradientSink,
    ) -> Result<BackwardOutput> {
        let (batch_slice, random, stash) = (self.batch_slice, self.random, &mut self.stash);
        let positions = self.positions.as_ref();
        let mut pass = BackwardContext { weights, random, batch_slice, positions, stash, sink };
        let (gradient, total) = match self.read.take() {
            None => (gradient.expect("the next chunk made it"), None),
            Some((x, targets)) => {
                let scale = loss.scale(targets.len(), batch_slice.samples);
                let HeadOutput { total, gradient } = model.loss(x.take(), &targets, scale, &mut pass)?;
                (gradient, Some((total, targets.len())))
            }
        };
        Ok(BackwardOutput { gradient: model.backward(gradient, &mut pass)?, total })
    }
}

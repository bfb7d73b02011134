//! A batch norm with two all-reduces over ranks: of what it measures in the forward pass, and of what its
//! gradient needs in the backward pass. As with a halo and its convolution, the all-reduces stand before the
//! norm in a rank's model, and are built as one layer with it.

use espalier_comm::{Communicator, Reduce};
use espalier_plan::split::split;
use espalier_tensor::Tensor;
use espalier_tensor::ops::batch_norm::measure;

use super::{BackwardContext, BatchNorm, BatchSlice, ForwardContext, Layer, Mode, NormGroup};
use crate::Result;

/// The norm, and whom it measures with.
#[derive(Debug)]
pub(crate) struct SyncBatchNorm {
    pub norm: BatchNorm,
    /// In the steps of training.
    pub in_step: Option<Communicator>,
    /// Where no step is taken: the ranks with other pixels of the same images, or other samples of
    /// the same micro-batch.
    pub in_sweep: Option<Communicator>,
    /// The same ranks of all replicas, for groups of samples that are split over these.
    pub over_replicas: Option<Communicator>,
    /// Of those that split a micro-batch: how many there are and which this is.
    pub shared: Option<(usize, usize)>,
}

impl SyncBatchNorm {
    fn group(&self, batch_slice: &BatchSlice) -> Option<&Communicator> {
        match batch_slice.norms {
            NormGroup::Replica => self.in_sweep.as_ref(),
            NormGroup::Step => self.in_step.as_ref(),
            NormGroup::AllReplicas { .. } => self.over_replicas.as_ref(),
        }
    }

    /// What it has measured; nothing where it has no samples, but one that stands in.
    fn counted(&self, mut local: Vec<f64>, batch_slice: &BatchSlice) -> Vec<f64> {
        let has_none =
            self.shared.is_some_and(|(ranks, rank)| split(batch_slice.samples, ranks, rank).is_empty());
        if has_none || batch_slice.norms == (NormGroup::AllReplicas { stands_in: true }) {
            local.fill(0.0);
        }
        local
    }
}

impl Layer for SyncBatchNorm {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.group(&ctx.batch_slice) {
            Some(group) if ctx.mode == Mode::Train => {
                let local = self.counted(measure(&x)?, &ctx.batch_slice);
                let totals = group.all_reduce(local, Reduce::Sum)?;
                self.norm.normalise(x, &totals, ctx)
            }
            _ => self.norm.forward(x, ctx),
        }
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, wanted: bool) -> Result<Option<Tensor>> {
        match self.group(&ctx.batch_slice) {
            Some(group) => {
                let batch_slice = ctx.batch_slice;
                let all_reduce =
                    |local| Ok(group.all_reduce(self.counted(local, &batch_slice), Reduce::Sum)?);
                Ok(Some(self.norm.backward_through(dy, all_reduce, ctx)?))
            }
            None => self.norm.backward(dy, ctx, wanted),
        }
    }
}

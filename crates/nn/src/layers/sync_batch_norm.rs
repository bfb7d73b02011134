//! A batch norm as a layer, where need be with two all-reduces over ranks: of what it measures in the forward pass,
//! and of what its gradient needs in the backward pass. As with a halo and its convolution, the all-reduces stand
//! before the norm in a rank's model, and are built as one layer with it.

use espalier_comm::{Communicator, Reduce};
use espalier_plan::split::split;
use espalier_tensor::Tensor;
use espalier_tensor::ops::batch_norm::measure;

use super::{BackwardContext, BatchNorm, BatchSlice, ForwardContext, Layer, Mode, NormGroup, sum};
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

impl SyncBatchNorm {
    /// A norm by itself.
    pub(crate) fn local(norm: BatchNorm) -> SyncBatchNorm {
        SyncBatchNorm { norm, in_step: None, in_sweep: None, over_replicas: None, shared: None }
    }

    /// The output, and `plus` added to it before the norm's ReLU.
    pub(crate) fn forward_with(
        &self,
        x: Tensor,
        plus: Option<Tensor>,
        ctx: &mut ForwardContext<'_>,
    ) -> Result<Tensor> {
        match self.group(&ctx.batch_slice) {
            Some(group) if ctx.mode == Mode::Train => {
                let local = self.counted(measure(&x)?, &ctx.batch_slice);
                let totals = group.all_reduce(local, Reduce::Sum)?;
                self.norm.normalise(x, plus, &totals, ctx)
            }
            _ => self.norm.forward_with(x, plus, ctx),
        }
    }

    /// As [`BatchNorm::backward_with`].
    pub(crate) fn backward_with(
        &self,
        dy: Tensor,
        added: bool,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(group) = self.group(&ctx.batch_slice) else {
            return self.norm.backward_with(dy, added, ctx);
        };
        let batch_slice = ctx.batch_slice;
        let dy = self.norm.before_relu(dy, ctx)?;
        let plus = added.then(|| dy.clone());
        let all_reduce = |local| Ok(group.all_reduce(self.counted(local, &batch_slice), Reduce::Sum)?);
        Ok((self.norm.backward_through(dy, all_reduce, ctx)?, plus))
    }
}

impl Layer for SyncBatchNorm {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        self.forward_with(x, None, ctx)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(self.backward_with(dy, false, ctx)?.0))
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.norm.relu {
            true => sum(self.forward(x, ctx)?, plus),
            false => self.forward_with(x, Some(plus), ctx),
        }
    }
}

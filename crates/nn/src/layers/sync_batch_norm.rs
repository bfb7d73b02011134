//! A batch norm as a layer, where need be with two all-reduces over ranks: of what it measures in the forward
//! pass, and of what its gradient needs in the backward pass. As with a halo and its convolution, the
//! all-reduces stand before the norm in a rank's model, and are built as one layer with it.

use espalier_comm::{Communicator, Reduce};
use espalier_plan::split::split;
use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::batch_norm::{self, measure};
use espalier_tensor::ops::pool::max_backward;

use super::batch_norm::{NormGradients, NormInput};
use super::{
    BackwardContext, BatchNorm, BatchSlice, ForwardContext, GradientParts, Layer, MaxPool, Mode, NormGroup,
    sum,
};
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

    /// A norm by itself.
    pub fn local(norm: BatchNorm) -> SyncBatchNorm {
        SyncBatchNorm { norm, in_step: None, in_sweep: None, over_replicas: None, shared: None }
    }

    /// The output, and `plus` added to it before the norm's ReLU. Leaves what the norm reads and no more.
    pub fn run(&self, x: Tensor, plus: Option<Tensor>, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.group(&ctx.batch_slice) {
            Some(group) if ctx.mode == Mode::Train => {
                let local = self.counted(measure(&x)?, &ctx.batch_slice);
                let totals = group.all_reduce(local, Reduce::Sum)?;
                self.norm.run_by(&totals, x, plus, ctx)
            }
            _ => self.norm.run(x, plus, ctx),
        }
    }

    /// Whether it measures all of x at once and nothing else.
    pub fn measures_alone(&self, x: &Tensor, ctx: &ForwardContext<'_>) -> bool {
        ctx.mode == Mode::Train && self.group(&ctx.batch_slice).is_none() && self.norm.groups(x) == 1
    }

    /// The same; leaves the output too where ReLU made it, as ReLU by itself does: what reads it keeps it anyway.
    pub fn forward_with(
        &self,
        x: Tensor,
        plus: Option<Tensor>,
        ctx: &mut ForwardContext<'_>,
    ) -> Result<Tensor> {
        let y = self.run(x, plus, ctx)?;
        if self.norm.relu {
            ctx.stash.push(y.clone());
        }
        Ok(y)
    }

    /// Takes what the forward pass has left; `dy` has as many samples as that had. What is measured with others is
    /// one group.
    pub fn pop(&self, dy: &Tensor, ctx: &mut BackwardContext<'_>) -> NormInput {
        let groups = self.group(&ctx.batch_slice).map_or_else(|| self.norm.groups(dy), |_| 1);
        self.norm.pop(groups, ctx)
    }

    /// The gradients for that of what ReLU reads, where there is one.
    fn gradients(&self, dy: &Tensor, input: &NormInput, ctx: &BackwardContext<'_>) -> Result<NormGradients> {
        let Some(group) = self.group(&ctx.batch_slice) else {
            return self.norm.gradients(dy, input, ctx.weights);
        };
        let all_reduce = |local| Ok(group.all_reduce(self.counted(local, &ctx.batch_slice), Reduce::Sum)?);
        self.norm.gradients_through(dy, input, all_reduce, ctx.weights)
    }

    /// The statistics, where ReLU's gradient may run in the same pass as the norm's.
    fn fused<'a>(&self, input: &'a NormInput, ctx: &BackwardContext<'_>) -> Option<&'a [Tensor; 2]> {
        input.single().filter(|_| self.group(&ctx.batch_slice).is_none())
    }

    /// From the gradient of the output to that of the input and, where something was `added` before ReLU, to
    /// that of it.
    pub fn backward_with(
        &self,
        dy: GradientParts,
        added: bool,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let y = self.norm.relu.then(|| ctx.stash.pop());
        let input = self.pop(&dy.dy, ctx);
        let (NormGradients { dx, scale, shift }, plus) = match (y, self.fused(&input, ctx)) {
            (Some(y), Some([mean, rstd])) => {
                let weights = [self.norm.scale, self.norm.shift].map(|id| ctx.weights.get(id));
                let statistics = [mean, rstd];
                let (dx, scale, shift, plus) = match added {
                    true => {
                        let GradientParts { dy, plus } = dy;
                        batch_norm::backward_relu_sum(dy, plus, &input.x, &y, weights[0], statistics)
                            .map(|(dx, scale, shift, passed)| (dx, scale, shift, Some(passed)))?
                    }
                    false => batch_norm::backward_relu(dy.join()?, &input.x, &y, weights, statistics)
                        .map(|(dx, scale, shift)| (dx, scale, shift, None))?,
                };
                (NormGradients { dx, scale, shift }, plus)
            }
            (y, _) => {
                let dy = match y {
                    Some(y) => activation::backward(ActivationFn::Relu, &y, dy.join()?)?,
                    None => dy.join()?,
                };
                (self.gradients(&dy, &input, ctx)?, added.then_some(dy))
            }
        };
        self.norm.send_gradients(scale, shift, ctx)?;
        Ok((dx, plus))
    }

    /// The gradients for that of what a pool makes of the output.
    pub fn gradients_pooled(
        &self,
        dy: Tensor,
        places: &Tensor,
        MaxPool { pool, .. }: &MaxPool,
        input: &NormInput,
        ctx: &BackwardContext<'_>,
    ) -> Result<NormGradients> {
        match self.fused(input, ctx) {
            Some([mean, rstd]) => {
                let scale = ctx.weights.get(self.norm.scale);
                let gradients = batch_norm::backward_max(&dy, places, *pool, &input.x, scale, [mean, rstd])?;
                Ok(NormGradients::of(gradients))
            }
            None => self.gradients(&max_backward(&dy, places, *pool, input.x.shape())?, input, ctx),
        }
    }

    /// The gradients for that of what ReLU gives, and that once more.
    pub fn gradients_remaking(
        &self,
        dy: Tensor,
        input: &NormInput,
        ctx: &BackwardContext<'_>,
    ) -> Result<(NormGradients, Tensor)> {
        if let Some([mean, rstd]) = self.fused(input, ctx) {
            let weights = [self.norm.scale, self.norm.shift].map(|id| ctx.weights.get(id));
            let (dx, scale, shift, y) = batch_norm::backward_remaking(dy, &input.x, weights, [mean, rstd])?;
            return Ok((NormGradients { dx, scale, shift }, y));
        }
        let y = self.norm.remake(input, ctx.weights)?;
        let dy = activation::backward(ActivationFn::Relu, &y, dy)?;
        Ok((self.gradients(&dy, input, ctx)?, y))
    }
}

impl Layer for SyncBatchNorm {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        self.forward_with(x, None, ctx)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(self.backward_with(dy.into(), false, ctx)?.0))
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.norm.relu {
            true => sum(self.forward(x, ctx)?, plus),
            false => self.forward_with(x, Some(plus), ctx),
        }
    }
}

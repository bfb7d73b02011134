//! A batch norm, a max pool and the ReLU behind it as one layer, so that the norm's output, the largest
//! tensor of a stem, and its gradient need not be written: on a GPU the pool's kernels do what the norm does.

use espalier_tensor::Tensor;

use super::batch_norm::NormGradients;
use super::{BackwardContext, ForwardContext, Layer, MaxPool, SyncBatchNorm};
use crate::Result;

/// `relu(max_pool(norm(x)))`, or the same without ReLU.
#[derive(Debug)]
pub(crate) struct NormPool {
    /// Without a ReLU.
    pub norm: SyncBatchNorm,
    pub pool: MaxPool,
}

impl Layer for NormPool {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.norm.measures_alone(&x, ctx) {
            true => self.norm.norm.run_pooled(x, &self.pool, ctx),
            false => {
                let y = self.norm.run(x, None, ctx)?;
                self.pool.forward(y, ctx)
            }
        }
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let places = ctx.stash.pop();
        let input = self.norm.pop(&dy, ctx);
        let NormGradients { dx, scale, shift } =
            self.norm.gradients_pooled(dy, &places, &self.pool, &input, ctx)?;
        self.norm.norm.send_gradients(scale, shift, ctx)?;
        Ok(Some(dx))
    }
}

//! Element-wise non-linearities that stand alone.

use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::{self, ActivationFn};

use super::{BackwardContext, ForwardContext, Layer};
use crate::Result;

/// What the backward pass of an activation reads: the output for ReLU, which the next layer keeps anyway,
/// the input for the others.
pub(crate) fn saved_of(kind: ActivationFn, before: Tensor, after: &Tensor) -> Tensor {
    match kind {
        ActivationFn::Relu => after.clone(),
        _ => before,
    }
}

/// An activation that stands by itself: before a linear layer it is a part of that layer's chain.
#[derive(Debug)]
pub(crate) struct ActivationLayer(pub ActivationFn);

impl Layer for ActivationLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if self.0 == ActivationFn::Relu {
            // Its input is nobody's any more.
            let y = activation::forward_owned(self.0, x)?;
            ctx.stash.push(y.clone());
            return Ok(y);
        }
        let y = activation::forward(self.0, &x)?;
        ctx.stash.push(saved_of(self.0, x, &y));
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(activation::backward(self.0, &ctx.stash.pop(), dy)?))
    }
}

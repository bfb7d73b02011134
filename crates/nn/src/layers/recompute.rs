//! Activations for time: some layers keep only their input and run their forward pass again before their
//! backward pass. A block does, or what is inside an attention.

use espalier_tensor::Tensor;

use super::{BackwardContext, ForwardContext, Layer, Mode, Sequence, Stash};
use crate::Result;

/// Layers whose activations are made twice.
#[derive(Debug)]
pub(crate) struct RecomputeLayer(pub Sequence);

impl RecomputeLayer {
    /// Runs them again: what they give, and what their backward pass wants.
    pub fn again(&self, ctx: &mut BackwardContext<'_>) -> Result<(Tensor, Stash)> {
        // The first forward pass has reported what was measured and observed already.
        let mut again = ForwardContext::new(ctx.weights, Mode::Train, ctx.random, ctx.batch_slice);
        again.positions = ctx.positions;
        let y = self.0.forward(ctx.stash.pop(), &mut again)?;
        Ok((y, again.stash))
    }

    /// Their backward pass, with what they left when they ran again.
    pub fn through(
        &self,
        dy: Tensor,
        mut stash: Stash,
        ctx: &mut BackwardContext<'_>,
        needs_dx: bool,
    ) -> Result<Option<Tensor>> {
        self.0.backward(dy, &mut inner(&mut stash, ctx), needs_dx)
    }

    /// The same, and something is added to the gradient of what they read.
    pub fn through_plus(
        &self,
        dy: Tensor,
        plus: Tensor,
        mut stash: Stash,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<Tensor> {
        self.0.backward_plus(dy, plus, &mut inner(&mut stash, ctx))
    }
}

/// A pass with a stash of its own.
fn inner<'a>(stash: &'a mut Stash, ctx: &'a mut BackwardContext<'_>) -> BackwardContext<'a> {
    BackwardContext { stash, sink: &mut *ctx.sink, ..*ctx }
}

impl Layer for RecomputeLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        ctx.stash.push(x.clone());
        let kept = std::mem::replace(&mut ctx.stash, Stash::forgetful());
        let y = self.0.forward(x, ctx);
        ctx.stash = kept;
        y
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        let (_, stash) = self.again(ctx)?;
        self.through(dy, stash, ctx, needs_dx)
    }

    fn backward_plus(&self, dy: Tensor, plus: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let (_, stash) = self.again(ctx)?;
        self.through_plus(dy, plus, stash, ctx)
    }
}

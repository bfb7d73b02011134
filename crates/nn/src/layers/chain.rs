//! Linear layers with nothing but cheap operations between them, as one layer, so that no linear layer's
//! input need be kept that a pass over memory makes again.
//!
//! A weight's gradient wants the input of its product. Behind a norm or an activation that input is a
//! function of what the norm or the activation keeps for itself anyway, and making it again costs little more
//! than the write: the very kernel that sends the gradient through the cheap operation makes it on the way.
//! Of the 32 d bytes that a layer of a GPT of width d would keep for each token in bf16, 12 d need not be:
//! both norms' outputs and the activation's.
//!
//! What was made again lives as long as the closure that the sink gets: a sink that defers gradients keeps it
//! till then. Of ReLU the output is kept, as its own backward pass reads it, and nothing is made again. An
//! activation between two linear layers runs in the epilogue of the first one's product. A collective before
//! the first linear layer belongs to the chain too: nothing is kept behind it, and what is gathered there is
//! gathered again. With `train.recompute = "attention"` what is inside an attention stands before the linear
//! layer that reads it, and is run again where that layer's gradient needs its input.
//!
//! Where several linear layers read the same input side by side ([`Projection`]), they take the place of one.
//! Two of them, one behind a function, that are multiplied are a gated unit (SwiGLU): it keeps what both give,
//! and what it makes of that is made again for the linear layer behind it.

use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::elementwise::mul;
use espalier_tensor::ops::gated;

use super::activation::saved_of;
use super::{
    BackwardContext, BatchSlice, CollectiveLayer, ForwardContext, Layer, NormLayer, Projection,
    RecomputeLayer, Stash, sum,
};
use crate::Result;

/// `before`, a linear layer, and then any number of activations, each followed by a linear layer.
#[derive(Debug)]
pub(crate) struct Chain {
    pub before: ChainPrologue,
    /// The collective on the first linear layer's input.
    pub enter: Option<CollectiveLayer>,
    pub first: Projection,
    pub rest: Vec<(ChainLink, Projection)>,
    /// The function of a gated unit at the end.
    pub gate: Option<ActivationFn>,
}

/// What stands between two linear layers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ChainLink {
    Activation(ActivationFn),
    /// The function of a gated unit.
    Gate(ActivationFn),
}

/// What stands before the first linear layer.
#[derive(Debug)]
pub(crate) enum ChainPrologue {
    /// Nothing that could make its input again: that is kept.
    Nothing,
    Norm(NormLayer),
    Activation(ActivationFn),
    /// Layers that run again.
    Again(RecomputeLayer),
}

impl Chain {
    /// The last linear layer's input, and that layer.
    fn before_last(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<(Tensor, &Projection)> {
        let (mut h, mut linear) = (self.to_first(x, ctx)?, &self.first);
        for (link, next) in &self.rest {
            let after = match (*link, linear.single()) {
                (ChainLink::Activation(kind), Some(one)) => {
                    let (before, after) = one.product_activated(&h, kind, ctx.weights)?;
                    ctx.stash.push(saved_of(kind, before, &after));
                    after
                }
                (ChainLink::Activation(kind), None) => {
                    let before = linear.product(&h, ctx.weights)?;
                    let after = activation::forward(kind, &before)?;
                    ctx.stash.push(saved_of(kind, before, &after));
                    after
                }
                (ChainLink::Gate(kind), _) => self.gated(kind, linear.product(&h, ctx.weights)?, ctx)?,
            };
            next.observe(&after, ctx)?;
            (h, linear) = (after, next);
        }
        Ok((h, linear))
    }

    /// What a gated unit makes of both halves, which it keeps.
    fn gated(&self, kind: ActivationFn, halves: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let y = gated::forward(kind, &halves)?;
        ctx.stash.push(halves);
        Ok(y)
    }

    /// Through a gated unit at the end, where there is one.
    fn ended(&self, y: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match self.gate {
            Some(kind) => self.gated(kind, y, ctx),
            None => Ok(y),
        }
    }

    /// The first linear layer's input.
    fn to_first(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let h = match &self.before {
            ChainPrologue::Nothing => {
                ctx.stash.push(x.clone());
                x
            }
            ChainPrologue::Norm(norm) => norm.forward(x, ctx)?,
            ChainPrologue::Again(layers) => layers.forward(x, ctx)?,
            &ChainPrologue::Activation(kind) => {
                let h = activation::forward(kind, &x)?;
                ctx.stash.push(saved_of(kind, x, &h));
                h
            }
        };
        let h = self.entered(h, &ctx.batch_slice)?;
        self.first.observe(&h, ctx)?;
        Ok(h)
    }

    /// The chain for one position of a text that is being generated, and `plus` added. There is no backward
    /// pass: nothing is kept between products, and norm, activation and sum are fused into them.
    fn one_row(&self, x: Tensor, plus: Option<&Tensor>, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let (mut h, mut norm) = match &self.before {
            ChainPrologue::Norm(norm) if self.enter.is_none() => {
                // The product runs the norm itself: what comes of it is made for an observer alone.
                if ctx.observer.is_some() {
                    let h = norm.forward(x.clone(), ctx)?;
                    self.first.observe(&h, ctx)?;
                }
                (x, Some(norm))
            }
            _ => (self.to_first(x, ctx)?, None),
        };
        let mut linear = &self.first;
        for (link, next) in &self.rest {
            h = match *link {
                ChainLink::Activation(kind) => {
                    linear.row_product(&h, norm.take(), Some(kind), None, ctx.weights)?
                }
                ChainLink::Gate(kind) => gated_row(linear, kind, &h, norm.take(), ctx)?,
            };
            next.observe(&h, ctx)?;
            linear = next;
        }
        match (self.gate, plus) {
            (None, plus) => linear.row_product(&h, norm, None, plus, ctx.weights),
            (Some(kind), None) => gated_row(linear, kind, &h, norm, ctx),
            (Some(kind), Some(plus)) => sum(gated_row(linear, kind, &h, norm, ctx)?, plus.clone()),
        }
    }

    /// What the first linear layer reads, from what stands before it.
    fn entered(&self, h: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
        match &self.enter {
            Some(enter) => enter.run_forward(h, batch_slice),
            None => Ok(h),
        }
    }

    /// The gradient of what stands before the first linear layer, from that of what it gives.
    fn before_first(&self, dy: &Tensor, width: usize, ctx: &BackwardContext<'_>) -> Result<Tensor> {
        let dh = self.first.input_gradient(dy, &dy.shape_with_width(width), ctx.weights)?;
        match &self.enter {
            Some(enter) => enter.run_backward(dh, &ctx.batch_slice),
            None => Ok(dh),
        }
    }

    /// The gradient of what the first linear layer gives.
    fn after_first(&self, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let dy = match self.gate {
            Some(kind) => gated::backward(kind, &ctx.stash.pop(), &dy)?,
            None => dy,
        };
        self.rest.iter().rev().try_fold(dy, |dy, (link, linear)| match *link {
            ChainLink::Activation(kind) => through_activation(kind, linear, dy, ctx),
            ChainLink::Gate(kind) => through_gate(kind, linear, dy, ctx),
        })
    }

    /// Backward through the first linear layer and the norm before it, and `plus` added.
    fn through_norm(
        &self,
        norm: &NormLayer,
        dy: Tensor,
        plus: Option<Tensor>,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<Tensor> {
        let (statistics, x) = (ctx.stash.pop(), ctx.stash.pop());
        let dh = self.before_first(&dy, x.width(), ctx)?;
        let (dx, h) = norm.input_gradient_remaking(&dh, &x, &statistics, plus, ctx.weights)?;
        self.first.send_gradients(self.entered(h, &ctx.batch_slice)?, dy, ctx)?;
        norm.send_gradients(dh, x, statistics, ctx)?;
        Ok(dx)
    }

    /// Runs what stands before the first linear layer again, and backward through that layer; the backward
    /// pass of what ran again is yet to come.
    fn to_again(
        &self,
        layers: &RecomputeLayer,
        dy: Tensor,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<(Tensor, Stash)> {
        let (h, stash) = layers.again(ctx)?;
        let width = h.width();
        self.first.send_gradients(self.entered(h, &ctx.batch_slice)?, dy.clone(), ctx)?;
        Ok((self.before_first(&dy, width, ctx)?, stash))
    }
}

impl Layer for Chain {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if ctx.is_of_one_row(&x) {
            return self.one_row(x, None, ctx);
        }
        let (h, linear) = self.before_last(x, ctx)?;
        let y = linear.product(&h, ctx.weights)?;
        self.ended(y, ctx)
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if ctx.is_of_one_row(&x) {
            return self.one_row(x, Some(&plus), ctx);
        }
        let (h, linear) = self.before_last(x, ctx)?;
        match (linear.single(), self.gate) {
            (Some(linear), None) => linear.product_plus(&h, &plus, ctx.weights),
            _ => {
                let y = linear.product(&h, ctx.weights)?;
                sum(self.ended(y, ctx)?, plus)
            }
        }
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        let dy = self.after_first(dy, ctx)?;
        match &self.before {
            ChainPrologue::Nothing => {
                let x = ctx.stash.pop();
                let width = x.width();
                self.first.send_gradients(self.entered(x, &ctx.batch_slice)?, dy.clone(), ctx)?;
                needs_dx.then(|| self.before_first(&dy, width, ctx)).transpose()
            }
            ChainPrologue::Norm(norm) => self.through_norm(norm, dy, None, ctx).map(Some),
            ChainPrologue::Activation(kind) => through_activation(*kind, &self.first, dy, ctx).map(Some),
            ChainPrologue::Again(layers) => {
                let (dh, stash) = self.to_again(layers, dy, ctx)?;
                layers.through(dh, stash, ctx, needs_dx)
            }
        }
    }

    fn backward_plus(&self, dy: Tensor, plus: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        match &self.before {
            ChainPrologue::Norm(norm) => {
                let dy = self.after_first(dy, ctx)?;
                self.through_norm(norm, dy, Some(plus), ctx)
            }
            ChainPrologue::Again(layers) => {
                let dy = self.after_first(dy, ctx)?;
                let (dh, stash) = self.to_again(layers, dy, ctx)?;
                layers.through_plus(dh, plus, stash, ctx)
            }
            _ => {
                let dx = self.backward(dy, ctx, true)?.expect("it was asked for");
                sum(dx, plus)
            }
        }
    }
}

/// Backward through a linear layer and the activation before it.
fn through_activation(
    kind: ActivationFn,
    linear: &Projection,
    dy: Tensor,
    ctx: &mut BackwardContext<'_>,
) -> Result<Tensor> {
    let saved = ctx.stash.pop();
    let dh = linear.input_gradient(&dy, saved.shape(), ctx.weights)?;
    let (dx, h) = activation::backward_remaking(kind, &saved, dh)?;
    drop(saved);
    linear.send_gradients(h, dy, ctx)?;
    Ok(dx)
}

/// Backward through a linear layer and the gated unit before it.
fn through_gate(
    kind: ActivationFn,
    linear: &Projection,
    dy: Tensor,
    ctx: &mut BackwardContext<'_>,
) -> Result<Tensor> {
    let halves = ctx.stash.pop();
    let shape = halves.shape_with_width(halves.width() / 2);
    let dh = linear.input_gradient(&dy, &shape, ctx.weights)?;
    let (dx, h) = gated::backward_remaking(kind, &halves, &dh)?;
    drop((halves, dh));
    linear.send_gradients(h, dy, ctx)?;
    Ok(dx)
}

/// A gated unit of one row: its function runs in the epilogue of the first product.
fn gated_row(
    halves: &Projection,
    kind: ActivationFn,
    x: &Tensor,
    norm: Option<&NormLayer>,
    ctx: &ForwardContext<'_>,
) -> Result<Tensor> {
    let [gate, up] = &halves.linears[..] else { unreachable!("a gated unit has two halves") };
    let gate = gate.row_product(x, norm, Some(kind), None, ctx.weights)?;
    Ok(mul(&gate, &up.row_product(x, norm, None, None, ctx.weights)?)?)
}

//! Linear layers with nothing but cheap operations between them, as one layer, so that no linear layer's input need be
//! kept that a pass over memory makes again.
//!
//! A weight's gradient wants the input of its product. Behind a norm or an activation that input is a function of what
//! the norm or the activation keeps for itself anyway, and making it again costs little more than the write: the very
//! kernel that sends the gradient through the cheap operation makes it on the way. Of the 32 d bytes that a layer of a
//! GPT of width d would keep for each token in bf16, 12 d need not be: both norms' outputs and the activation's.
//!
//! Of ReLU the output is kept, as its own backward pass reads it, and nothing is made again. An activation between two
//! linear layers runs in the epilogue of the first one's product.

use espalier_tensor::ops::activation::{self, Activation};
use espalier_tensor::{Category, Tensor};

use super::activation::saved_of;
use super::{Backward, Forward, Layer, Linear, Norm};
use crate::Result;

/// `before`, a linear layer, and then any number of activations, each followed by a linear layer.
#[derive(Debug)]
pub(crate) struct Chain {
    pub before: Before,
    pub first: Linear,
    pub rest: Vec<(Activation, Linear)>,
}

/// What stands before the first linear layer.
#[derive(Debug)]
pub(crate) enum Before {
    /// Nothing that could make its input again: that is kept.
    Nothing,
    Norm(Norm),
    Activation(Activation),
}

impl Layer for Chain {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let mut h = match &self.before {
            Before::Nothing => {
                pass.stash.push(x.clone());
                x
            }
            Before::Norm(norm) => norm.forward(x, pass)?,
            &Before::Activation(kind) => {
                let h = activation::forward(kind, &x)?;
                pass.stash.push(saved_of(kind, x, &h));
                h
            }
        };
        let mut linear = &self.first;
        for (kind, next) in &self.rest {
            let (before, after) = linear.product_activated(&h, *kind, pass.weights)?;
            pass.stash.push(saved_of(*kind, before, &after));
            (h, linear) = (after, next);
        }
        linear.product(&h, pass.weights, Category::Activations)
    }

    fn backward(
        &self,
        mut dy: Tensor,
        pass: &mut Backward<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        for (kind, linear) in self.rest.iter().rev() {
            dy = through_activation(*kind, linear, dy, pass)?;
        }
        let linear = &self.first;
        match &self.before {
            Before::Nothing => {
                let x = pass.stash.pop();
                let shape = x.shape().to_vec();
                linear.send_gradients(x, dy.clone(), pass.sink)?;
                input_gradient.then(|| linear.input_gradient(&dy, &shape, pass.weights)).transpose()
            }
            Before::Norm(norm) => {
                let (statistics, x) = (pass.stash.pop(), pass.stash.pop());
                let dh = linear.input_gradient(&dy, x.shape(), pass.weights)?;
                let (dx, h) = norm.input_gradient_remaking(&dh, &x, &statistics, None, pass.weights)?;
                linear.send_gradients(h, dy, pass.sink)?;
                norm.send_gradients(dh, x, statistics, pass)?;
                Ok(Some(dx))
            }
            Before::Activation(kind) => Ok(Some(through_activation(*kind, linear, dy, pass)?)),
        }
    }
}

/// Back through a linear layer and the activation before it.
fn through_activation(
    kind: Activation,
    linear: &Linear,
    dy: Tensor,
    pass: &mut Backward<'_>,
) -> Result<Tensor> {
    let saved = pass.stash.pop();
    let dh = linear.input_gradient(&dy, saved.shape(), pass.weights)?;
    let (dx, h) = activation::backward_remaking(kind, &saved, dh)?;
    drop(saved);
    linear.send_gradients(h, dy, pass.sink)?;
    Ok(dx)
}

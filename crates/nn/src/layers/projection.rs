//! Linear layers that read the same tensor, as one: queries, keys and values, or the two halves of a gated unit.
//!
//! Each has a weight of its own, under its own name and mask. Their products write side by side into one
//! tensor, and the gradient of what they read is added up by the products themselves, so that nothing is
//! concatenated or split in memory.

use espalier_plan::spec::WeightOrder;
use espalier_tensor::ops::activation::ActivationFn;
use espalier_tensor::ops::columns;
use espalier_tensor::ops::matmul::{matmul, matmul_add, matmul_into};
use espalier_tensor::{Category, Operand, Tensor};

use super::{BackwardContext, ForwardContext, Linear, NormLayer, consecutive, sum};
use crate::Result;
use crate::weights::WeightStore;

/// One linear layer or several, side by side in this order.
#[derive(Debug)]
pub(crate) struct Projection {
    pub linears: Vec<Linear>,
    /// Columns that each gives.
    pub widths: Vec<usize>,
}

impl Projection {
    /// The only one, where there is one: its products have epilogues of their own.
    pub fn single(&self) -> Option<&Linear> {
        match &self.linears[..] {
            [linear] => Some(linear),
            _ => None,
        }
    }

    pub fn observe(&self, x: &Tensor, ctx: &mut ForwardContext<'_>) -> Result<()> {
        self.linears.iter().try_for_each(|linear| ctx.observe(linear, x))
    }

    /// What all of them give, side by side.
    pub fn product(&self, x: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        if let Some(linear) = self.single() {
            return linear.product(x, weights, Category::Transient);
        }
        let mut y = self.empty(x)?;
        for (linear, at) in self.linears.iter().zip(consecutive(&self.widths)) {
            match weights.sparse(linear.weight) {
                Some(_) => {
                    let product = linear.product(x, weights, Category::Workspace)?;
                    columns::put(&mut y, at.start, &product)?;
                }
                None => {
                    let weight = Operand::new(weights.get(linear.weight), linear.order == WeightOrder::OutIn);
                    matmul_into(x, weight, linear.bias.map(|id| weights.get(id)), &mut y, at.start)?;
                }
            }
        }
        Ok(y)
    }

    /// The same of one row, behind a norm where there is one.
    pub fn row_product(
        &self,
        x: &Tensor,
        norm: Option<&NormLayer>,
        activation: Option<ActivationFn>,
        plus: Option<&Tensor>,
        weights: &dyn WeightStore,
    ) -> Result<Tensor> {
        if let Some(linear) = self.single() {
            return linear.row_product(x, norm, activation, plus, weights);
        }
        let mut y = self.empty(x)?;
        for (linear, at) in self.linears.iter().zip(consecutive(&self.widths)) {
            columns::put(&mut y, at.start, &linear.row_product(x, norm, activation, None, weights)?)?;
        }
        match plus {
            Some(plus) => sum(y, plus.clone()),
            None => Ok(y),
        }
    }

    /// The gradient of an input of the given shape.
    pub fn input_gradient(&self, dy: &Tensor, shape: &[usize], weights: &dyn WeightStore) -> Result<Tensor> {
        if let Some(linear) = self.single() {
            return linear.input_gradient(dy, shape, weights);
        }
        let mut dx: Option<Tensor> = None;
        for (linear, at) in self.linears.iter().zip(consecutive(&self.widths)) {
            if weights.sparse(linear.weight).is_some() {
                let dy = columns::take(dy, at, Category::Workspace)?;
                let own = linear.input_gradient(&dy, shape, weights)?;
                dx = Some(match dx {
                    Some(dx) => sum(dx, own)?,
                    None => own,
                });
                continue;
            }
            let weight = Operand::new(weights.get(linear.weight), linear.order == WeightOrder::InOut);
            let dy = Operand::columns(dy, at);
            match &mut dx {
                Some(dx) => matmul_add(dy, weight, dx)?,
                None => dx = Some(matmul(dy, weight, None, Category::Transient)?.reshape(shape)),
            }
        }
        Ok(dx.expect("at least one linear layer"))
    }

    /// Hands the gradients of all weights and biases to the sink.
    pub fn send_gradients(&self, x: Tensor, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<()> {
        let last = self.linears.len() - 1;
        let mut ranges = consecutive(&self.widths);
        for linear in &self.linears[..last] {
            let at = ranges.next().expect("as many widths as layers");
            linear.send_gradients_of(x.clone(), dy.clone(), at, ctx)?;
        }
        let at = ranges.next().expect("as many widths as layers");
        self.linears[last].send_gradients_of(x, dy, at, ctx)
    }

    /// Memory for what they give of x.
    fn empty(&self, x: &Tensor) -> Result<Tensor> {
        let shape = x.shape_with_width(self.widths.iter().sum());
        Ok(Tensor::empty(&x.device(), &shape, x.dtype(), Category::Transient)?)
    }
}

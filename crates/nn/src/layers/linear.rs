//! `y = x W + b` over the last dimension: the product by itself, its two gradients, and no word on what is
//! kept. The layers that run it ([`Chain`](super::Chain), [`Head`](super::Head)) decide that.

use std::ops::Range;

use espalier_plan::spec::WeightOrder;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::columns;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::matmul::{matmul, matmul_activated, matmul_plus};
use espalier_tensor::ops::matvec::{MatvecEpilogue, matvec, matvec_of_norm};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Operand, Tensor};

use super::{BackwardContext, GradientElements, NormLayer, WeightGradients};
use crate::Result;
use crate::weights::{ParameterId, WeightStore};

/// A linear map. A tied one shares `weight` with an embedding.
#[derive(Debug)]
pub(crate) struct Linear {
    pub weight: ParameterId,
    pub bias: Option<ParameterId>,
    pub order: WeightOrder,
}

impl Linear {
    pub fn parameters(&self) -> Vec<ParameterId> {
        [self.weight].into_iter().chain(self.bias).collect()
    }

    /// The width of the output of a layer that has this weight.
    pub fn outputs(&self, weight: &Tensor) -> usize {
        match self.order {
            WeightOrder::OutIn => weight.shape()[0],
            WeightOrder::InOut => weight.shape()[1],
        }
    }

    /// `x W + b`.
    pub fn product(&self, x: &Tensor, weights: &dyn WeightStore, category: Category) -> Result<Tensor> {
        let bias = self.bias.map(|id| weights.get(id));
        let y = self.multiply(x, self.order == WeightOrder::OutIn, bias, weights, category)?;
        Ok(with_rows_of(x, y))
    }

    /// `f(x W + b) + plus` of one row, at the speed of memory: for a pass that writes text. x goes through a
    /// norm first where there is one. Its sums run in another order than those of [`Linear::product`], whose
    /// bits do not depend on the number of rows.
    pub fn row_product(
        &self,
        x: &Tensor,
        norm: Option<&NormLayer>,
        activation: Option<ActivationFn>,
        plus: Option<&Tensor>,
        weights: &dyn WeightStore,
    ) -> Result<Tensor> {
        let weight = Operand::new(weights.dense(self.weight)?, self.order == WeightOrder::OutIn);
        let after = MatvecEpilogue { bias: self.bias.map(|id| weights.get(id)), activation, plus };
        let y = match norm {
            Some(norm) => matvec_of_norm(x, norm.of_row(weights), weight, after, Category::Transient)?,
            None => matvec(x, weight, after, Category::Transient)?,
        };
        Ok(with_rows_of(x, y))
    }

    /// `x W^T + b` where the stored weight is to be transposed, otherwise `x W + b`: without its zeros where
    /// that is chosen.
    fn multiply(
        &self,
        x: &Tensor,
        transposed: bool,
        bias: Option<&Tensor>,
        weights: &dyn WeightStore,
        category: Category,
    ) -> Result<Tensor> {
        Ok(match weights.sparse(self.weight) {
            Some(sparse) => sparse.product(x, weights.at_rest(self.weight), transposed, bias, category)?,
            None => matmul(x, Operand::new(weights.get(self.weight), transposed), bias, category)?,
        })
    }

    /// `x W + b + plus`, which has the output's shape.
    pub fn product_plus(&self, x: &Tensor, plus: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        if weights.sparse(self.weight).is_some() {
            let mut y = self.product(x, weights, Category::Transient)?;
            add_into(&mut y, plus)?;
            return Ok(y);
        }
        let bias = self.bias.map(|id| weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let weight = weights.get(self.weight);
        Ok(matmul_plus(x, Operand::new(weight, transposed), bias, plus, Category::Transient)?)
    }

    /// The values before and after an activation, which runs in the epilogue of the product.
    pub fn product_activated(
        &self,
        x: &Tensor,
        kind: ActivationFn,
        weights: &dyn WeightStore,
    ) -> Result<(Tensor, Tensor)> {
        if weights.sparse(self.weight).is_some() {
            let before = self.product(x, weights, Category::Transient)?;
            let after = activation::forward(kind, &before)?;
            return Ok((before, after));
        }
        let bias = self.bias.map(|id| weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let (before, after) =
            matmul_activated(x, Operand::new(weights.get(self.weight), transposed), bias, kind)?;
        Ok((with_rows_of(x, before), with_rows_of(x, after)))
    }

    /// The gradient of an input of the given shape.
    pub fn input_gradient(&self, dy: &Tensor, shape: &[usize], weights: &dyn WeightStore) -> Result<Tensor> {
        let transposed = self.order == WeightOrder::InOut;
        let dx = self.multiply(dy, transposed, None, weights, Category::Transient)?;
        Ok(dx.reshape(shape))
    }

    /// Hands the gradients of weight and bias to the sink.
    pub fn send_gradients(&self, x: Tensor, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<()> {
        let all = 0..dy.width();
        self.send_gradients_of(x, dy, all, ctx)
    }

    /// The same where the gradient of what the layer gave is some columns of a tensor.
    pub fn send_gradients_of(
        &self,
        x: Tensor,
        dy: Tensor,
        at: Range<usize>,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<()> {
        let (order, bias) = (self.order, self.bias);
        let sparse = ctx.weights.sparse(self.weight).cloned();
        let reads = [x.clone(), dy.clone()];
        let make = move |wanted| {
            let sparse = sparse.filter(|_| wanted == GradientElements::Kept);
            // What is summed or sampled lies by itself.
            let local = match at.len() < dy.width() && (sparse.is_some() || bias.is_some()) {
                true => Some(columns::take(&dy, at.clone(), Category::Workspace)?),
                false => None,
            };
            let (own, at) = local.as_ref().map_or((&dy, at), |own| (own, 0..own.width()));
            let of_dy = Operand::columns(own, at);
            let weight = match (sparse, order) {
                (Some(sparse), WeightOrder::OutIn) => sparse.sampled_product(own, &x, Category::Workspace)?,
                (Some(sparse), WeightOrder::InOut) => sparse.sampled_product(&x, own, Category::Workspace)?,
                (None, WeightOrder::OutIn) => matmul(of_dy.t(), &x, None, Category::Workspace)?,
                (None, WeightOrder::InOut) => matmul(x.t(), of_dy, None, Category::Workspace)?,
            };
            let bias = bias.map(|_| sum_rows(own, Category::Workspace)).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        };
        ctx.sink.accept(&self.parameters(), WeightGradients::new(reads, make))
    }
}

/// `y`, a row for each row of `x`, under the shape of `x` but for the last extent.
fn with_rows_of(x: &Tensor, y: Tensor) -> Tensor {
    let shape = x.shape_with_width(y.width());
    y.reshape(&shape)
}

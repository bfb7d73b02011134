//! `y = x W + b` over the last dimension: the product by itself, its two gradients, and no word on what is kept. The
//! layers that run it ([`Chain`](super::Chain), [`Head`](super::Head)) decide that.

use espalier_plan::spec::WeightOrder;
use espalier_tensor::ops::activation::Activation;
use espalier_tensor::ops::matmul::{matmul, matmul_activated, matmul_plus};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Tensor};

use super::GradientSink;
use crate::Result;
use crate::weights::{ParameterId, Weights};

/// A linear map. A tied one shares `weight` with an embedding.
#[derive(Debug)]
pub(crate) struct Linear {
    pub weight: ParameterId,
    pub bias: Option<ParameterId>,
    pub order: WeightOrder,
}

impl Linear {
    /// Weight and bias.
    pub fn parameters(&self) -> Vec<ParameterId> {
        [self.weight].into_iter().chain(self.bias).collect()
    }

    /// The width of the output.
    pub fn outputs(&self, weights: &Weights) -> usize {
        let shape = weights.get(self.weight).shape();
        match self.order {
            WeightOrder::OutIn => shape[0],
            WeightOrder::InOut => shape[1],
        }
    }

    /// `x W + b`.
    pub fn product(&self, x: &Tensor, weights: &Weights, category: Category) -> Result<Tensor> {
        let bias = self.bias.map(|id| weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let y = matmul(x, false, weights.get(self.weight), transposed, bias, category)?;
        Ok(with_rows_of(x, y))
    }

    /// `x W + b + plus`, which has the output's shape.
    pub fn product_plus(&self, x: &Tensor, plus: &Tensor, weights: &Weights) -> Result<Tensor> {
        let bias = self.bias.map(|id| weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let weight = weights.get(self.weight);
        Ok(matmul_plus(x, false, weight, transposed, bias, plus, Category::Activations)?)
    }

    /// The values before and after an activation, which runs in the epilogue of the product.
    pub fn product_activated(
        &self,
        x: &Tensor,
        kind: Activation,
        weights: &Weights,
    ) -> Result<(Tensor, Tensor)> {
        let bias = self.bias.map(|id| weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let (before, after) = matmul_activated(x, false, weights.get(self.weight), transposed, bias, kind)?;
        Ok((with_rows_of(x, before), with_rows_of(x, after)))
    }

    /// The gradient of an input of the given shape.
    pub fn input_gradient(&self, dy: &Tensor, shape: &[usize], weights: &Weights) -> Result<Tensor> {
        let transposed = self.order == WeightOrder::InOut;
        let dx = matmul(dy, false, weights.get(self.weight), transposed, None, Category::Activations)?;
        Ok(dx.reshape(shape))
    }

    /// Hands the gradients of weight and bias to the sink.
    pub fn send_gradients(&self, x: Tensor, dy: Tensor, sink: &mut dyn GradientSink) -> Result<()> {
        let (order, bias) = (self.order, self.bias);
        let gradients = Box::new(move || {
            let weight = match order {
                WeightOrder::OutIn => matmul(&dy, true, &x, false, None, Category::Workspace)?,
                WeightOrder::InOut => matmul(&x, true, &dy, false, None, Category::Workspace)?,
            };
            let bias = bias.map(|_| sum_rows(&dy, Category::Workspace)).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        });
        sink.accept(&self.parameters(), gradients)
    }
}

/// `y`, a row for each row of `x`, under the shape of `x` but for the last extent.
fn with_rows_of(x: &Tensor, y: Tensor) -> Tensor {
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("at least one dimension") = y.width();
    y.reshape(&shape)
}

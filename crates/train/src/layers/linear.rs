//! `y = act(x W + b)` over the last dimension, with the activation that follows it fused into the product.

use espalier_plan::spec::WeightOrder;
use espalier_tensor::ops::activation::{self, Activation};
use espalier_tensor::ops::matmul::{matmul, matmul_activated};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Tensor};

use super::{Backward, Forward, Layer, activation::saved_of};
use crate::Result;
use crate::weights::ParameterId;

/// A linear layer. A tied one shares `weight` with an embedding.
#[derive(Debug)]
pub(crate) struct Linear {
    pub weight: ParameterId,
    pub bias: Option<ParameterId>,
    pub order: WeightOrder,
    pub activation: Option<Activation>,
}

impl Layer for Linear {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let weight = pass.weights.get(self.weight);
        let bias = self.bias.map(|id| pass.weights.get(id));
        let transposed = self.order == WeightOrder::OutIn;
        let mut shape = x.shape().to_vec();
        let y = match self.activation {
            None => matmul(&x, false, weight, transposed, bias, Category::Activations)?,
            Some(kind) => {
                let (before, after) = matmul_activated(&x, false, weight, transposed, bias, kind)?;
                pass.stash.push(saved_of(kind, before, &after));
                after
            }
        };
        pass.stash.push(x);
        *shape.last_mut().expect("at least one dimension") = y.width();
        Ok(y.reshape(&shape))
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        let x = pass.stash.pop();
        let shape = x.shape().to_vec();
        let dy = match self.activation {
            None => dy,
            Some(kind) => {
                let saved = pass.stash.pop();
                let dy_shape = saved.shape().to_vec();
                activation::backward(kind, &saved, dy.reshape(&dy_shape))?
            }
        };
        let ids: Vec<ParameterId> = [self.weight].into_iter().chain(self.bias).collect();
        let (order, bias, upstream) = (self.order, self.bias, dy.clone());
        let gradients = Box::new(move || {
            let weight = match order {
                WeightOrder::OutIn => matmul(&upstream, true, &x, false, None, Category::Workspace)?,
                WeightOrder::InOut => matmul(&x, true, &upstream, false, None, Category::Workspace)?,
            };
            let bias = bias.map(|_| sum_rows(&upstream, Category::Workspace)).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        });
        pass.sink.accept(&ids, gradients)?;
        if !input_gradient {
            return Ok(None);
        }
        let weight = pass.weights.get(self.weight);
        let transposed = self.order == WeightOrder::InOut;
        Ok(Some(matmul(&dy, false, weight, transposed, None, Category::Activations)?.reshape(&shape)))
    }
}

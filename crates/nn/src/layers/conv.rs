//! Convolution over height and width.

use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, ForwardContext, Layer, WeightGradients};
use crate::Result;
use crate::weights::ParameterId;

/// A convolution, images channels last.
#[derive(Debug)]
pub(crate) struct ConvLayer {
    pub weight: ParameterId,
    pub bias: Option<ParameterId>,
    pub conv: ConvParams,
}

impl Layer for ConvLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let bias = self.bias.map(|id| ctx.weights.get(id));
        let y = conv::forward(&x, ctx.weights.get(self.weight), bias, self.conv)?;
        ctx.stash.push(x);
        Ok(y)
    }

    fn backward(
        &self,
        dy: Tensor,
        ctx: &mut BackwardContext<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        let x = ctx.stash.pop();
        let shape = x.shape().to_vec();
        let ids: Vec<ParameterId> = [self.weight].into_iter().chain(self.bias).collect();
        let (conv, bias, upstream) = (self.conv, self.bias, dy.clone());
        let reads = [x.clone(), dy.clone()];
        let make = move |_| {
            let weight = conv::backward_weight(&x, &upstream, conv)?;
            let bias = bias.map(|_| sum_rows(&upstream, Category::Workspace)).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        };
        ctx.sink.accept(&ids, WeightGradients::new(reads, make))?;
        let input = |_| conv::backward_input(&dy, ctx.weights.get(self.weight), self.conv, &shape);
        Ok(input_gradient.then_some(()).map(input).transpose()?)
    }
}

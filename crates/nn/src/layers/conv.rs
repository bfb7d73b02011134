//! Convolution over height and width, and the ReLU behind it.

use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Device, Tensor};

use super::{BackwardContext, ForwardContext, Layer, Mode, WeightGradients};
use crate::Result;
use crate::weights::ParameterId;

/// A convolution, images channels last.
#[derive(Debug)]
pub(crate) struct ConvLayer {
    pub weight: ParameterId,
    pub bias: Option<ParameterId>,
    pub conv: ConvParams,
    /// Whether ReLU stands behind it.
    pub relu: bool,
    /// Whether a batch norm does.
    pub normed: bool,
}

/// Whether a device leaves out a bias that a batch norm takes away again, with the mean that it is a part of: a
/// pass over the output forward, another one back for a gradient that is 0. The norm adds it to the mean that
/// evaluation will use.
pub(crate) fn leaves_bias_out(device: &Device) -> bool {
    matches!(device, Device::Cuda(_))
}

impl Layer for ConvLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let left_out = self.normed && ctx.mode == Mode::Train && leaves_bias_out(&x.device());
        let bias = self.bias.filter(|_| !left_out).map(|id| ctx.weights.get(id));
        let weight = ctx.weights.get(self.weight);
        let y = match self.relu {
            true => conv::forward_relu(&x, weight, bias, self.conv)?,
            false => conv::forward(&x, weight, bias, self.conv)?,
        };
        ctx.stash.push(x);
        if self.relu {
            ctx.stash.push(y.clone());
        }
        Ok(y)
    }

    fn backward(
        &self,
        dy: Tensor,
        ctx: &mut BackwardContext<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        let dy = match self.relu {
            true => activation::backward(ActivationFn::Relu, &ctx.stash.pop(), dy)?,
            false => dy,
        };
        let x = ctx.stash.pop();
        let shape = x.shape().to_vec();
        let ids: Vec<ParameterId> = [self.weight].into_iter().chain(self.bias).collect();
        let (conv, bias, upstream) = (self.conv, self.bias, dy.clone());
        let left_out = self.normed && leaves_bias_out(&x.device());
        let reads = [x.clone(), dy.clone()];
        let make = move |_| {
            let weight = conv::backward_weight(&x, &upstream, conv)?;
            let of_bias = |_| match left_out {
                true => {
                    Tensor::zeros(&x.device(), &[upstream.width()], upstream.dtype(), Category::Workspace)
                }
                false => sum_rows(&upstream, Category::Workspace),
            };
            let bias = bias.map(of_bias).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        };
        ctx.sink.accept(&ids, WeightGradients::new(reads, make))?;
        let input = |_| conv::backward_input(&dy, ctx.weights.get(self.weight), self.conv, &shape);
        Ok(input_gradient.then_some(()).map(input).transpose()?)
    }
}

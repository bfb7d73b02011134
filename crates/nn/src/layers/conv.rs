//! Convolution over height and width, and the ReLU behind it.

use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Device, Tensor};

use super::{BackwardContext, ForwardContext, Layer, Mode, WeightGradients};
use crate::Result;
use crate::weights::{ParameterId, WeightStore};

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

impl ConvLayer {
    /// The output, ReLU's where there is one. Leaves nothing for the way back.
    pub fn run(&self, x: &Tensor, ctx: &ForwardContext<'_>) -> Result<Tensor> {
        let left_out = self.normed && ctx.mode == Mode::Train && leaves_bias_out(&x.device());
        let bias = self.bias.filter(|_| !left_out).map(|id| ctx.weights.get(id));
        let weight = ctx.weights.get(self.weight);
        Ok(match self.relu {
            true => conv::forward_relu(x, weight, bias, self.conv)?,
            false => conv::forward(x, weight, bias, self.conv)?,
        })
    }

    /// Leaves what ReLU made.
    pub fn leave_output(&self, y: &Tensor, ctx: &mut ForwardContext<'_>) {
        if self.relu {
            ctx.stash.push(y.clone());
        }
    }

    /// The gradient of what ReLU reads, where there is one.
    pub fn before_relu(&self, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        match self.relu {
            true => Ok(activation::backward(ActivationFn::Relu, &ctx.stash.pop(), dy)?),
            false => Ok(dy),
        }
    }

    pub fn input_gradient(&self, dy: &Tensor, shape: &[usize], weights: &dyn WeightStore) -> Result<Tensor> {
        Ok(conv::backward_input(dy, weights.get(self.weight), self.conv, shape)?)
    }

    /// Hands over the gradients of weight and bias, made of what was read and the gradient of the output.
    pub fn send_gradients(&self, x: Tensor, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<()> {
        let ids: Vec<ParameterId> = [self.weight].into_iter().chain(self.bias).collect();
        let (conv, bias) = (self.conv, self.bias);
        let left_out = self.normed && leaves_bias_out(&x.device());
        let reads = [x.clone(), dy.clone()];
        let make = move |_| {
            let weight = conv::backward_weight(&x, &dy, conv)?;
            let of_bias = |_| match left_out {
                true => Tensor::zeros(&x.device(), &[dy.width()], dy.dtype(), Category::Workspace),
                false => sum_rows(&dy, Category::Workspace),
            };
            let bias = bias.map(of_bias).transpose()?;
            Ok([weight].into_iter().chain(bias).collect())
        };
        ctx.sink.accept(&ids, WeightGradients::new(reads, make))
    }
}

impl Layer for ConvLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let y = self.run(&x, ctx)?;
        ctx.stash.push(x);
        self.leave_output(&y, ctx);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        let dy = self.before_relu(dy, ctx)?;
        let x = ctx.stash.pop();
        let shape = x.shape().to_vec();
        self.send_gradients(x, dy.clone(), ctx)?;
        needs_dx.then(|| self.input_gradient(&dy, &shape, ctx.weights)).transpose()
    }
}

//! Layer norm and RMS norm, with their learnt scales and shifts.

use espalier_tensor::ops::{layer_norm, matvec, rms_norm};
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, ForwardContext, Layer, WeightGradients};
use crate::Result;
use crate::weights::{ParameterId, WeightStore};

/// A norm over the last dimension.
#[derive(Debug)]
pub(crate) enum NormLayer {
    /// Subtract the mean, divide by the deviation, scale, and shift where there is one.
    Layer { scale: ParameterId, shift: Option<ParameterId>, eps: f32 },
    /// Divide by the root mean square, scale.
    Rms { scale: ParameterId, eps: f32 },
}

/// The shift, or zeros like the scale.
fn shift_or_zeros(
    weights: &dyn WeightStore,
    scale: ParameterId,
    shift: Option<ParameterId>,
) -> Result<Tensor> {
    match shift {
        Some(shift) => Ok(weights.get(shift).clone()),
        None => {
            let scale = weights.get(scale);
            Ok(Tensor::zeros(&scale.device(), scale.shape(), scale.dtype(), Category::Workspace)?)
        }
    }
}

impl NormLayer {
    /// The same for the product of a row.
    pub fn of_row<'a>(&self, weights: &'a dyn WeightStore) -> matvec::InputNorm<'a> {
        match *self {
            NormLayer::Layer { scale, shift, eps } => {
                let shift = shift.map(|shift| weights.get(shift));
                matvec::InputNorm { centred: true, scale: weights.get(scale), shift, eps }
            }
            NormLayer::Rms { scale, eps } => {
                matvec::InputNorm { centred: false, scale: weights.get(scale), shift: None, eps }
            }
        }
    }

    /// The gradient of the input, plus another one where it is given, and the output made again.
    pub fn input_gradient_remaking(
        &self,
        dy: &Tensor,
        x: &Tensor,
        statistics: &Tensor,
        plus: Option<Tensor>,
        weights: &dyn WeightStore,
    ) -> Result<(Tensor, Tensor)> {
        Ok(match *self {
            NormLayer::Layer { scale, shift, .. } => {
                let shift = shift_or_zeros(weights, scale, shift)?;
                layer_norm::backward_remaking(dy, x, weights.get(scale), &shift, statistics, plus)?
            }
            NormLayer::Rms { scale, .. } => {
                rms_norm::backward_remaking(dy, x, weights.get(scale), statistics, plus)?
            }
        })
    }

    /// Hands the gradients of scale and shift to the sink.
    pub fn send_gradients(
        &self,
        dy: Tensor,
        x: Tensor,
        statistics: Tensor,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<()> {
        let reads = [dy.clone(), x.clone(), statistics.clone()];
        let (NormLayer::Layer { scale, .. } | NormLayer::Rms { scale, .. }) = *self;
        let dtype = ctx.weights.get(scale).dtype();
        match *self {
            NormLayer::Layer { shift, .. } => {
                let make = move |_| {
                    let (of_scale, of_shift) = layer_norm::backward_weights(&dy, &x, &statistics, dtype)?;
                    Ok([of_scale].into_iter().chain(shift.map(|_| of_shift)).collect())
                };
                let parameters: Vec<ParameterId> = [scale].into_iter().chain(shift).collect();
                ctx.sink.accept(&parameters, WeightGradients::new(reads, make))
            }
            NormLayer::Rms { .. } => {
                let make = move |_| Ok(vec![rms_norm::backward_weights(&dy, &x, &statistics, dtype)?]);
                ctx.sink.accept(&[scale], WeightGradients::new(reads, make))
            }
        }
    }
}

/// Leaves its input and the statistics of its rows on the stash, in this order.
impl Layer for NormLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let get = |id| ctx.weights.get(id);
        let (y, statistics) = match *self {
            NormLayer::Layer { scale, shift, eps } => {
                layer_norm::forward(&x, get(scale), &shift_or_zeros(ctx.weights, scale, shift)?, eps)?
            }
            NormLayer::Rms { scale, eps } => rms_norm::forward(&x, get(scale), eps)?,
        };
        ctx.stash.push(x);
        ctx.stash.push(statistics);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let (statistics, x) = (ctx.stash.pop(), ctx.stash.pop());
        let get = |id| ctx.weights.get(id);
        let dx = match *self {
            NormLayer::Layer { scale, .. } => layer_norm::backward_input(&dy, &x, get(scale), &statistics)?,
            NormLayer::Rms { scale, .. } => rms_norm::backward_input(&dy, &x, get(scale), &statistics)?,
        };
        self.send_gradients(dy, x, statistics, ctx)?;
        Ok(Some(dx))
    }
}

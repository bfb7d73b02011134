//! Layer norm, RMS norm and batch norm, with their learnt scales and shifts.

use espalier_comm::{Communicator, Reduce};
use espalier_tensor::Tensor;
use espalier_tensor::ops::{batch_norm, layer_norm, rms_norm};

use super::{Backward, BatchStatistics, Forward, Layer, Mode};
use crate::Result;
use crate::weights::{BufferId, ParameterId, Weights};

const EPS: f32 = 1e-5;

/// A norm over the last dimension.
#[derive(Debug)]
pub(crate) enum Norm {
    /// Subtract the mean, divide by the deviation, scale, shift.
    Layer { scale: ParameterId, shift: ParameterId },
    /// Divide by the root mean square, scale.
    Rms { scale: ParameterId },
}

impl Norm {
    /// The gradient of the input, plus another one where it is given, and the output made again.
    pub fn input_gradient_remaking(
        &self,
        dy: &Tensor,
        x: &Tensor,
        statistics: &Tensor,
        plus: Option<Tensor>,
        weights: &Weights,
    ) -> Result<(Tensor, Tensor)> {
        Ok(match *self {
            Norm::Layer { scale, shift } => {
                let (scale, shift) = (weights.get(scale), weights.get(shift));
                layer_norm::backward_remaking(dy, x, scale, shift, statistics, plus)?
            }
            Norm::Rms { scale } => rms_norm::backward_remaking(dy, x, weights.get(scale), statistics, plus)?,
        })
    }

    /// Hands the gradients of scale and shift to the sink.
    pub fn send_gradients(
        &self,
        dy: Tensor,
        x: Tensor,
        statistics: Tensor,
        pass: &mut Backward<'_>,
    ) -> Result<()> {
        match *self {
            Norm::Layer { scale, shift } => {
                let dtype = pass.weights.get(scale).dtype();
                let gradients = Box::new(move |_| {
                    let (scale, shift) = layer_norm::backward_weights(&dy, &x, &statistics, dtype)?;
                    Ok(vec![scale, shift])
                });
                pass.sink.accept(&[scale, shift], gradients)
            }
            Norm::Rms { scale } => {
                let dtype = pass.weights.get(scale).dtype();
                let gradients =
                    Box::new(move |_| Ok(vec![rms_norm::backward_weights(&dy, &x, &statistics, dtype)?]));
                pass.sink.accept(&[scale], gradients)
            }
        }
    }
}

/// Leaves its input and the statistics of its rows on the stash, in this order.
impl Layer for Norm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let get = |id| pass.weights.get(id);
        let (y, statistics) = match *self {
            Norm::Layer { scale, shift } => layer_norm::forward(&x, get(scale), get(shift), EPS)?,
            Norm::Rms { scale } => rms_norm::forward(&x, get(scale), EPS)?,
        };
        pass.stash.push(x);
        pass.stash.push(statistics);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (statistics, x) = (pass.stash.pop(), pass.stash.pop());
        let get = |id| pass.weights.get(id);
        let dx = match *self {
            Norm::Layer { scale, .. } => layer_norm::backward_input(&dy, &x, get(scale), &statistics)?,
            Norm::Rms { scale } => rms_norm::backward_input(&dy, &x, get(scale), &statistics)?,
        };
        self.send_gradients(dy, x, statistics, pass)?;
        Ok(Some(dx))
    }
}

/// Over batch, height and width; running statistics serve evaluation.
#[derive(Debug)]
pub(crate) struct BatchNorm {
    pub scale: ParameterId,
    pub shift: ParameterId,
    pub running_mean: BufferId,
    pub running_variance: BufferId,
}

impl Layer for BatchNorm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let (scale, shift) = (pass.weights.get(self.scale), pass.weights.get(self.shift));
        if pass.mode == Mode::Evaluate {
            let (mean, variance) =
                (pass.weights.buffer(self.running_mean), pass.weights.buffer(self.running_variance));
            return Ok(batch_norm::evaluate(&x, scale, shift, mean, variance, EPS)?);
        }
        let (y, mean, rstd, count) = match &pass.share.norm_group {
            None => {
                let (y, mean, rstd) = batch_norm::forward(&x, scale, shift, EPS)?;
                (y, mean, rstd, x.rows())
            }
            Some(group) => batch_norm::forward_part(&x, scale, shift, EPS, |own| sum_over(group, own))?,
        };
        pass.statistics.push(BatchStatistics {
            mean_id: self.running_mean,
            variance_id: self.running_variance,
            mean: mean.clone(),
            rstd: rstd.clone(),
            count,
        });
        pass.stash.push(x);
        pass.stash.push(mean);
        pass.stash.push(rstd);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (rstd, mean, x) = (pass.stash.pop(), pass.stash.pop(), pass.stash.pop());
        let scale = pass.weights.get(self.scale);
        let (dx, scale, shift) = match &pass.share.norm_group {
            None => batch_norm::backward(&dy, &x, scale, &mean, &rstd)?,
            Some(group) => {
                batch_norm::backward_part(&dy, &x, scale, &mean, &rstd, |own| sum_over(group, own))?
            }
        };
        pass.sink.accept(&[self.scale, self.shift], Box::new(move |_| Ok(vec![scale, shift])))?;
        Ok(Some(dx))
    }
}

/// Numbers of all micro-batches that are normalised together.
fn sum_over(group: &Communicator, own: Vec<f64>) -> Result<Vec<f64>> {
    Ok(group.all_reduce(own, Reduce::Sum)?)
}

impl BatchStatistics {
    /// Folds the batch's statistics into the running ones.
    pub fn fold_into(&self, weights: &mut Weights) -> Result<()> {
        let [mean, variance] = weights.buffers_mut(self.mean_id, self.variance_id);
        Ok(batch_norm::fold(&self.mean, &self.rstd, self.count, EPS, mean, variance)?)
    }
}

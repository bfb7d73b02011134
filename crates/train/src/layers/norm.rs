//! Layer norm, RMS norm and batch norm, with their learnt scales and shifts.

use espalier_comm::{Communicator, Reduce};
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::{batch_norm, layer_norm, rms_norm, rows};
use espalier_tensor::{Category, DType, Tensor};

use super::{Backward, BatchStatistics, Forward, Layer, Mode, WeightGradients};
use crate::Result;
use crate::weights::{BufferId, ParameterId, Weights};

/// A norm over the last dimension.
#[derive(Debug)]
pub(crate) enum Norm {
    /// Subtract the mean, divide by the deviation, scale, and shift where there is one.
    Layer { scale: ParameterId, shift: Option<ParameterId>, eps: f32 },
    /// Divide by the root mean square, scale.
    Rms { scale: ParameterId, eps: f32 },
}

/// The shift, or zeros like the scale.
fn shift_or_zeros(weights: &Weights, scale: ParameterId, shift: Option<ParameterId>) -> Result<Tensor> {
    match shift {
        Some(shift) => Ok(weights.get(shift).clone()),
        None => {
            let scale = weights.get(scale);
            Ok(Tensor::zeros(&scale.device(), scale.shape(), scale.dtype(), Category::Workspace)?)
        }
    }
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
            Norm::Layer { scale, shift, .. } => {
                let shift = shift_or_zeros(weights, scale, shift)?;
                layer_norm::backward_remaking(dy, x, weights.get(scale), &shift, statistics, plus)?
            }
            Norm::Rms { scale, .. } => {
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
        pass: &mut Backward<'_>,
    ) -> Result<()> {
        let reads = [dy.clone(), x.clone(), statistics.clone()];
        let (Norm::Layer { scale, .. } | Norm::Rms { scale, .. }) = *self;
        let dtype = pass.weights.get(scale).dtype();
        match *self {
            Norm::Layer { shift, .. } => {
                let make = move |_| {
                    let (of_scale, of_shift) = layer_norm::backward_weights(&dy, &x, &statistics, dtype)?;
                    Ok([of_scale].into_iter().chain(shift.map(|_| of_shift)).collect())
                };
                let parameters: Vec<ParameterId> = [scale].into_iter().chain(shift).collect();
                pass.sink.accept(&parameters, WeightGradients::new(reads, make))
            }
            Norm::Rms { .. } => {
                let make = move |_| Ok(vec![rms_norm::backward_weights(&dy, &x, &statistics, dtype)?]);
                pass.sink.accept(&[scale], WeightGradients::new(reads, make))
            }
        }
    }
}

/// Leaves its input and the statistics of its rows on the stash, in this order.
impl Layer for Norm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let get = |id| pass.weights.get(id);
        let (y, statistics) = match *self {
            Norm::Layer { scale, shift, eps } => {
                layer_norm::forward(&x, get(scale), &shift_or_zeros(pass.weights, scale, shift)?, eps)?
            }
            Norm::Rms { scale, eps } => rms_norm::forward(&x, get(scale), eps)?,
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
            Norm::Rms { scale, .. } => rms_norm::backward_input(&dy, &x, get(scale), &statistics)?,
        };
        self.send_gradients(dy, x, statistics, pass)?;
        Ok(Some(dx))
    }
}

/// Over batch, height and width; running statistics serve evaluation.
///
/// With a `group`, over so many samples at a time: ghost batch norm (Hoffer, Hubara & Soudry 2017), which makes the
/// statistics of a large batch as noisy as those of a small one. A group is a batch of its own, forwards and backwards.
#[derive(Debug)]
pub(crate) struct BatchNorm {
    pub scale: ParameterId,
    pub shift: ParameterId,
    pub running_mean: BufferId,
    pub running_variance: BufferId,
    /// Samples; 0: all there are.
    pub group: usize,
    /// Added to variances.
    pub eps: f32,
}

impl BatchNorm {
    /// How many groups samples are cut into; those that do not fit (a few that a pruning method looks at) are one.
    fn groups(&self, x: &Tensor) -> usize {
        let samples = x.shape()[0];
        if self.group > 0 && samples.is_multiple_of(self.group) { samples / self.group } else { 1 }
    }

    fn measured(&self, mean: &Tensor, rstd: &Tensor, count: usize, group: usize) -> BatchStatistics {
        let (mean_id, variance_id) = (self.running_mean, self.running_variance);
        let (mean, rstd, eps) = (mean.clone(), rstd.clone(), self.eps);
        BatchStatistics { mean_id, variance_id, mean, rstd, count, group, eps }
    }

    /// Hands over gradients that come with that of the input: nothing is left to be read for them.
    fn send_gradients(&self, scale: Tensor, shift: Tensor, pass: &mut Backward<'_>) -> Result<()> {
        let made = WeightGradients::new([], move |_| Ok(vec![scale, shift]));
        pass.sink.accept(&[self.scale, self.shift], made)
    }

    /// One group after the other: leaves the input, then mean and deviation of each.
    fn forward_groups(&self, x: Tensor, groups: usize, pass: &mut Forward<'_>) -> Result<Tensor> {
        let (scale, shift) = (pass.weights.get(self.scale), pass.weights.get(self.shift));
        let rows = x.rows() / groups;
        let (mut y, mut left) = (x.empty_like(Category::Transient)?, Vec::new());
        for group in 0..groups {
            let part = rows::take(&x, group * rows..(group + 1) * rows, Category::Workspace)?;
            let (part, mean, rstd) = batch_norm::forward(&part, scale, shift, self.eps)?;
            rows::put(&mut y, group * rows, &part)?;
            pass.statistics.push(self.measured(&mean, &rstd, rows, group));
            left.extend([mean, rstd]);
        }
        pass.stash.push(x);
        left.into_iter().for_each(|tensor| pass.stash.push(tensor));
        Ok(y)
    }

    fn backward_groups(&self, dy: Tensor, groups: usize, pass: &mut Backward<'_>) -> Result<Option<Tensor>> {
        let rows = dy.rows() / groups;
        let mut left: Vec<(Tensor, Tensor)> =
            (0..groups).map(|_| (pass.stash.pop(), pass.stash.pop())).collect();
        left.reverse();
        let (x, scale) = (pass.stash.pop(), pass.weights.get(self.scale));
        let mut dx = x.empty_like(Category::Transient)?;
        let mut sums: Option<(Tensor, Tensor)> = None;
        for (group, (rstd, mean)) in left.into_iter().enumerate() {
            let part = |of: &Tensor| rows::take(of, group * rows..(group + 1) * rows, Category::Workspace);
            let (part, of_scale, of_shift) =
                batch_norm::backward(&part(&dy)?, &part(&x)?, scale, &mean, &rstd)?;
            rows::put(&mut dx, group * rows, &part)?;
            // Summed in f32, whatever the weights are.
            let wide = |own: Tensor| cast(&own, DType::F32, Category::Workspace);
            let (of_scale, of_shift) = (wide(of_scale)?, wide(of_shift)?);
            match &mut sums {
                None => sums = Some((of_scale, of_shift)),
                Some((scale, shift)) => {
                    add_into(scale, &of_scale)?;
                    add_into(shift, &of_shift)?;
                }
            }
        }
        let (of_scale, of_shift) = sums.expect("there is a group");
        let dtype = scale.dtype();
        let gradients = [of_scale, of_shift].map(|sum| cast(&sum, dtype, Category::Workspace));
        let [of_scale, of_shift] = gradients;
        let (of_scale, of_shift) = (of_scale?, of_shift?);
        self.send_gradients(of_scale, of_shift, pass)?;
        Ok(Some(dx))
    }
}

impl Layer for BatchNorm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let (scale, shift) = (pass.weights.get(self.scale), pass.weights.get(self.shift));
        if pass.mode == Mode::Evaluate {
            let (mean, variance) =
                (pass.weights.buffer(self.running_mean), pass.weights.buffer(self.running_variance));
            return Ok(batch_norm::evaluate(&x, scale, shift, mean, variance, self.eps)?);
        }
        let groups = self.groups(&x);
        if groups > 1 {
            return self.forward_groups(x, groups, pass);
        }
        let (y, mean, rstd, count) = match &pass.share.norm_group {
            None => {
                let (y, mean, rstd) = batch_norm::forward(&x, scale, shift, self.eps)?;
                (y, mean, rstd, x.rows())
            }
            Some(group) => batch_norm::forward_part(&x, scale, shift, self.eps, |own| sum_over(group, own))?,
        };
        pass.statistics.push(self.measured(&mean, &rstd, count, 0));
        pass.stash.push(x);
        pass.stash.push(mean);
        pass.stash.push(rstd);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let groups = self.groups(&dy);
        if groups > 1 {
            return self.backward_groups(dy, groups, pass);
        }
        let (rstd, mean, x) = (pass.stash.pop(), pass.stash.pop(), pass.stash.pop());
        let scale = pass.weights.get(self.scale);
        let (dx, scale, shift) = match &pass.share.norm_group {
            None => batch_norm::backward(&dy, &x, scale, &mean, &rstd)?,
            Some(group) => {
                batch_norm::backward_part(&dy, &x, scale, &mean, &rstd, |own| sum_over(group, own))?
            }
        };
        self.send_gradients(scale, shift, pass)?;
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
        Ok(batch_norm::fold(&self.mean, &self.rstd, self.count, self.eps, mean, variance)?)
    }
}

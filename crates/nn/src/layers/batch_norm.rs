//! Batch norm, with its learnt scale and shift, its running statistics and its groups of samples; and with the ReLU
//! behind it, and the sum before that, as residual networks have them.

use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::batch_norm::NormEpilogue;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add, add_into};
use espalier_tensor::ops::{batch_norm, rows};
use espalier_tensor::{Category, DType, Tensor};

use super::conv::leaves_bias_out;
use super::{BackwardContext, BatchStatistics, ForwardContext, Mode, WeightGradients, sum};
use crate::Result;
use crate::weights::{BufferId, ParameterId, WeightStore};

/// Over batch, height and width; running statistics serve evaluation.
///
/// With a `group`, over so many samples at a time: ghost batch norm (Hoffer, Hubara & Soudry 2017), which
/// makes the statistics of a large batch as noisy as those of a small one. A group is a batch of its own,
/// forwards and backwards.
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
    /// Whether ReLU stands behind it, which then runs in the same pass.
    pub relu: bool,
    /// The bias of the convolution before it, which may be [left out](leaves_bias_out).
    pub bias_before: Option<ParameterId>,
}

impl BatchNorm {
    /// How many groups samples are split into; those that do not fit (a few that a pruning method reads) are one.
    fn groups(&self, x: &Tensor) -> usize {
        let samples = x.shape()[0];
        if self.group > 0 && samples.is_multiple_of(self.group) { samples / self.group } else { 1 }
    }

    fn measured(
        &self,
        mean: &Tensor,
        rstd: &Tensor,
        count: usize,
        group: usize,
        weights: &dyn WeightStore,
    ) -> Result<BatchStatistics> {
        let (mean_id, variance_id) = (self.running_mean, self.running_variance);
        let mean = match self.bias_before.filter(|_| leaves_bias_out(&mean.device())) {
            Some(bias) => add(mean, &cast(weights.get(bias), DType::F32, Category::Workspace)?)?,
            None => mean.clone(),
        };
        Ok(BatchStatistics { mean_id, variance_id, mean, rstd: rstd.clone(), count, group, eps: self.eps })
    }

    /// Leaves what the backward pass needs, and what was measured over `count` rows.
    fn leave(
        &self,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        count: usize,
        ctx: &mut ForwardContext<'_>,
    ) -> Result<()> {
        ctx.statistics.push(self.measured(&mean, &rstd, count, 0, ctx.weights)?);
        [x, mean, rstd].into_iter().for_each(|tensor| ctx.stash.push(tensor));
        Ok(())
    }

    fn epilogue<'a>(&self, plus: Option<&'a Tensor>) -> NormEpilogue<'a> {
        NormEpilogue { plus, relu: self.relu }
    }

    /// Leaves the output where ReLU made it: as ReLU by itself does, and what reads it keeps it anyway.
    fn leave_output(&self, y: Tensor, ctx: &mut ForwardContext<'_>) -> Tensor {
        if self.relu {
            ctx.stash.push(y.clone());
        }
        y
    }

    /// The output, and `plus` added to it before ReLU.
    pub(crate) fn forward_with(
        &self,
        x: Tensor,
        plus: Option<Tensor>,
        ctx: &mut ForwardContext<'_>,
    ) -> Result<Tensor> {
        let (scale, shift) = (ctx.weights.get(self.scale), ctx.weights.get(self.shift));
        if ctx.mode == Mode::Evaluate {
            let (mean, variance) =
                (ctx.weights.buffer(self.running_mean), ctx.weights.buffer(self.running_variance));
            let epilogue = self.epilogue(plus.as_ref());
            return Ok(batch_norm::evaluate(&x, scale, shift, mean, variance, self.eps, epilogue)?);
        }
        let groups = self.groups(&x);
        if groups > 1 {
            let y = self.forward_groups(x, groups, ctx)?;
            let y = match plus {
                Some(plus) => sum(y, plus)?,
                None => y,
            };
            let y = if self.relu { activation::forward_owned(ActivationFn::Relu, y)? } else { y };
            return Ok(self.leave_output(y, ctx));
        }
        let (y, mean, rstd) = batch_norm::forward(&x, scale, shift, self.eps, self.epilogue(plus.as_ref()))?;
        let count = x.rows();
        self.leave(x, mean, rstd, count, ctx)?;
        Ok(self.leave_output(y, ctx))
    }

    /// From the gradient of the output to that of the input and, where something was `added` before ReLU, to
    /// that of it.
    pub(crate) fn backward_with(
        &self,
        dy: Tensor,
        added: bool,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let groups = self.groups(&dy);
        if !self.relu || groups > 1 {
            let dy = self.before_relu(dy, ctx)?;
            let plus = added.then(|| dy.clone());
            let dx =
                if groups > 1 { self.backward_groups(dy, groups, ctx) } else { self.backward_all(dy, ctx) };
            return Ok((dx?, plus));
        }
        let y = ctx.stash.pop();
        let (rstd, mean, x) = (ctx.stash.pop(), ctx.stash.pop(), ctx.stash.pop());
        let weights = [self.scale, self.shift].map(|id| ctx.weights.get(id));
        let (dx, scale, shift, plus) = batch_norm::backward_relu(dy, &x, &y, weights, [&mean, &rstd], added)?;
        self.send_gradients(scale, shift, ctx)?;
        Ok((dx, plus))
    }

    /// The gradient of what ReLU reads, where there is one, as a step of its own.
    pub(crate) fn before_relu(&self, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        if !self.relu {
            return Ok(dy);
        }
        Ok(activation::backward(ActivationFn::Relu, &ctx.stash.pop(), dy)?)
    }

    fn backward_all(&self, dy: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let (rstd, mean, x) = (ctx.stash.pop(), ctx.stash.pop(), ctx.stash.pop());
        let scale = ctx.weights.get(self.scale);
        let (dx, scale, shift) = batch_norm::backward(&dy, &x, scale, &mean, &rstd)?;
        self.send_gradients(scale, shift, ctx)?;
        Ok(dx)
    }

    /// Normalises by the numbers of [`batch_norm::measure`], added up over all that hold rows of the batch.
    pub fn normalise(
        &self,
        x: Tensor,
        plus: Option<Tensor>,
        sums: &[f64],
        ctx: &mut ForwardContext<'_>,
    ) -> Result<Tensor> {
        let (scale, shift) = (ctx.weights.get(self.scale), ctx.weights.get(self.shift));
        let epilogue = self.epilogue(plus.as_ref());
        let (y, mean, rstd, count) = batch_norm::normalise(&x, scale, shift, self.eps, sums, epilogue)?;
        self.leave(x, mean, rstd, count, ctx)?;
        Ok(self.leave_output(y, ctx))
    }

    /// The backward pass of [`BatchNorm::normalise`]. `all_reduce` adds up what it is given over all that
    /// hold rows of the batch; gradients of scale and shift are those of the local rows.
    pub(crate) fn backward_through(
        &self,
        dy: Tensor,
        all_reduce: impl FnOnce(Vec<f64>) -> Result<Vec<f64>>,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<Tensor> {
        let (rstd, mean, x) = (ctx.stash.pop(), ctx.stash.pop(), ctx.stash.pop());
        let scale = ctx.weights.get(self.scale);
        let local = batch_norm::measure_gradient(&dy, &x, &mean)?;
        let all = all_reduce(local.clone())?;
        let dx = batch_norm::input_gradient(&dy, &x, scale, &mean, &rstd, &all)?;
        let (of_scale, of_shift) = batch_norm::scale_and_shift(scale, &rstd, &local)?;
        self.send_gradients(of_scale, of_shift, ctx)?;
        Ok(dx)
    }

    /// Hands over gradients that come with that of the input: nothing is left to be read for them.
    fn send_gradients(&self, scale: Tensor, shift: Tensor, ctx: &mut BackwardContext<'_>) -> Result<()> {
        let made = WeightGradients::new([], move |_| Ok(vec![scale, shift]));
        ctx.sink.accept(&[self.scale, self.shift], made)
    }

    /// One group after the other: leaves the input, then mean and deviation of each.
    fn forward_groups(&self, x: Tensor, groups: usize, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let (scale, shift) = (ctx.weights.get(self.scale), ctx.weights.get(self.shift));
        let rows = x.rows() / groups;
        let (mut y, mut left) = (x.empty_like(Category::Transient)?, Vec::new());
        for group in 0..groups {
            let group_rows = rows::take(&x, group * rows..(group + 1) * rows, Category::Workspace)?;
            let (group_rows, mean, rstd) =
                batch_norm::forward(&group_rows, scale, shift, self.eps, NormEpilogue::default())?;
            rows::put(&mut y, group * rows, &group_rows)?;
            ctx.statistics.push(self.measured(&mean, &rstd, rows, group, ctx.weights)?);
            left.extend([mean, rstd]);
        }
        ctx.stash.push(x);
        left.into_iter().for_each(|tensor| ctx.stash.push(tensor));
        Ok(y)
    }

    fn backward_groups(&self, dy: Tensor, groups: usize, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let rows = dy.rows() / groups;
        let mut left: Vec<(Tensor, Tensor)> =
            (0..groups).map(|_| (ctx.stash.pop(), ctx.stash.pop())).collect();
        left.reverse();
        let (x, scale) = (ctx.stash.pop(), ctx.weights.get(self.scale));
        let mut dx = x.empty_like(Category::Transient)?;
        let mut sums: Option<(Tensor, Tensor)> = None;
        for (group, (rstd, mean)) in left.into_iter().enumerate() {
            let group_rows =
                |of: &Tensor| rows::take(of, group * rows..(group + 1) * rows, Category::Workspace);
            let (group_rows, of_scale, of_shift) =
                batch_norm::backward(&group_rows(&dy)?, &group_rows(&x)?, scale, &mean, &rstd)?;
            rows::put(&mut dx, group * rows, &group_rows)?;
            // Summed in f32, whatever the weights are.
            let wide = |local: Tensor| cast(&local, DType::F32, Category::Workspace);
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
        self.send_gradients(of_scale, of_shift, ctx)?;
        Ok(dx)
    }
}

impl BatchStatistics {
    /// Folds the batch's statistics into the running mean and variance of its norm.
    pub fn fold_into(&self, [mean, variance]: [&mut Tensor; 2]) -> Result<()> {
        Ok(batch_norm::fold(&self.mean, &self.rstd, self.count, self.eps, mean, variance)?)
    }
}

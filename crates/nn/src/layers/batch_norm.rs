//! Batch norm, with its learnt scale and shift, its running statistics and its groups of samples; and with
//! the ReLU behind it, and the sum before that, as residual networks have them.

use std::ops::Range;

use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::batch_norm::NormEpilogue;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add, add_into};
use espalier_tensor::ops::{batch_norm, rows};
use espalier_tensor::{Category, DType, Tensor};

use super::conv::leaves_bias_out;
use super::{BackwardContext, BatchStatistics, ForwardContext, MaxPool, Mode, WeightGradients, sum};
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

/// What a norm has kept: its input, and mean and deviation of each group of samples.
#[derive(Debug)]
pub(crate) struct NormInput {
    pub x: Tensor,
    statistics: Vec<[Tensor; 2]>,
}

impl NormInput {
    /// The statistics, where all samples are one group.
    pub fn single(&self) -> Option<&[Tensor; 2]> {
        if let [one] = &self.statistics[..] { Some(one) } else { None }
    }

    /// The rows of each group, and its statistics.
    fn groups(&self) -> impl Iterator<Item = (Range<usize>, &[Tensor; 2])> {
        let rows = self.x.rows() / self.statistics.len();
        self.statistics.iter().enumerate().map(move |(i, statistics)| (i * rows..(i + 1) * rows, statistics))
    }
}

/// The gradients of what a norm reads, and of its scale and shift.
#[derive(Debug)]
pub(crate) struct NormGradients {
    pub dx: Tensor,
    pub scale: Tensor,
    pub shift: Tensor,
}

impl NormGradients {
    pub fn of((dx, scale, shift): (Tensor, Tensor, Tensor)) -> NormGradients {
        NormGradients { dx, scale, shift }
    }
}

impl BatchNorm {
    /// How many groups samples are split into; those that do not fit (a few that a pruning method reads) are one.
    pub fn groups(&self, x: &Tensor) -> usize {
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

    /// The output, and `plus` added to it before ReLU.
    pub fn run(&self, x: Tensor, plus: Option<Tensor>, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
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
            return if self.relu { Ok(activation::forward_owned(ActivationFn::Relu, y)?) } else { Ok(y) };
        }
        let (y, mean, rstd) = batch_norm::forward(&x, scale, shift, self.eps, self.epilogue(plus.as_ref()))?;
        let count = x.rows();
        self.leave(x, mean, rstd, count, ctx)?;
        Ok(y)
    }

    /// Measures all of x, and gives what a pool makes of the output. Leaves what both need.
    pub fn run_pooled(&self, x: Tensor, pool: &MaxPool, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let weights = [self.scale, self.shift].map(|id| ctx.weights.get(id));
        let (y, places, [mean, rstd]) = batch_norm::forward_max(&x, weights, self.eps, pool.pool, pool.relu)?;
        let count = x.rows();
        self.leave(x, mean, rstd, count, ctx)?;
        ctx.stash.push(places);
        Ok(y)
    }

    /// Normalises by the numbers of [`batch_norm::measure`], added up over all that hold rows of the batch.
    pub fn run_by(
        &self,
        sums: &[f64],
        x: Tensor,
        plus: Option<Tensor>,
        ctx: &mut ForwardContext<'_>,
    ) -> Result<Tensor> {
        let (scale, shift) = (ctx.weights.get(self.scale), ctx.weights.get(self.shift));
        let epilogue = self.epilogue(plus.as_ref());
        let (y, mean, rstd, count) = batch_norm::normalise(&x, scale, shift, self.eps, sums, epilogue)?;
        self.leave(x, mean, rstd, count, ctx)?;
        Ok(y)
    }

    /// Takes what the forward pass has left, which was of so many groups.
    pub fn pop(&self, groups: usize, ctx: &mut BackwardContext<'_>) -> NormInput {
        let of_group = |_| {
            let rstd = ctx.stash.pop();
            [ctx.stash.pop(), rstd]
        };
        let mut statistics: Vec<[Tensor; 2]> = (0..groups).map(of_group).collect();
        statistics.reverse();
        NormInput { x: ctx.stash.pop(), statistics }
    }

    /// The output once more, ReLU included.
    pub fn remake(&self, input: &NormInput, weights: &dyn WeightStore) -> Result<Tensor> {
        let weights = [self.scale, self.shift].map(|id| weights.get(id));
        let one = |x: &Tensor, [mean, rstd]: &[Tensor; 2]| {
            batch_norm::remake(x, weights, [mean, rstd], self.epilogue(None))
        };
        if let Some(statistics) = input.single() {
            return Ok(one(&input.x, statistics)?);
        }
        let mut y = input.x.empty_like(Category::Transient)?;
        for (at, statistics) in input.groups() {
            let start = at.start;
            let x = rows::take(&input.x, at, Category::Workspace)?;
            rows::put(&mut y, start, &one(&x, statistics)?)?;
        }
        Ok(y)
    }

    /// The gradients for that of what ReLU reads, where there is one.
    pub fn gradients(
        &self,
        dy: &Tensor,
        input: &NormInput,
        weights: &dyn WeightStore,
    ) -> Result<NormGradients> {
        let scale = weights.get(self.scale);
        if let Some([mean, rstd]) = input.single() {
            return Ok(NormGradients::of(batch_norm::backward(dy, &input.x, scale, mean, rstd)?));
        }
        let mut dx = input.x.empty_like(Category::Transient)?;
        let mut sums: Option<(Tensor, Tensor)> = None;
        for (at, [mean, rstd]) in input.groups() {
            let group_rows = |of: &Tensor| rows::take(of, at.clone(), Category::Workspace);
            let (group_rows, of_scale, of_shift) =
                batch_norm::backward(&group_rows(dy)?, &group_rows(&input.x)?, scale, mean, rstd)?;
            rows::put(&mut dx, at.start, &group_rows)?;
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
        let narrow = |sum: Tensor| cast(&sum, scale.dtype(), Category::Workspace);
        Ok(NormGradients { dx, scale: narrow(of_scale)?, shift: narrow(of_shift)? })
    }

    /// The same behind [`BatchNorm::run_by`]. `all_reduce` adds up what it is given over all that hold rows of
    /// the batch; gradients of scale and shift are those of the local rows.
    pub fn gradients_through(
        &self,
        dy: &Tensor,
        input: &NormInput,
        all_reduce: impl FnOnce(Vec<f64>) -> Result<Vec<f64>>,
        weights: &dyn WeightStore,
    ) -> Result<NormGradients> {
        let scale = weights.get(self.scale);
        let [mean, rstd] = input.single().expect("ranks share the statistics of one group");
        let local = batch_norm::measure_gradient(dy, &input.x, mean)?;
        let all = all_reduce(local.clone())?;
        let dx = batch_norm::input_gradient(dy, &input.x, scale, mean, rstd, &all)?;
        let (scale, shift) = batch_norm::scale_and_shift(scale, rstd, &local)?;
        Ok(NormGradients { dx, scale, shift })
    }

    /// Hands over gradients that come with that of the input: nothing is left to be read for them.
    pub fn send_gradients(&self, scale: Tensor, shift: Tensor, ctx: &mut BackwardContext<'_>) -> Result<()> {
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
}

impl BatchStatistics {
    /// Folds the batch's statistics into the running mean and variance of its norm.
    pub fn fold_into(&self, [mean, variance]: [&mut Tensor; 2]) -> Result<()> {
        Ok(batch_norm::fold(&self.mean, &self.rstd, self.count, self.eps, mean, variance)?)
    }
}

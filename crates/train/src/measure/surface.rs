//! The mean loss over training samples as a function of the kept weights, with its first and second derivatives.
//!
//! A point is a set of weights in f32, a direction a tensor for each parameter, zero wherever a weight is
//! pruned: what is gone is no dimension of this space. Biases and the parameters of norms are.
//!
//! The loss is the one that training sees: batch norm normalises each micro-batch by itself, dropout drops
//! what it would drop in the first step, so that the function is the same whenever it is asked.

use espalier_data::{DataSplit, spread};
use espalier_nn::weights::{ParameterId, Weights, name_key};
use espalier_tensor::ops::compress::apply;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::{Category, DType, Tensor, random};

use crate::context::TrainContext;
use crate::prune::gradient::{ScoringSamples, gradient_and_totals};
use crate::prune::hessian::Curvature;
use crate::state::ParamStore;
use crate::step::NoUpdatePass;
use crate::trainer::Trainer;
use crate::{Error, Result};

/// Apart from every other use of the run's seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"measure ");

/// A vector of the space of kept weights: a tensor for each parameter of [`LossSurface::ids`], zero where
/// weights are pruned.
pub type Direction = Vec<Tensor>;

/// Which samples the loss is a mean over.
#[derive(Debug, Clone, Copy, Default)]
pub struct LossSamples {
    /// Training samples, spread evenly over all of them; none: all.
    pub samples: Option<usize>,
    /// How many run at a time; none: as many as in the run. To a model with batch norm another number is
    /// another loss.
    pub micro_batch: Option<usize>,
}

/// The loss around a network's weights.
#[derive(Debug)]
pub struct LossSurface<'a> {
    pub(super) context: &'a TrainContext,
    params: &'a ParamStore,
    ids: Vec<ParameterId>,
    samples: Vec<(u64, usize)>,
    pub(super) micro_batch: usize,
}

impl<'a> LossSurface<'a> {
    /// Around the weights of a trainer as they are now; nothing of the run changes by it. All ranks must, and
    /// those that have gone apart must have come together ([`Trainer::average`]).
    pub fn of(trainer: &'a Trainer, over: LossSamples) -> Result<LossSurface<'a>> {
        LossSurface::new(trainer.context(), trainer.params(), over)
    }

    /// Around these weights, pruned by these masks, over some samples; an error where there are not so many.
    pub fn new(
        context: &'a TrainContext,
        params: &'a ParamStore,
        over: LossSamples,
    ) -> Result<LossSurface<'a>> {
        let all = context.dataset.len(DataSplit::Train);
        let count = over.samples.unwrap_or(all);
        if count == 0 || count > all {
            let problem = format!("is {count}, and there are {all} training samples: it must be 1 to {all}");
            return Err(espalier_plan::Error::Conflict { field: "samples".into(), problem }.into());
        }
        Ok(LossSurface {
            context,
            params,
            ids: params.ids().collect(),
            samples: (0..count).map(|i| (0, spread(i, count, all))).collect(),
            micro_batch: over.micro_batch.unwrap_or(context.plan.batch.micro_batch).min(count),
        })
    }

    /// The parameters that this rank holds, in the order of a direction's tensors.
    pub fn ids(&self) -> &[ParameterId] {
        &self.ids
    }

    /// How many samples the loss is a mean over.
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// How many full micro-batches they are.
    pub fn micro_batches(&self) -> usize {
        self.samples.len() / self.micro_batch
    }

    /// The dimension of the space: weights that are kept, and all parameters that cannot be pruned.
    pub fn dimension(&self) -> Result<u64> {
        let kept = |id: &&ParameterId| self.context.is_owner(**id);
        let len = |id: &ParameterId| self.params.param(*id).kept() as u64;
        Ok(self.context.ranks.all_reduce_over_replica(vec![self.ids.iter().filter(kept).map(len).sum()])?[0])
    }

    /// The point in the middle: the network's own weights, as f32.
    pub fn center(&self) -> Result<Weights> {
        self.mask(self.params.widened()?)
    }

    /// Weights as a point of the space: in f32, zero where they are pruned.
    pub fn masked(&self, weights: &Weights) -> Result<Weights> {
        self.mask(weights.widened()?)
    }

    fn mask(&self, mut point: Weights) -> Result<Weights> {
        for (id, mask) in self.params.masks() {
            apply(point.get_mut(id), mask)?;
        }
        Ok(point)
    }

    /// The mean loss at a point, and its gradient there.
    pub fn loss_and_gradient(&self, at: &Weights) -> Result<(f64, Direction)> {
        let (gradient, totals) = gradient_and_totals(self.no_update_pass(at), &self.ids, self.scored())?;
        Ok((totals.of_all(&self.context.ranks)?.loss(), self.kept(gradient)?))
    }

    /// The Hessian at the network's own weights times a direction.
    pub fn hessian_product(&self, direction: &[Tensor]) -> Result<Direction> {
        let mut curvature = Curvature::new(self.params, &self.ids, self.scored())?;
        self.kept(curvature.hessian_product(direction)?)
    }

    /// The product of two directions.
    pub fn dot(&self, a: &[Tensor], b: &[Tensor]) -> Result<f64> {
        self.context.dot(&self.ids, a, b)
    }

    /// The length of a direction.
    pub fn norm(&self, a: &[Tensor]) -> Result<f64> {
        let tensors: Vec<_> = self.ids.iter().copied().zip(a).collect();
        Ok(self.context.squared_norm(&tensors)?.sqrt())
    }

    /// From one point to another.
    pub fn between(&self, from: &Weights, to: &Weights) -> Result<Direction> {
        let one = |id: &ParameterId| {
            let mut difference = from.widened_one(*id, Category::Scoring)?;
            scale_into(&mut difference, -1.0)?;
            add_into(&mut difference, to.get(*id))?;
            Ok(difference)
        };
        self.kept(self.ids.iter().map(one).collect::<Result<_>>()?)
    }

    /// The point so many times a direction away from another.
    pub fn moved(&self, from: &Weights, direction: &[Tensor], times: f64) -> Result<Weights> {
        let mut point = from.widened()?;
        for (id, direction) in self.ids.iter().zip(direction) {
            add_times(point.get_mut(*id), times, direction)?;
        }
        Ok(point)
    }

    /// A direction of signs, each as likely as the other: element for element the same on any layout of ranks.
    pub(crate) fn random_signs(&self, number: u64) -> Result<Direction> {
        let one = |id: &ParameterId| {
            let param = self.params.param(*id);
            let stream = random::key(self.context.plan.seed ^ PURPOSE, name_key(&param.plan.name));
            let stream = random::key(stream, number);
            let indices = param.plan.shard.runs().flat_map(|run| run.in_full..run.in_full + run.length);
            let sign = |index: usize| if random::bits(stream, index as u64) & 1 == 0 { 1.0 } else { -1.0 };
            let signs: Vec<f32> = indices.map(sign).collect();
            let (device, shape) = (&self.context.device, param.plan.shard.shape());
            Ok(Tensor::from_f32(device, &shape, DType::F32, &signs, Category::Scoring)?)
        };
        self.kept(self.ids.iter().map(one).collect::<Result<_>>()?)
    }

    /// A direction without what it has at pruned weights.
    pub(super) fn kept(&self, mut direction: Direction) -> Result<Direction> {
        for (id, tensor) in self.ids.iter().zip(&mut direction) {
            if let Some(mask) = self.params.mask(*id) {
                apply(tensor, mask)?;
            }
        }
        Ok(direction)
    }

    /// Passes at a point, whatever the precision of the run.
    pub(super) fn no_update_pass<'b>(&'b self, at: &'b Weights) -> NoUpdatePass<'b> {
        NoUpdatePass { dtype: DType::F32, ..NoUpdatePass::of(self.context, at) }
    }

    pub(super) fn scored(&self) -> ScoringSamples<'_> {
        let random = random::key(self.context.plan.seed, PURPOSE);
        ScoringSamples { random, ..ScoringSamples::new(&self.samples, self.micro_batch, self.context) }
    }

    /// An error where a number came out that says nothing.
    pub(super) fn finite(&self, what: &str, value: f64) -> Result<f64> {
        match value.is_finite() {
            true => Ok(value),
            false => Err(Error::Unmeasurable { what: what.into() }),
        }
    }
}

/// y += times x.
pub(super) fn add_times(y: &mut Tensor, times: f64, x: &Tensor) -> Result<()> {
    let mut shift = x.duplicate(Category::Workspace)?;
    scale_into(&mut shift, times as f32)?;
    Ok(add_into(y, &shift)?)
}

/// Every tensor of a direction times a number.
pub(super) fn scale(direction: &mut [Tensor], by: f64) -> Result<()> {
    Ok(direction.iter_mut().try_for_each(|tensor| scale_into(tensor, by as f32))?)
}

/// One direction plus so many times another.
pub(super) fn add_direction(y: &mut [Tensor], times: f64, x: &[Tensor]) -> Result<()> {
    y.iter_mut().zip(x).try_for_each(|(y, x)| add_times(y, times, x))
}

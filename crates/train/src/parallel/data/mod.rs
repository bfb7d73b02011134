//! Data parallelism: how replicas come to the same weights, by what they share of gradients, state and
//! weights, and when.
//!
//! | | gradients | optimizer state | after a step |
//! |---|---|---|---|
//! | `replicated` | all-reduced, while the backward pass goes on | all of it on each rank | nothing |
//! | `zero` | reduce-scattered to where the state is: by the step (stage 1), or as each micro-batch makes them (stages 2 and 3) | a shard on each rank | kept weights are gathered; in stage 3 nothing is, and each block's when it runs |
//! | `local` | each rank's own | all of it on each rank | now and then weights and state are averaged |
//!
//! A step goes through the same four calls in each: gradients are accepted as layers make them, reductions
//! are finished, parameters are stepped, new weights are gathered.

mod bucket_filler;
pub(crate) mod local;
mod replicated;
pub(crate) mod zero;

use std::time::Instant;

use espalier_nn::layers::{GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::data_parallel::{DataParallelMode, ZeroStage};
use espalier_plan::traffic::Buckets;
use espalier_tensor::ops::update::{self, ParamUpdate, StepParams, TrustNorms, squared_norms};
use espalier_tensor::{DType, Tensor};

use self::replicated::Replicated;
use self::zero::Zero;
use super::model::ModelParallel;
use super::reduce_groups::ReduceGroups;
use crate::Result;
use crate::state::{Accumulator, NoiseNorms, Optimizer, ParamStore, gradient_elements};

/// How the updates of a step are shared.
pub enum DataParallel<'a> {
    /// Every replica has everything.
    Replicated(Replicated<'a>),
    /// Each rank has a shard of the optimizer's state.
    Zero(Zero<'a>),
    /// Each rank steps by itself.
    Local(Accumulator),
}

/// When the all-reduce of a bucket was under way.
#[derive(Debug, Clone, Copy)]
pub struct BucketTime {
    /// Its number in [`Buckets::list`].
    pub bucket: usize,
    /// When its last gradient was there.
    pub start: Instant,
    /// When the rank had waited for it.
    pub end: Instant,
}

/// What the gradient all-reduces of a step came to.
#[derive(Debug)]
pub struct ReduceReport {
    /// Bytes of the gradients that pruning may touch, when all of each was here.
    pub bytes: usize,
    /// When the all-reduces were under way.
    pub times: Vec<BucketTime>,
}

impl<'a> DataParallel<'a> {
    /// For parameters that these groups share, whose gradients travel in these buckets. Where `several`
    /// micro-batches come in a type, they are summed in f32. A rank that is `local` now steps by itself.
    pub fn new(
        mode: DataParallelMode,
        is_local: bool,
        params: &ParamStore,
        several: Option<DType>,
        groups: &'a ReduceGroups,
        buckets: &'a Buckets,
    ) -> DataParallel<'a> {
        let accumulator = Accumulator::new(params.len(), several);
        match mode {
            _ if is_local => DataParallel::Local(accumulator),
            DataParallelMode::Sharded(stage) if !groups.is_empty() => {
                DataParallel::Zero(Zero::new(accumulator, groups, buckets, stage >= ZeroStage::Gradients))
            }
            _ => DataParallel::Replicated(Replicated::new(accumulator, groups, buckets)),
        }
    }

    /// Stores a gradient that is complete, on a single rank.
    pub fn set_gradient(&mut self, id: ParameterId, gradient: Tensor) {
        self.accumulator().set_local(id, gradient);
    }

    fn accumulator(&mut self) -> &mut Accumulator {
        match self {
            DataParallel::Replicated(replicated) => &mut replicated.accumulator,
            DataParallel::Zero(zero) => &mut zero.accumulator,
            DataParallel::Local(accumulator) => accumulator,
        }
    }

    /// Says whether what comes next is the last of the step.
    pub fn last_micro_batch(&mut self, is_last: bool) {
        match self {
            DataParallel::Replicated(replicated) => replicated.is_last = is_last,
            DataParallel::Zero(zero) => zero.is_last = is_last,
            DataParallel::Local(_) => {}
        }
    }

    /// Takes the gradients of one layer, of one micro-batch.
    fn accept(&mut self, params: &ParamStore, gradients: Vec<(ParameterId, Tensor)>) -> Result<()> {
        match self {
            DataParallel::Replicated(replicated) => replicated.accept(params, gradients),
            DataParallel::Zero(zero) => zero.accept(params, gradients),
            DataParallel::Local(accumulator) => {
                gradients.into_iter().try_for_each(|(id, one)| accumulator.add(id, params.param(id), one))
            }
        }
    }

    /// Sends these now, and zeros for those that nothing came for. Copies of a stage see other micro-batches,
    /// perhaps none, and must send alike.
    pub(crate) fn reduce_all(&mut self, params: &ParamStore, ids: &[ParameterId]) -> Result<()> {
        for id in ids {
            if !self.accumulator().has(*id) {
                self.accumulator().set_reduced(*id, zeros(params, *id)?);
            }
        }
        match self {
            DataParallel::Replicated(replicated) => replicated.send_complete(params, ids),
            DataParallel::Zero(zero) => zero.send_complete(params, ids),
            DataParallel::Local(_) => Ok(()),
        }
    }

    /// Waits for all reductions, and gives each parameter its gradient: where ranks split its state, this
    /// rank's shard.
    pub fn finish(&mut self, params: &mut ParamStore) -> Result<ReduceReport> {
        let times = match self {
            DataParallel::Replicated(replicated) => replicated.finish(params)?,
            DataParallel::Zero(zero) => zero.finish(params)?,
            DataParallel::Local(_) => Vec::new(),
        };
        Ok(ReduceReport { bytes: self.accumulator().finish(params), times })
    }

    /// Whether each rank of a group has but a shard of a gradient, so that all of them count towards its norm.
    pub(crate) fn splits_gradients(&self) -> bool {
        matches!(self, DataParallel::Zero(_))
    }

    /// The squared norm of what this rank has of the gradients and counts: each element once in a replica, or
    /// where ranks split it, once in all.
    pub fn squared_norm(&self, params: &ParamStore) -> Result<f64> {
        params.squared_gradient_norm(|plan| match self {
            DataParallel::Replicated(_) => plan.is_owner,
            DataParallel::Zero(_) => plan.is_first_copy,
            DataParallel::Local(_) => true,
        })
    }

    /// Steps every parameter that has a gradient: on a GPU, in one launch. Norms that count are those of full
    /// tensors. Where ranks split the state weights are those of before until [`DataParallel::gather`].
    pub fn step(
        &mut self,
        params: &mut ParamStore,
        optimizer: &Optimizer,
        step: StepParams,
        model_parallel: &ModelParallel,
    ) -> Result<()> {
        if let DataParallel::Zero(zero) = self {
            return zero.step(params, optimizer, step, model_parallel);
        }
        let targets = params.iter_mut().filter_map(|(id, param)| Some((id, optimizer.target(param, None)?)));
        let (ids, targets): (Vec<ParameterId>, Vec<ParamUpdate<'_>>) = targets.unzip();
        if !optimizer.rule.adapts() || model_parallel.is_single() {
            return Ok(update::step(optimizer.rule, step, targets, TrustNorms::Measured)?);
        }
        let mut norms = squared_norms(optimizer.rule, step, &targets)?;
        model_parallel.full_norms(&ids, &mut norms)?;
        Ok(update::step(optimizer.rule, step, targets, TrustNorms::Given(&norms))?)
    }

    /// Gives all weights the values that the ranks have stepped, each its shard; nothing where no step was taken.
    pub fn gather(&mut self, params: &mut ParamStore) -> Result<()> {
        match self {
            DataParallel::Zero(zero) => zero.gather(params),
            DataParallel::Replicated(_) | DataParallel::Local(_) => Ok(()),
        }
    }
}

/// The sink through which layers hand their gradients to what reduces them; who measures noise sees each.
pub struct DataParallelSink<'b, 'a> {
    pub(crate) data_parallel: &'b mut DataParallel<'a>,
    pub(crate) params: &'b ParamStore,
    pub(crate) noise: Option<&'b mut NoiseNorms>,
}

impl<'b, 'a> DataParallelSink<'b, 'a> {
    /// Without a measurement of noise.
    pub fn new(data_parallel: &'b mut DataParallel<'a>, params: &'b ParamStore) -> DataParallelSink<'b, 'a> {
        DataParallelSink { data_parallel, params, noise: None }
    }
}

impl GradientSink for DataParallelSink<'_, '_> {
    fn accept(&mut self, ids: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        let made: Vec<(ParameterId, Tensor)> =
            ids.iter().copied().zip(gradients.make(gradient_elements(self.params))?).collect();
        if let Some(noise) = &mut self.noise {
            made.iter().try_for_each(|(id, gradient)| noise.add(*id, self.params.param(*id), gradient))?;
        }
        Ok(self.data_parallel.accept(self.params, made)?)
    }
}

/// What stands for a gradient that no micro-batch came for.
fn zeros(params: &ParamStore, id: ParameterId) -> Result<Tensor> {
    let param = params.param(id);
    let (device, dtype) = (param.device(), param.dtype());
    Ok(Tensor::zeros(&device, &param.state_shape(), dtype, espalier_tensor::Category::Gradients)?)
}

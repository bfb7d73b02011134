//! The gradient of the loss over chosen samples, for methods that score by it.
//!
//! Gradients of the micro-batches are added up in f32 whatever the precision of the run: in bf16 a sum over a
//! data set stands still after a few hundred of them. Only wanted gradients are made. Nothing of the model
//! changes: what batch norm measures is let go.
//!
//! Ranks along the data axis split the samples and add up what they found, in the order of ranks, so that all
//! have the same bits; stages that share a parameter add up what each has of its gradient. Dropout drops what
//! it would drop on one rank. Where batch norms measure over replicas each group of samples is split, so that
//! they see what they would see on one rank ([`ScoredBatch`]).

use std::collections::HashMap;

use espalier_comm::Reduce;
use espalier_data::DataSplit;
use espalier_nn::layers::{BatchSlice, GradientElements, GradientSink, NormGroup, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::layout::PartialAxes;
use espalier_plan::scoring::ScoredBatch;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::{Category, DType, Tensor};

use crate::Result;
use crate::context::TrainContext;
use crate::step::{LossConfig, NoUpdatePass, Totals};

/// Samples and how they are passed through a model.
#[derive(Debug, Clone, Copy)]
pub struct ScoringSamples<'a> {
    /// Training samples, each an epoch and an index.
    pub samples: &'a [(u64, usize)],
    /// How many run at a time, and whose.
    pub scored_batch: ScoredBatch,
    /// Whose samples batch norms measure together, where replicas do not split what runs at a time.
    pub norms: NormGroup,
    /// The key of dropout's random numbers.
    pub random: u64,
    /// The logits are divided by this.
    pub temperature: f32,
    /// The rank, which takes its slice of them.
    pub context: &'a TrainContext,
}

/// A parameter's gradient over all ranks' samples, as f32, from this rank's.
pub(crate) fn all_reduce_gradient(context: &TrainContext, id: ParameterId, local: Tensor) -> Result<Tensor> {
    let TrainContext { ranks, groups, stage, .. } = context;
    let local = match local.dtype() {
        DType::F32 => local,
        _ => cast(&local, DType::F32, Category::Workspace)?,
    };
    let is_partial = context.local().partial[id.0] != PartialAxes::default();
    if !context.param(id).is_tied && !is_partial {
        // Every copy of its stage saw all samples of the replica.
        return Ok(ranks.data().all_reduce(local, Reduce::Sum)?);
    }
    let Some(group) = groups.of(context.param(id).group) else { return Ok(local) };
    let mut reduced = group.all_reduce(local, Reduce::Sum)?;
    let copies = stage.placement().copies();
    if copies > 1 {
        scale_into(&mut reduced, 1.0 / copies as f32)?;
    }
    Ok(reduced)
}

/// A micro-batch of samples that are scored.
pub(crate) struct ScoringMicroBatch<'a> {
    pub samples: &'a [(u64, usize)],
    /// Where it stands among all of them.
    pub batch_slice: BatchSlice,
    /// Whether its gradients count: those of a sample that stands in do not.
    pub counts: bool,
}

impl<'a> ScoringSamples<'a> {
    /// Samples that each rank takes its slice of, so many at a time.
    pub fn new(
        samples: &'a [(u64, usize)],
        micro_batch: usize,
        context: &'a TrainContext,
    ) -> ScoringSamples<'a> {
        let (scored_batch, norms) = (ScoredBatch::of_each(micro_batch), NormGroup::Replica);
        ScoringSamples { samples, scored_batch, norms, random: 0, temperature: 1.0, context }
    }

    pub(crate) fn micro_batches(&self) -> Vec<ScoringMicroBatch<'a>> {
        let ScoringSamples { samples, scored_batch, norms, .. } = *self;
        if scored_batch.replicas == 1 {
            let local = self.context.ranks.batch_range(samples.len());
            let micro_batch = |(number, samples): (usize, &'a [(u64, usize)])| {
                let first = local.start + number * scored_batch.samples;
                let batch_slice = BatchSlice { first, samples: samples.len(), norms };
                ScoringMicroBatch { samples, batch_slice, counts: true }
            };
            return samples[local.clone()]
                .chunks(scored_batch.samples)
                .enumerate()
                .map(micro_batch)
                .collect();
        }
        let replica = self.context.ranks.data().rank();
        let shards_weights = self.context.plan.data_parallel.shards_weights();
        let micro_batch = |(number, group): (usize, &'a [(u64, usize)])| {
            let (local, together) = scored_batch.replica_slice(group.len(), replica);
            let stands_in = local.is_empty();
            let norms = if together { NormGroup::AllReplicas { stands_in } } else { NormGroup::Replica };
            // A rank that has none joins the all-reduces of the norms all the same, and gathers weights, with
            // another rank's sample.
            let local = if stands_in && (together || shards_weights) { 0..1 } else { local };
            let batch_slice = BatchSlice {
                first: number * scored_batch.samples + local.start,
                samples: local.len(),
                norms,
            };
            let counts = !stands_in;
            (!local.is_empty()).then(|| ScoringMicroBatch { samples: &group[local], batch_slice, counts })
        };
        samples.chunks(scored_batch.samples).enumerate().filter_map(micro_batch).collect()
    }

    /// The same where replicas have shards of the weights: each has as many as the one with most, the last of
    /// them perhaps a sample that stands in, so that all gather weights alike.
    pub(crate) fn micro_batches_of_all(&self) -> Vec<ScoringMicroBatch<'a>> {
        let ScoringSamples { samples, scored_batch, context, .. } = *self;
        let mut micro_batches = self.micro_batches();
        if context.plan.data_parallel.shards_weights() && scored_batch.replicas == 1 {
            let most = context.ranks.largest_range(samples.len()).div_ceil(scored_batch.samples);
            while micro_batches.len() < most {
                let batch_slice = BatchSlice { first: 0, samples: 1, norms: NormGroup::Replica };
                micro_batches.push(ScoringMicroBatch { samples: &samples[..1], batch_slice, counts: false });
            }
        }
        micro_batches
    }

    /// The mean over all samples.
    pub(crate) fn loss(&self) -> LossConfig {
        let ScoringSamples { samples, random, temperature, context, .. } = *self;
        let ignored = context.dataset.ignored(DataSplit::Train, samples);
        LossConfig { random, samples: samples.len(), ignored, temperature }
    }
}

/// The gradient of the mean loss over the samples with respect to some parameters, in their order, as f32.
pub fn gradient(
    no_update_pass: NoUpdatePass<'_>,
    wanted: &[ParameterId],
    scored: ScoringSamples<'_>,
) -> Result<Vec<Tensor>> {
    Ok(gradient_and_totals(no_update_pass, wanted, scored)?.0)
}

/// The same, and what came of this rank's own passes.
pub(crate) fn gradient_and_totals(
    no_update_pass: NoUpdatePass<'_>,
    wanted: &[ParameterId],
    scored: ScoringSamples<'_>,
) -> Result<(Vec<Tensor>, Totals)> {
    let (mut sums, mut nothing, mut totals) =
        (GradientSums::of(wanted), GradientSums::of(&[]), Totals::default());
    for ScoringMicroBatch { samples, batch_slice, counts } in scored.micro_batches_of_all() {
        let sink = if counts { &mut sums } else { &mut nothing };
        let total = no_update_pass.train(samples, scored.loss(), &batch_slice, &mut Vec::new(), sink)?;
        if counts {
            totals.add(total);
        }
    }
    Ok((sums.take(wanted, scored.context)?, totals))
}

/// Sums of wanted gradients.
pub(crate) struct GradientSums {
    sums: HashMap<ParameterId, Option<Tensor>>,
    /// What is added up is multiplied by this.
    pub factor: f32,
}

impl GradientSums {
    /// Empty sums of some parameters' gradients.
    pub fn of(wanted: &[ParameterId]) -> GradientSums {
        GradientSums { sums: wanted.iter().map(|id| (*id, None)).collect(), factor: 1.0 }
    }

    /// The sums of all of them, over all ranks.
    pub fn take(self, wanted: &[ParameterId], context: &TrainContext) -> Result<Vec<Tensor>> {
        let local = self.take_local(wanted, context)?;
        wanted.iter().zip(local).map(|(id, local)| all_reduce_gradient(context, *id, local)).collect()
    }

    /// The sums of all of them, of this rank's samples.
    pub(crate) fn take_local(
        mut self,
        wanted: &[ParameterId],
        context: &TrainContext,
    ) -> Result<Vec<Tensor>> {
        let local = |id| match self.sums.remove(id).expect("a parameter is wanted once") {
            Some(sum) => Ok(sum),
            // There were fewer samples than ranks.
            None => {
                let shape = context.param(*id).shard.shape();
                Ok(Tensor::zeros(&context.device, &shape, DType::F32, Category::Scoring)?)
            }
        };
        wanted.iter().map(local).collect()
    }
}

impl GradientSink for GradientSums {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        if !parameters.iter().any(|id| self.sums.contains_key(id)) {
            return Ok(());
        }
        for (id, mut gradient) in parameters.iter().zip(gradients.make(GradientElements::All)?) {
            let Some(sum) = self.sums.get_mut(id) else { continue };
            if self.factor != 1.0 {
                scale_into(&mut gradient, self.factor)?;
            }
            match sum {
                Some(sum) => add_into(sum, &gradient)?,
                empty if gradient.dtype() == DType::F32 => {
                    gradient.tag_memory(Category::Scoring);
                    *empty = Some(gradient);
                }
                empty => *empty = Some(cast(&gradient, DType::F32, Category::Scoring)?),
            }
        }
        Ok(())
    }
}

//! The gradient of the loss over chosen samples, for methods that score by it.
//!
//! Gradients of the micro-batches are added up in f32 whatever the precision of the run: in bf16 a sum over a data set
//! stands still after a few hundred of them. Only wanted gradients are made. Nothing of the model changes: what batch
//! norm measures is let go.
//!
//! Ranks along the data axis share the samples out and add up what they found, in the order of ranks, so that all have
//! the same bits; stages that share a parameter add up what each has of its gradient. Dropout drops what it would drop on
//! one rank. Where batch norms measure over replicas each group of samples is shared out, so that they see what they would see on one rank
//! ([`ScoredBatch`]).

use std::collections::HashMap;

use espalier_comm::Reduce;
use espalier_nn::layers::{BatchSlice, GradientSink, NormGroup, Wanted, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::layout::Partial;
use espalier_plan::scoring::ScoredBatch;
use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::{Category, DType, Tensor};

use crate::Result;
use crate::context::Context;
use crate::step::{Loss, Sweep, Totals};

/// Samples and how they are passed through a model.
#[derive(Debug, Clone, Copy)]
pub struct Scored<'a> {
    /// Training samples, each an epoch and an index.
    pub samples: &'a [(u64, usize)],
    /// How many run at a time, and whose.
    pub at_once: ScoredBatch,
    /// Whose samples batch norms measure together, where replicas do not share out what runs at a time.
    pub norms: NormGroup,
    /// The key of dropout's random numbers.
    pub random: u64,
    /// The logits are divided by this.
    pub temperature: f32,
    /// The rank, which takes its part of them.
    pub context: &'a Context,
}

/// A parameter's gradient over all ranks' samples, as f32, from this rank's.
pub(crate) fn sum_over_ranks(context: &Context, id: ParameterId, own: Tensor) -> Result<Tensor> {
    let Context { ranks, groups, stage, .. } = context;
    let own = match own.dtype() {
        DType::F32 => own,
        _ => cast(&own, DType::F32, Category::Workspace)?,
    };
    let is_partial = context.local().partial[id.0] != Partial::default();
    if !context.param(id).is_tied && !is_partial {
        // Every copy of its part saw all samples of the replica.
        return Ok(ranks.data().all_reduce(own, Reduce::Sum)?);
    }
    let Some(group) = groups.of(context.param(id).group) else { return Ok(own) };
    let mut sum = group.all_reduce(own, Reduce::Sum)?;
    let copies = stage.placement().copies();
    if copies > 1 {
        scale_into(&mut sum, 1.0 / copies as f32)?;
    }
    Ok(sum)
}

/// A micro-batch of samples that are scored.
pub(crate) struct ScoredPiece<'a> {
    pub samples: &'a [(u64, usize)],
    /// Where it stands among all of them.
    pub share: BatchSlice,
}

impl ScoredPiece<'_> {
    /// Whether its gradients count: those of a sample that stands in do not.
    pub fn counts(&self) -> bool {
        self.share.norms != NormGroup::AllReplicas { stands_in: true }
    }
}

impl<'a> Scored<'a> {
    /// Samples that each rank takes its part of, so many at a time.
    pub fn new(samples: &'a [(u64, usize)], micro_batch: usize, context: &'a Context) -> Scored<'a> {
        let (at_once, norms) = (ScoredBatch::of_each(micro_batch), NormGroup::Replica);
        Scored { samples, at_once, norms, random: 0, temperature: 1.0, context }
    }

    /// This rank's micro-batches.
    pub(crate) fn pieces(&self) -> Vec<ScoredPiece<'a>> {
        let Scored { samples, at_once, norms, .. } = *self;
        if at_once.replicas == 1 {
            let own = self.context.ranks.part(samples.len());
            let piece = |(number, part): (usize, &'a [(u64, usize)])| {
                let first = own.start + number * at_once.samples;
                ScoredPiece { samples: part, share: BatchSlice { first, samples: part.len(), norms } }
            };
            return samples[own.clone()].chunks(at_once.samples).enumerate().map(piece).collect();
        }
        let replica = self.context.ranks.data().rank();
        let piece = |(number, group): (usize, &'a [(u64, usize)])| {
            let (own, together) = at_once.part(group.len(), replica);
            let stands_in = own.is_empty();
            let norms = if together { NormGroup::AllReplicas { stands_in } } else { NormGroup::Replica };
            // Whoever has none comes to the sums of the norms all the same, with a sample of somebody else's.
            let own = if stands_in && together { 0..1 } else { own };
            let share = BatchSlice { first: number * at_once.samples + own.start, samples: own.len(), norms };
            (!own.is_empty()).then(|| ScoredPiece { samples: &group[own], share })
        };
        samples.chunks(at_once.samples).enumerate().filter_map(piece).collect()
    }

    /// The mean over all samples.
    pub(crate) fn loss(&self) -> Loss {
        Loss { random: self.random, samples: self.samples.len(), temperature: self.temperature }
    }
}

/// The gradient of the mean loss over the samples with respect to some parameters, in their order, as f32.
pub fn gradient(sweep: Sweep<'_>, wanted: &[ParameterId], scored: Scored<'_>) -> Result<Vec<Tensor>> {
    Ok(gradient_and_totals(sweep, wanted, scored)?.0)
}

/// The same, and what came of this rank's own passes.
pub(crate) fn gradient_and_totals(
    sweep: Sweep<'_>,
    wanted: &[ParameterId],
    scored: Scored<'_>,
) -> Result<(Vec<Tensor>, Totals)> {
    let (mut sums, mut totals) = (Sums::of(wanted), Totals::default());
    for piece in scored.pieces() {
        let pass =
            |sums: &mut Sums| sweep.train(piece.samples, scored.loss(), &piece.share, &mut Vec::new(), sums);
        match piece.counts() {
            true => totals.add(pass(&mut sums)?),
            false => drop(pass(&mut Sums::of(&[]))?),
        }
    }
    Ok((sums.take(wanted, scored.context)?, totals))
}

/// Sums of wanted gradients.
pub(crate) struct Sums {
    sums: HashMap<ParameterId, Option<Tensor>>,
    /// What is added up is multiplied by this.
    pub factor: f32,
}

impl Sums {
    /// Empty sums of some parameters' gradients.
    pub fn of(wanted: &[ParameterId]) -> Sums {
        Sums { sums: wanted.iter().map(|id| (*id, None)).collect(), factor: 1.0 }
    }

    /// The sums of all of them, over all ranks.
    pub fn take(self, wanted: &[ParameterId], context: &Context) -> Result<Vec<Tensor>> {
        let own = self.take_own(wanted, context)?;
        wanted.iter().zip(own).map(|(id, own)| sum_over_ranks(context, *id, own)).collect()
    }

    /// The sums of all of them, of this rank's samples.
    pub fn take_own(mut self, wanted: &[ParameterId], context: &Context) -> Result<Vec<Tensor>> {
        let own = |id| match self.sums.remove(id).expect("a parameter is wanted once") {
            Some(sum) => Ok(sum),
            // There were fewer samples than ranks.
            None => {
                let shape = context.param(*id).shard.shape();
                Ok(Tensor::zeros(&context.device, &shape, DType::F32, Category::Scoring)?)
            }
        };
        wanted.iter().map(own).collect()
    }
}

impl GradientSink for Sums {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        if !parameters.iter().any(|id| self.sums.contains_key(id)) {
            return Ok(());
        }
        for (id, mut gradient) in parameters.iter().zip(gradients.make(Wanted::All)?) {
            let Some(sum) = self.sums.get_mut(id) else { continue };
            if self.factor != 1.0 {
                scale_into(&mut gradient, self.factor)?;
            }
            match sum {
                Some(sum) => add_into(sum, &gradient)?,
                empty if gradient.dtype() == DType::F32 => {
                    gradient.book_as(Category::Scoring);
                    *empty = Some(gradient);
                }
                empty => *empty = Some(cast(&gradient, DType::F32, Category::Scoring)?),
            }
        }
        Ok(())
    }
}

//! The gradient of the loss over chosen samples, for methods that score by it.
//!
//! Gradients of the micro-batches are added up in f32 whatever the precision of the run: in bf16 a sum over a data set
//! stands still after a few hundred of them. Only wanted gradients are made. Nothing of the model changes: what batch
//! norm measures is let go.

use std::collections::HashMap;

use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::{Category, DType, Tensor, random};

use crate::Result;
use crate::layers::{GradientSink, WeightGradients};
use crate::pass::{Loss, Pass};
use crate::weights::ParameterId;

/// Samples and how they are passed through a model.
#[derive(Debug, Clone, Copy)]
pub struct Scored<'a> {
    /// Training samples, each an epoch and an index.
    pub samples: &'a [(u64, usize)],
    /// How many run at a time.
    pub micro_batch: usize,
    /// The key of dropout's random numbers.
    pub random: u64,
    /// The logits are divided by this.
    pub temperature: f32,
}

impl<'a> Scored<'a> {
    /// The micro-batches, each with its loss.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (&'a [(u64, usize)], Loss)> + use<'a> {
        let Scored { samples, micro_batch, random, temperature } = *self;
        samples.chunks(micro_batch).enumerate().map(move |(piece, part)| {
            let random = random::key(random, piece as u64);
            (part, Loss { random, samples: samples.len(), temperature })
        })
    }
}

/// The gradient of the mean loss over the samples with respect to some parameters, in their order, as f32.
pub fn gradient(pass: Pass<'_>, wanted: &[ParameterId], scored: Scored<'_>) -> Result<Vec<Tensor>> {
    let mut sums = Sums::of(wanted);
    for (samples, loss) in scored.pieces() {
        pass.train(samples, loss, &mut Vec::new(), &mut sums)?;
    }
    Ok(sums.take(wanted))
}

/// Sums of wanted gradients.
pub(super) struct Sums {
    sums: HashMap<ParameterId, Option<Tensor>>,
    /// What is added up is multiplied by this.
    pub factor: f32,
}

impl Sums {
    /// Of some parameters.
    pub fn of(wanted: &[ParameterId]) -> Sums {
        Sums { sums: wanted.iter().map(|id| (*id, None)).collect(), factor: 1.0 }
    }

    /// The sums of all of them.
    pub fn take(mut self, wanted: &[ParameterId]) -> Vec<Tensor> {
        let sum =
            |id| self.sums.remove(id).flatten().expect("every parameter has a gradient, and is wanted once");
        wanted.iter().map(sum).collect()
    }
}

impl GradientSink for Sums {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        if !parameters.iter().any(|id| self.sums.contains_key(id)) {
            return Ok(());
        }
        for (id, mut gradient) in parameters.iter().zip(gradients()?) {
            let Some(sum) = self.sums.get_mut(id) else { continue };
            if self.factor != 1.0 {
                scale_into(&mut gradient, self.factor)?;
            }
            match sum {
                Some(sum) => add_into(sum, &gradient)?,
                empty if gradient.dtype() == DType::F32 => *empty = Some(gradient),
                empty => *empty = Some(cast(&gradient, DType::F32, Category::Workspace)?),
            }
        }
        Ok(())
    }
}

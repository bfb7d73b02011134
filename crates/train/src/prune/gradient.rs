//! The gradient of the loss over chosen samples, for methods that score by it.
//!
//! Gradients of the micro-batches are added up in f32 whatever the precision of the run: in bf16 a sum over a data set
//! stands still after a few hundred of them. Only wanted gradients are made. Nothing of the model changes: what batch
//! norm measures is let go.

use std::collections::HashMap;

use espalier_tensor::ops::cast::cast;
use espalier_tensor::ops::elementwise::add_into;
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

/// The gradient of the mean loss over the samples with respect to some parameters, in their order, as f32.
pub fn gradient(pass: Pass<'_>, wanted: &[ParameterId], scored: Scored<'_>) -> Result<Vec<Tensor>> {
    let mut sums = Sums { sums: wanted.iter().map(|id| (*id, None)).collect() };
    for (piece, samples) in scored.samples.chunks(scored.micro_batch).enumerate() {
        let random = random::key(scored.random, piece as u64);
        let loss = Loss { random, samples: scored.samples.len(), temperature: scored.temperature };
        pass.train(samples, loss, &mut Vec::new(), &mut sums)?;
    }
    let sum =
        |id| sums.sums.remove(id).flatten().expect("every parameter has a gradient, and is wanted once");
    Ok(wanted.iter().map(sum).collect())
}

/// Sums of wanted gradients.
struct Sums {
    sums: HashMap<ParameterId, Option<Tensor>>,
}

impl GradientSink for Sums {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        if !parameters.iter().any(|id| self.sums.contains_key(id)) {
            return Ok(());
        }
        for (id, gradient) in parameters.iter().zip(gradients()?) {
            match self.sums.get_mut(id) {
                None => {}
                Some(Some(sum)) => add_into(sum, &gradient),
                Some(empty) if gradient.dtype() == DType::F32 => *empty = Some(gradient),
                Some(empty) => *empty = Some(cast(&gradient, DType::F32, Category::Workspace)?),
            }
        }
        Ok(())
    }
}

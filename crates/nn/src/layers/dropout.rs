//! Dropout whose mask is never stored: both passes sample it from the same key. What is dropped of a sample
//! depends on its number within the step, and not on the micro-batch or the rank that it is in; of an element
//! of a shard, on its index in the full tensor.

use espalier_plan::spec::DropoutIndices;
use espalier_plan::split::split;
use espalier_tensor::ops::dropout::{self, ElementNumbering};
use espalier_tensor::{Tensor, random};

use super::{BackwardContext, BatchSlice, ForwardContext, Layer, Mode};
use crate::Result;

/// Drops elements with probability `rate`; `index` keeps the layers of a model apart.
#[derive(Debug)]
pub(crate) struct Dropout {
    pub rate: f32,
    pub index: u64,
    /// Where the elements lie in the full tensor, where they are a shard of it.
    pub counted: Option<DropoutIndices>,
}

impl Dropout {
    fn apply(&self, x: &Tensor, random: u64, batch_slice: &BatchSlice) -> Result<Tensor> {
        let of_each = x.len() / batch_slice.samples.max(1);
        let numbers = match self.counted {
            None => ElementNumbering::from(batch_slice.first_element(of_each)),
            Some(DropoutIndices::Runs { first, run, of }) => {
                let first = batch_slice.first_element(of_each / run * of) + first as u64;
                ElementNumbering { first, run: run as u64, of: of as u64 }
            }
            Some(DropoutIndices::Samples { ranks, rank }) => {
                let own = split(batch_slice.samples, ranks, rank);
                let of_each = x.len() / own.len().max(1);
                ElementNumbering::from((batch_slice.first + own.start) as u64 * of_each as u64)
            }
        };
        Ok(dropout::apply(x, self.rate, random::key(random, self.index), numbers)?)
    }
}

impl Layer for Dropout {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        match ctx.mode {
            Mode::Train => self.apply(&x, ctx.random, &ctx.batch_slice),
            Mode::Evaluate => Ok(x),
        }
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        self.apply(&dy, ctx.random, &ctx.batch_slice).map(Some)
    }
}

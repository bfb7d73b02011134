//! Dropout whose mask is never stored: both passes draw it from the same key. What is dropped of a sample depends on its
//! number within the step, and not on the micro-batch or the rank that it is in; of an element that lies in a part of a tensor, on its
//! place in the whole.

use espalier_plan::spec::Counted;
use espalier_plan::split::split;
use espalier_tensor::ops::dropout::{self, Numbers};
use espalier_tensor::{Tensor, random};

use super::{Backward, BatchSlice, Forward, Layer, Mode};
use crate::Result;

/// Drops elements with probability `rate`; `index` keeps the layers of a model apart.
#[derive(Debug)]
pub(crate) struct Dropout {
    pub rate: f32,
    pub index: u64,
    /// Where the elements lie in the whole, where they are a part of it.
    pub counted: Option<Counted>,
}

impl Dropout {
    fn apply(&self, x: &Tensor, random: u64, share: &BatchSlice) -> Result<Tensor> {
        let of_each = x.len() / share.samples.max(1);
        let numbers = match self.counted {
            None => Numbers::from(share.first_element(of_each)),
            Some(Counted::Runs { first, run, of }) => {
                let first = share.first_element(of_each / run * of) + first as u64;
                Numbers { first, run: run as u64, of: of as u64 }
            }
            Some(Counted::Samples { ranks, rank }) => {
                let own = split(share.samples, ranks, rank);
                let of_each = x.len() / own.len().max(1);
                Numbers::from((share.first + own.start) as u64 * of_each as u64)
            }
        };
        Ok(dropout::apply(x, self.rate, random::key(random, self.index), numbers)?)
    }
}

impl Layer for Dropout {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        match pass.mode {
            Mode::Train => self.apply(&x, pass.random, &pass.share),
            Mode::Evaluate => Ok(x),
        }
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        self.apply(&dy, pass.random, &pass.share).map(Some)
    }
}

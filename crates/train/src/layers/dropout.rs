//! Dropout whose mask is never stored: both passes draw it from the same key. What is dropped of a sample depends on its
//! number within the step, and not on the micro-batch or the rank that it is in.

use espalier_tensor::ops::dropout;
use espalier_tensor::{Tensor, random};

use super::{Backward, BatchSlice, Forward, Layer, Mode};
use crate::Result;

/// Drops elements with probability `rate`; `index` keeps the layers of a model apart.
#[derive(Debug)]
pub(crate) struct Dropout {
    pub rate: f32,
    pub index: u64,
}

impl Dropout {
    fn apply(&self, x: &Tensor, random: u64, share: &BatchSlice) -> Result<Tensor> {
        let first = share.first_element(x.len());
        Ok(dropout::apply(x, self.rate, random::key(random, self.index), first)?)
    }
}

impl Layer for Dropout {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        match pass.mode {
            Mode::Train => self.apply(&x, pass.random, pass.share),
            Mode::Evaluate => Ok(x),
        }
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        self.apply(&dy, pass.random, pass.share).map(Some)
    }
}

//! Dropout whose mask is never stored: both passes draw it from the same key.

use espalier_tensor::ops::dropout;
use espalier_tensor::{Tensor, random};

use super::{Backward, Forward, Layer, Mode};
use crate::Result;

/// Drops elements with probability `rate`; `index` keeps the layers of a model apart.
#[derive(Debug)]
pub(crate) struct Dropout {
    pub rate: f32,
    pub index: u64,
}

impl Layer for Dropout {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        match pass.mode {
            Mode::Train => Ok(dropout::apply(&x, self.rate, random::key(pass.random, self.index))?),
            Mode::Evaluate => Ok(x),
        }
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(dropout::apply(&dy, self.rate, random::key(pass.random, self.index))?))
    }
}

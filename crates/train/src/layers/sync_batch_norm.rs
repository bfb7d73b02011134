//! A batch norm between two sums over ranks: of what it measures on the way forward, and of what its gradient needs on the way back.
//! As with a halo and its convolution, the sums stand before the norm in a rank's model, and are built as one layer with it.

use espalier_comm::{Communicator, Reduce};
use espalier_tensor::Tensor;
use espalier_tensor::ops::batch_norm::measure;

use super::{Backward, BatchNorm, BatchSlice, Forward, Layer, Mode};
use crate::Result;

/// The norm, and whom it measures with.
#[derive(Debug)]
pub(crate) struct SyncBatchNorm {
    pub norm: BatchNorm,
    /// In the steps of training.
    pub in_step: Communicator,
    /// Where samples are only looked at: the ranks with other pixels of the same images, where these are cut.
    pub in_sweep: Option<Communicator>,
}

impl SyncBatchNorm {
    fn group(&self, share: &BatchSlice) -> Option<&Communicator> {
        if share.in_step { Some(&self.in_step) } else { self.in_sweep.as_ref() }
    }
}

impl Layer for SyncBatchNorm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        match self.group(pass.share) {
            Some(group) if pass.mode == Mode::Train => {
                let sums = group.all_reduce(measure(&x)?, Reduce::Sum)?;
                self.norm.normalise(x, &sums, pass)
            }
            _ => self.norm.forward(x, pass),
        }
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, wanted: bool) -> Result<Option<Tensor>> {
        match self.group(pass.share) {
            Some(group) => {
                let everywhere = |own| Ok(group.all_reduce(own, Reduce::Sum)?);
                Ok(Some(self.norm.backward_through(dy, everywhere, pass)?))
            }
            None => self.norm.backward(dy, pass, wanted),
        }
    }
}

//! A batch norm between two sums over ranks: of what it measures on the way forward, and of what its gradient needs on the way back.
//! As with a halo and its convolution, the sums stand before the norm in a rank's model, and are built as one layer with it.

use espalier_comm::{Communicator, Reduce};
use espalier_plan::split::split;
use espalier_tensor::Tensor;
use espalier_tensor::ops::batch_norm::measure;

use super::{Backward, BatchNorm, BatchSlice, Forward, Layer, Mode, NormGroup};
use crate::Result;

/// The norm, and whom it measures with.
#[derive(Debug)]
pub(crate) struct SyncBatchNorm {
    pub norm: BatchNorm,
    /// In the steps of training.
    pub in_step: Option<Communicator>,
    /// Where samples are only looked at: the ranks with other pixels of the same images, or other samples of the same micro-batch.
    pub in_sweep: Option<Communicator>,
    /// The same ranks of all replicas, for groups of samples that these have shared out.
    pub over_replicas: Option<Communicator>,
    /// Of those that share out a micro-batch: how many there are and which this is.
    pub shared: Option<(usize, usize)>,
}

impl SyncBatchNorm {
    fn group(&self, share: &BatchSlice) -> Option<&Communicator> {
        match share.norms {
            NormGroup::Replica => self.in_sweep.as_ref(),
            NormGroup::Step => self.in_step.as_ref(),
            NormGroup::AllReplicas { .. } => self.over_replicas.as_ref(),
        }
    }

    /// What it has measured; nothing where it has no samples, but one that stands in.
    fn counted(&self, mut own: Vec<f64>, share: &BatchSlice) -> Vec<f64> {
        let has_none = self.shared.is_some_and(|(ranks, rank)| split(share.samples, ranks, rank).is_empty());
        if has_none || share.norms == (NormGroup::AllReplicas { stands_in: true }) {
            own.fill(0.0);
        }
        own
    }
}

impl Layer for SyncBatchNorm {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        match self.group(&pass.share) {
            Some(group) if pass.mode == Mode::Train => {
                let own = self.counted(measure(&x)?, &pass.share);
                let sums = group.all_reduce(own, Reduce::Sum)?;
                self.norm.normalise(x, &sums, pass)
            }
            _ => self.norm.forward(x, pass),
        }
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, wanted: bool) -> Result<Option<Tensor>> {
        match self.group(&pass.share) {
            Some(group) => {
                let share = pass.share;
                let everywhere = |own| Ok(group.all_reduce(self.counted(own, &share), Reduce::Sum)?);
                Ok(Some(self.norm.backward_through(dy, everywhere, pass)?))
            }
            None => self.norm.backward(dy, pass, wanted),
        }
    }
}

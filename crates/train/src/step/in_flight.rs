//! A micro-batch on its way through a chunk: what its forward leaves for its backward.

use espalier_nn::layers::{
    Backward, BatchSlice, BatchStatistics, Deferred, Forward, GradientSink, Mode, Outcome, Stash,
};
use espalier_nn::model::Model;
use espalier_nn::weights::WeightStore;
use espalier_tensor::ops::cross_entropy::Summed;
use espalier_tensor::{Saved, Tensor};

use super::Loss;
use crate::Result;

/// Between the forward of a chunk and the end of its backward.
#[derive(Debug)]
pub(super) struct InFlight {
    stash: Stash,
    share: BatchSlice,
    random: u64,
    /// What the head reads, where the chunk has it, and what it should say.
    read: Option<(Saved, Tensor)>,
    /// What batch norms have measured.
    pub statistics: Vec<BatchStatistics>,
    /// Gradients of weights that are made later.
    pub put_off: Option<Deferred>,
}

/// What a backward makes.
pub(super) struct Returned {
    /// The gradient of the chunk's input, for the part before.
    pub gradient: Option<Tensor>,
    /// The sum of the losses and their number, where the model ends here: on a card, yet to be read.
    pub total: Option<(Summed, usize)>,
}

impl InFlight {
    /// Runs a chunk forward in training. What comes second is for the next part; `targets` are there where the model ends.
    pub fn forward(
        model: &Model,
        weights: &dyn WeightStore,
        inputs: Tensor,
        targets: Option<Tensor>,
        share: BatchSlice,
        random: u64,
    ) -> Result<(InFlight, Option<Tensor>)> {
        let mut pass = Forward::new(weights, Mode::Train, random, share);
        let x = model.forward(inputs, &mut pass)?;
        let Forward { stash, statistics, .. } = pass;
        let (read, sent) = match targets.filter(|_| model.is_last()) {
            Some(targets) => (Some((Saved::new(x), targets)), None),
            None => (None, Some(x)),
        };
        Ok((InFlight { stash, share, random, read, statistics, put_off: None }, sent))
    }

    /// Runs it backward, from the loss where the model ends and from the gradient of its output elsewhere.
    pub fn backward(
        &mut self,
        model: &Model,
        weights: &dyn WeightStore,
        gradient: Option<Tensor>,
        loss: Loss,
        sink: &mut dyn GradientSink,
    ) -> Result<Returned> {
        let (share, stash) = (self.share, &mut self.stash);
        let mut pass = Backward { weights, random: self.random, share, stash, sink };
        let (gradient, total) = match self.read.take() {
            None => (gradient.expect("the next part made it"), None),
            Some((x, targets)) => {
                let scale = loss.scale(targets.len(), share.samples);
                let Outcome { total, gradient } = model.loss(x.take(), &targets, scale, &mut pass)?;
                (gradient, Some((total, targets.len())))
            }
        };
        Ok(Returned { gradient: model.backward(gradient, &mut pass)?, total })
    }
}

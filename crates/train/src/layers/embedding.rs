//! Token ids to vectors, and a learnt vector for each position.

use espalier_tensor::Tensor;
use espalier_tensor::ops::embedding;

use super::{Backward, Forward, Layer};
use crate::Result;
use crate::weights::ParameterId;

/// `[batch, seq]` ids to `[batch, seq, width]`.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub table: ParameterId,
    pub vocab: usize,
}

impl Layer for Embedding {
    fn forward(&self, ids: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let y = embedding::forward(&ids, pass.weights.get(self.table))?;
        pass.stash.push(ids);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (ids, vocab) = (pass.stash.pop(), self.vocab);
        let gradients = Box::new(move |_| Ok(vec![embedding::backward(&ids, &dy, vocab)?]));
        pass.sink.accept(&[self.table], gradients)?;
        Ok(None)
    }
}

/// Adds row `i` of the table to position `i`.
#[derive(Debug)]
pub(crate) struct PositionEmbedding {
    pub table: ParameterId,
    pub context: usize,
}

impl Layer for PositionEmbedding {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        Ok(embedding::add_positions(x, pass.weights.get(self.table))?)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (upstream, context) = (dy.clone(), self.context);
        let gradients = Box::new(move |_| Ok(vec![embedding::positions_backward(&upstream, context)?]));
        pass.sink.accept(&[self.table], gradients)?;
        Ok(Some(dy))
    }
}

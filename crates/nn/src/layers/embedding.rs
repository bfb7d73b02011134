//! Token ids to vectors, and a learnt vector for each position.

use espalier_tensor::Tensor;
use espalier_tensor::ops::embedding::{self, Rows};

use super::{Backward, Forward, Layer, WeightGradients};
use crate::Result;
use crate::weights::ParameterId;

/// `[batch, seq]` ids to `[batch, seq, width]`.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub table: ParameterId,
    pub vocab: usize,
    /// Which rows the table has.
    pub rows: Rows,
}

impl Layer for Embedding {
    fn forward(&self, ids: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let y = embedding::forward(&ids, pass.weights.get(self.table), self.rows)?;
        pass.stash.push(ids);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (ids, vocab, rows) = (pass.stash.pop(), self.vocab, self.rows);
        let reads = [ids.clone(), dy.clone()];
        let make = move |_| Ok(vec![embedding::backward(&ids, &dy, vocab, rows)?]);
        pass.sink.accept(&[self.table], WeightGradients::new(reads, make))?;
        Ok(None)
    }
}

/// Adds to every position its row of the table.
#[derive(Debug)]
pub(crate) struct PositionEmbedding {
    pub table: ParameterId,
    pub context: usize,
    /// The position of the first vector that comes in.
    pub first: usize,
}

impl Layer for PositionEmbedding {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let behind = pass.cache.as_ref().map(|cache| cache.position());
        Ok(embedding::add_positions_behind(x, pass.weights.get(self.table), self.first, behind)?)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (upstream, context, first) = (dy.clone(), self.context, self.first);
        let make = move |_| Ok(vec![embedding::positions_backward(&upstream, context, first)?]);
        pass.sink.accept(&[self.table], WeightGradients::new([dy.clone()], make))?;
        Ok(Some(dy))
    }
}

//! Token ids to vectors, and a learnt vector for each position.

use espalier_tensor::Tensor;
use espalier_tensor::ops::embedding::{self, TableRows};

use super::{BackwardContext, ForwardContext, Layer, WeightGradients, sum};
use crate::Result;
use crate::weights::ParameterId;

/// `[batch, seq]` ids to `[batch, seq, width]`.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub table: ParameterId,
    pub vocab: usize,
    /// Which rows the table has.
    pub rows: TableRows,
}

impl Layer for Embedding {
    fn forward(&self, ids: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let y = embedding::forward(&ids, ctx.weights.get(self.table), self.rows)?;
        ctx.stash.push(ids);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let (ids, vocab, rows) = (ctx.stash.pop(), self.vocab, self.rows);
        let reads = [ids.clone(), dy.clone()];
        let make = move |_| Ok(vec![embedding::backward(&ids, &dy, vocab, rows)?]);
        ctx.sink.accept(&[self.table], WeightGradients::new(reads, make))?;
        Ok(None)
    }
}

/// Adds to every position its row of the table; positions begin anew with each document of a sequence.
#[derive(Debug)]
pub(crate) struct PositionEmbedding {
    pub table: ParameterId,
    pub context: usize,
    /// The position of the first vector that comes in.
    pub first: usize,
}

impl PositionEmbedding {
    /// The positions of the vectors that come in, `[batch, seq, width]`, of those of full sequences.
    fn slice(&self, positions: &Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(embedding::positions_slice(positions, self.first, x.shape()[1])?)
    }
}

impl Layer for PositionEmbedding {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if let Some(positions) = ctx.positions {
            let ids = self.slice(positions, &x)?;
            return sum(x, embedding::forward(&ids, ctx.weights.get(self.table), TableRows::All)?);
        }
        let behind = ctx.cache.as_ref().map(|cache| cache.position());
        Ok(embedding::add_positions_behind(x, ctx.weights.get(self.table), self.first, behind)?)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let (upstream, context, first) = (dy.clone(), self.context, self.first);
        let ids = ctx.positions.map(|positions| self.slice(positions, &dy)).transpose()?;
        let make = move |_| {
            Ok(vec![match ids {
                Some(ids) => embedding::backward(&ids, &upstream, context, TableRows::All)?,
                None => embedding::positions_backward(&upstream, context, first)?,
            }])
        };
        ctx.sink.accept(&[self.table], WeightGradients::new([dy.clone()], make))?;
        Ok(Some(dy))
    }
}

//! Causal multi-head attention proper, with as many heads of keys and values as of queries or fewer; the
//! projections around it are linear layers. Where a sequence comes in pieces, earlier keys and values are in
//! the pass's cache. Where several documents lie in one, each sees itself alone; rotations go on over them, since
//! scores depend on the difference of two positions alone.
//!
//! Queries and keys are turned by their positions in place, so that nothing more is kept than without. Behind a
//! norm they are not: the norm needs what it read, which is kept in their stead, and both are made again in the
//! backward pass.

use std::sync::{Arc, OnceLock};

use espalier_tensor::ops::position::Position;
use espalier_tensor::ops::qk_norm::{self, QkNormArgs};
use espalier_tensor::ops::{attention, rotary};
use espalier_tensor::{Device, Tensor};

use super::{BackwardContext, ForwardContext, Layer, WeightGradients};
use crate::Result;
use crate::weights::{ParameterId, WeightStore};

/// `[batch, seq, width + 2 kv_heads d]` to `[batch, seq, width]`, d = width / heads.
#[derive(Debug)]
pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    /// Which attention of the model, counted from 0.
    pub number: usize,
    /// How queries and keys are turned.
    pub rotary: Option<Arc<RotaryTable>>,
    /// The norm of queries and keys before that.
    pub norm: Option<QkScales>,
}

/// The scales of queries and of keys.
#[derive(Debug)]
pub(crate) struct QkScales {
    pub ids: [ParameterId; 2],
    pub eps: f32,
}

/// The rotations of all positions of a model; made when they are first wanted, on the device that wants them.
#[derive(Debug)]
pub(crate) struct RotaryTable {
    frequencies: Vec<f32>,
    context: usize,
    table: OnceLock<Tensor>,
}

impl RotaryTable {
    pub fn new(frequencies: Vec<f32>, context: usize) -> RotaryTable {
        RotaryTable { frequencies, context, table: OnceLock::new() }
    }

    fn on(&self, device: &Device) -> Result<&Tensor> {
        match self.table.get() {
            Some(table) => Ok(table),
            None => {
                let made = rotary::table(device, &self.frequencies, self.context)?;
                Ok(self.table.get_or_init(|| made))
            }
        }
    }
}

impl Attention {
    fn table(&self, device: &Device) -> Result<Option<&Tensor>> {
        self.rotary.as_ref().map(|rotary| rotary.on(device)).transpose()
    }

    /// What the norm of queries and keys takes, where there is one.
    fn norm<'a>(&self, weights: &'a dyn WeightStore, table: Option<&'a Tensor>) -> Option<QkNormArgs<'a>> {
        let Attention { heads, kv_heads, .. } = *self;
        let of = |norm: &QkScales| {
            let scales = norm.ids.map(|id| weights.get(id));
            QkNormArgs { scales, eps: norm.eps, table, heads, kv_heads }
        };
        self.norm.as_ref().map(of)
    }

    /// Queries and keys as attention reads them, from `first` on or from the beginning.
    fn prepared(&self, qkv: Tensor, first: Option<&Position>, weights: &dyn WeightStore) -> Result<Tensor> {
        let table = self.table(&qkv.device())?;
        if let Some(norm) = self.norm(weights, table) {
            return Ok(qk_norm::forward(&qkv, &norm, first)?.0);
        }
        match table {
            Some(table) => Ok(rotary::forward(qkv, table, first, self.heads, self.kv_heads)?),
            None => Ok(qkv),
        }
    }
}

impl Layer for Attention {
    fn forward(&self, qkv: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if let Some(cache) = &mut ctx.cache {
            let qkv = self.prepared(qkv, Some(cache.position()), ctx.weights)?;
            return cache.attend(self.number, &qkv, self.heads, self.kv_heads);
        }
        let read = self.norm.is_some().then(|| qkv.clone());
        let qkv = self.prepared(qkv, None, ctx.weights)?;
        let (y, logsumexp) = attention::forward_within(&qkv, ctx.positions, self.heads, self.kv_heads)?;
        ctx.stash.push(read.unwrap_or(qkv));
        ctx.stash.push(y.clone());
        ctx.stash.push(logsumexp);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let (logsumexp, y, qkv) = (ctx.stash.pop(), ctx.stash.pop(), ctx.stash.pop());
        let (positions, heads, kv_heads) = (ctx.positions, self.heads, self.kv_heads);
        let table = self.table(&qkv.device())?;
        let weights = ctx.weights;
        if let (Some(norm), Some(QkScales { ids, .. })) = (self.norm(weights, table), &self.norm) {
            let (turned, rstd) = qk_norm::forward(&qkv, &norm, None)?;
            let dqkv = attention::backward_within(&dy, &turned, &y, &logsumexp, positions, heads, kv_heads)?;
            drop((turned, y, dy));
            let dtype = norm.scales[0].dtype();
            let (dqkv, scales) = qk_norm::backward(dqkv, &qkv, &rstd, &norm, dtype)?;
            // Two short vectors, which the very pass has made: there is nothing to defer.
            ctx.sink.accept(ids, WeightGradients::new([], move |_| Ok(scales.into())))?;
            return Ok(Some(dqkv));
        }
        let dqkv = attention::backward_within(&dy, &qkv, &y, &logsumexp, positions, heads, kv_heads)?;
        Ok(Some(match table {
            Some(table) => rotary::backward(dqkv, table, heads, kv_heads)?,
            None => dqkv,
        }))
    }
}

//! Causal multi-head attention proper, with as many heads of keys and values as of queries or fewer; the
//! projections around it are linear layers. Where a sequence comes in pieces, earlier keys and values are in
//! the pass's cache.

use espalier_tensor::Tensor;
use espalier_tensor::ops::attention;

use super::{BackwardContext, ForwardContext, Layer};
use crate::Result;

/// `[batch, seq, width + 2 kv_heads d]` to `[batch, seq, width]`, d = width / heads.
#[derive(Debug)]
pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    /// Which attention of the model, counted from 0.
    pub number: usize,
}

impl Layer for Attention {
    fn forward(&self, qkv: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if let Some(cache) = &mut ctx.cache {
            return cache.attend(self.number, &qkv, self.heads, self.kv_heads);
        }
        let (y, logsumexp) = attention::forward(&qkv, self.heads, self.kv_heads)?;
        ctx.stash.push(qkv);
        ctx.stash.push(y.clone());
        ctx.stash.push(logsumexp);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let (logsumexp, y, qkv) = (ctx.stash.pop(), ctx.stash.pop(), ctx.stash.pop());
        Ok(Some(attention::backward(&dy, &qkv, &y, &logsumexp, self.heads, self.kv_heads)?))
    }
}

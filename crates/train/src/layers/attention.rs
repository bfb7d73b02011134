//! Causal multi-head attention proper, with as many heads of keys and values as of queries or fewer; the projections around it are linear layers.

use espalier_tensor::Tensor;
use espalier_tensor::ops::attention;

use super::{Backward, Forward, Layer};
use crate::Result;

/// `[batch, seq, width + 2 kv_heads d]` to `[batch, seq, width]`, d = width / heads.
#[derive(Debug)]
pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
}

impl Layer for Attention {
    fn forward(&self, qkv: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let (y, logsumexp) = attention::forward(&qkv, self.heads, self.kv_heads)?;
        pass.stash.push(qkv);
        pass.stash.push(y.clone());
        pass.stash.push(logsumexp);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        let (logsumexp, y, qkv) = (pass.stash.pop(), pass.stash.pop(), pass.stash.pop());
        Ok(Some(attention::backward(&dy, &qkv, &y, &logsumexp, self.heads, self.kv_heads)?))
    }
}

//! The KV cache: the keys and values of all positions of a sequence so far,
//! layer by layer.
//!
//! A pass over some positions appends theirs. There is memory for all positions that the
//! model can tell apart, allocated when a layer is first met, so a rank has that of its own layers, and
//! of these its own heads.

use std::collections::HashMap;

use espalier_tensor::ops::position::Position;
use espalier_tensor::ops::{attention, cached_attention};
use espalier_tensor::{Device, Tensor};

use crate::Result;

/// The keys and values of one sequence on one rank.
#[derive(Debug)]
pub struct KvCache {
    /// By the number of the attention layer in the model.
    layers: HashMap<usize, Tensor>,
    context: usize,
    /// The first that has not been read.
    position: Position,
}

impl KvCache {
    /// An empty one, for so many positions.
    pub fn new(context: usize, device: &Device) -> Result<KvCache> {
        Ok(KvCache { layers: HashMap::new(), context, position: Position::new(device)? })
    }

    /// Positions that the model can tell apart.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Positions read so far: the next pass begins behind them.
    pub fn length(&self) -> usize {
        self.position.at()
    }

    /// Where the next pass begins.
    pub(super) fn position(&self) -> &Position {
        &self.position
    }

    /// Writes to the device where the next pass begins.
    pub fn begin_pass(&mut self) -> Result<()> {
        Ok(self.position.send()?)
    }

    /// Counts the positions of a pass that is through all layers.
    pub fn advance(&mut self, positions: usize) {
        debug_assert!(self.length() + positions <= self.context);
        self.position.set(self.length() + positions);
    }

    /// Forgets all positions; the memory stays.
    pub fn clear(&mut self) {
        self.position.set(0);
    }

    /// What attention number `layer` gives at the positions of this pass; qkv: [1, positions, columns].
    pub(super) fn attend(
        &mut self,
        layer: usize,
        qkv: &Tensor,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Tensor> {
        let (device, dtype, d) = (qkv.device(), qkv.dtype(), qkv.width() / (heads + 2 * kv_heads));
        if !self.layers.contains_key(&layer) {
            let kv = cached_attention::cache(&device, dtype, kv_heads, self.context, d)?;
            self.layers.insert(layer, kv);
        }
        let kept = self.layers.get_mut(&layer).expect("inserted above");
        if self.position.at() > 0 {
            return Ok(cached_attention::forward(qkv, kept, &self.position, heads, kv_heads)?);
        }
        // Nothing came before: the blocks of training's attention are faster over many positions.
        cached_attention::append(qkv, kept, &self.position, heads, kv_heads)?;
        Ok(attention::forward(qkv, heads, kv_heads)?.0)
    }
}

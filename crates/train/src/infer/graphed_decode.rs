//! The pass of one token through an unsharded model on a GPU: from one to the next only the token and its
//! position differ, and both lie in tensors that the pass reads. So it can be captured as a CUDA graph
//! ([`Graphed`]).

use espalier_tensor::{Category, Device, Tensor};

use crate::Result;
use crate::graphed::Graphed;

/// Passes of one token each over the same weights and the same cache.
#[derive(Debug)]
pub(super) struct GraphedDecode {
    ids: Tensor,
    pass: Graphed<Tensor>,
    /// What the last pass gave: the likeliest token, or logits.
    greedy: bool,
}

impl GraphedDecode {
    /// None but on a GPU.
    pub fn new(device: &Device) -> Result<Option<GraphedDecode>> {
        let Device::Cuda(_) = device else { return Ok(None) };
        let ids = Tensor::from_slice(device, &[1, 1], &[0u32], Category::Workspace)?;
        Ok(Some(GraphedDecode { ids, pass: Graphed::New, greedy: false }))
    }

    /// What `pass` makes of a token's ids, `[1, 1]`: logits or the likeliest token, on the same tensors each time.
    pub fn run(
        &mut self,
        id: u32,
        greedy: bool,
        pass: &mut dyn FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.ids.copy_from_host(&id.to_ne_bytes())?;
        if self.greedy != greedy {
            (self.pass, self.greedy) = (Graphed::New, greedy);
        }
        self.pass.run(&self.ids.device(), usize::MAX, || pass(self.ids.clone()))
    }
}

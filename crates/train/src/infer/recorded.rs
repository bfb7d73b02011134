//! The pass of one token through a whole model on a card: from one to the next only the token and its position differ, and both lie
//! in tensors that the pass reads. So it can be recorded ([`Repeated`]).

use espalier_tensor::{Category, Device, Tensor};

use crate::Result;
use crate::repeated::Repeated;

/// Passes of one token each over the same weights and the same cache.
#[derive(Debug)]
pub(super) struct OneToken {
    ids: Tensor,
    pass: Repeated<Tensor>,
    /// What the last pass gave: the likeliest token, or logits.
    likeliest: bool,
}

impl OneToken {
    /// None but on a card.
    pub fn new(device: &Device) -> Result<Option<OneToken>> {
        match device {
            Device::Cpu(_) => Ok(None),
            Device::Cuda(_) => {
                let ids = Tensor::from_slice(device, &[1, 1], &[0u32], Category::Workspace)?;
                Ok(Some(OneToken { ids, pass: Repeated::New, likeliest: false }))
            }
        }
    }

    /// What `pass` makes of a token's ids, `[1, 1]`: logits or the likeliest token, on the same tensors each time.
    pub fn run(
        &mut self,
        id: u32,
        likeliest: bool,
        pass: &mut dyn FnMut(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.ids.copy_from_host(&id.to_ne_bytes())?;
        if self.likeliest != likeliest {
            (self.pass, self.likeliest) = (Repeated::New, likeliest);
        }
        self.pass.run(&self.ids.device(), || pass(self.ids.clone()))
    }
}

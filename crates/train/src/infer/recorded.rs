//! The pass of one token through a whole model, recorded on a card: hundreds of launches, queued in one call.
//!
//! From one token to the next, only the token and its position differ, and both lie in tensors that the pass reads. The first such pass
//! loads what it needs, the second is recorded. What cannot be recorded (a layer that waits for the card) runs as before.

use espalier_tensor::cuda::Recorded;
use espalier_tensor::{Category, Device, Tensor};

use crate::Result;

/// Passes of one token each over the same weights and the same cache.
#[derive(Debug)]
pub(super) struct OneToken {
    ids: Tensor,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// No pass has been made.
    New,
    /// What a pass needs is loaded.
    Loaded,
    Recorded(Recorded<Tensor>),
    /// Each pass is queued anew.
    Plain,
}

impl OneToken {
    /// None but on a card.
    pub fn new(device: &Device) -> Result<Option<OneToken>> {
        match device {
            Device::Cpu(_) => Ok(None),
            Device::Cuda(_) => {
                let ids = Tensor::from_slice(device, &[1, 1], &[0u32], Category::Workspace)?;
                Ok(Some(OneToken { ids, way: Way::New }))
            }
        }
    }

    /// The logits behind a token. `pass` makes them of the token's ids, `[1, 1]`, on the same tensors each time.
    pub fn logits(&mut self, id: u32, pass: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        self.ids.copy_from_host(&id.to_ne_bytes())?;
        if let (Way::Loaded, Device::Cuda(cuda)) = (&self.way, self.ids.device()) {
            self.way = match cuda.record(|| pass(self.ids.clone())) {
                Ok(recorded) => Way::Recorded(recorded),
                Err(error) => {
                    tracing::debug!(%error, "the pass of a token cannot be recorded");
                    Way::Plain
                }
            };
        }
        match &self.way {
            Way::Recorded(recorded) => Ok(recorded.replay()?.clone()),
            Way::Plain => pass(self.ids.clone()),
            Way::New | Way::Loaded => {
                let logits = pass(self.ids.clone())?;
                self.way = Way::Loaded;
                Ok(logits)
            }
        }
    }
}

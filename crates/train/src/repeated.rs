//! Work that is done again and again on the same tensors: on a card, hundreds of launches that become one call.
//!
//! The first time it loads what it needs, the second time it is recorded, and from then on what was recorded runs again. What cannot
//! be recorded (work that waits for the card) is done anew each time.

use espalier_tensor::Device;
use espalier_tensor::cuda::Recorded;

use crate::Result;

/// Some work, and what it has come to: tensors that the next time overwrites.
#[derive(Debug, Default)]
pub(crate) enum Repeated<R> {
    /// It has not been done.
    #[default]
    New,
    /// What it needs is loaded.
    Loaded,
    /// It has been recorded on a card.
    Recorded(Recorded<R>),
    /// It is done anew each time.
    Plain,
}

impl<R: Clone> Repeated<R> {
    /// Whether the last time was a run of what was recorded.
    pub fn is_recorded(&self) -> bool {
        matches!(self, Repeated::Recorded(_))
    }

    /// Does the work once more. It must queue the same each time: what changes lies in tensors that it reads, at the same places.
    pub fn run(&mut self, device: &Device, mut work: impl FnMut() -> Result<R>) -> Result<R> {
        if let (Repeated::Loaded, Device::Cuda(cuda)) = (&*self, device) {
            *self = match cuda.record(&mut work) {
                Ok(recorded) => Repeated::Recorded(recorded),
                Err(error) => {
                    tracing::debug!(%error, "work that cannot be recorded");
                    Repeated::Plain
                }
            };
        }
        match self {
            Repeated::Recorded(recorded) => Ok(recorded.replay()?.clone()),
            Repeated::Plain => work(),
            Repeated::New | Repeated::Loaded => {
                let made = work()?;
                *self = Repeated::Loaded;
                Ok(made)
            }
        }
    }
}

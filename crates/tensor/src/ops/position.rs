//! Where in a sequence the next positions stand, for work that is recorded once and runs for one position
//! after the other: what a launch is given stays, what it reads may change.

use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// The number of a position; on a GPU, also there for kernels to read.
#[derive(Debug)]
pub struct Position {
    at: usize,
    kept: Option<DevicePosition>,
}

/// A number on a GPU, and what it is there by now.
#[derive(Debug)]
struct DevicePosition {
    tensor: Tensor,
    at: usize,
}

impl Position {
    /// The first one.
    pub fn new(device: &Device) -> Result<Position> {
        let kept = match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => {
                let tensor = Tensor::from_slice(device, &[1], &[0u32], Category::Workspace)?;
                Some(DevicePosition { tensor, at: 0 })
            }
        };
        Ok(Position { at: 0, kept })
    }

    /// Its number.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Another one; see [`Position::send`].
    pub fn set(&mut self, at: usize) {
        self.at = at;
    }

    /// Tells the GPU, for what is queued from now on. To be called before the first operation at a position.
    pub fn send(&mut self) -> Result<()> {
        if let Some(kept) = self.kept.as_mut().filter(|kept| kept.at != self.at) {
            let at = u32::try_from(self.at).expect("a position within a context");
            kept.tensor.copy_from_host(&at.to_ne_bytes())?;
            kept.at = self.at;
        }
        Ok(())
    }

    /// On a GPU, where kernels read it.
    pub(crate) fn on_gpu(&self) -> &Tensor {
        let kept = self.kept.as_ref().expect("a position of a GPU's");
        debug_assert_eq!(kept.at, self.at, "a position that the GPU was not told");
        &kept.tensor
    }
}

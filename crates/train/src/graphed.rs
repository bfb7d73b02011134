//! Work that is done again and again on the same tensors: on a GPU, hundreds of launches that become one call.
//!
//! The first time it loads what it needs, the second time it is captured as a CUDA graph, and from then on
//! the graph is replayed. What cannot be captured (work that waits for the GPU) is done anew each time.

use espalier_tensor::Device;
use espalier_tensor::cuda::CudaGraph;

use crate::Result;

/// Some work, and what it has come to: tensors that the next time overwrites.
#[derive(Debug, Default)]
pub(crate) enum Graphed<R> {
    /// It has not been done.
    #[default]
    New,
    /// What it needs is loaded.
    WarmedUp,
    /// It has been captured as a CUDA graph.
    Captured(CudaGraph<R>),
    /// It is done anew each time.
    Eager,
}

impl<R: Clone> Graphed<R> {
    /// Whether the last time was a replay of the graph.
    pub(crate) fn is_captured(&self) -> bool {
        matches!(self, Graphed::Captured(_))
    }

    /// Does the work once more. It must queue the same each time: what changes lies in tensors that it reads,
    /// at the same addresses.
    pub fn run(&mut self, device: &Device, mut work: impl FnMut() -> Result<R>) -> Result<R> {
        if let (Graphed::WarmedUp, Device::Cuda(cuda)) = (&*self, device) {
            *self = match cuda.record(&mut work) {
                Ok(graph) => Graphed::Captured(graph),
                Err(error) => {
                    tracing::debug!(%error, "work that cannot be recorded");
                    Graphed::Eager
                }
            };
        }
        match self {
            Graphed::Captured(graph) => Ok(graph.replay()?.clone()),
            Graphed::Eager => work(),
            Graphed::New | Graphed::WarmedUp => {
                let made = work()?;
                *self = Graphed::WarmedUp;
                Ok(made)
            }
        }
    }
}

//! Work that is done again and again on the same tensors: on a GPU, hundreds of launches that become one call.
//!
//! The first time it loads what it needs, the second time it is captured as a CUDA graph, and from then on
//! the graph is replayed. What cannot be captured (work that waits for the GPU) or would hold too much memory is
//! done anew each time; since the driver may also refuse because of what others do on the GPU at that moment, it
//! is tried a few times.

use espalier_tensor::Device;
use espalier_tensor::cuda::CudaGraph;

use crate::Result;

/// How often capturing is tried.
const ATTEMPTS: usize = 3;

/// Some work, and what it has come to: tensors that the next time overwrites.
#[derive(Debug, Default)]
pub(crate) enum Graphed<R> {
    /// It has not been done.
    #[default]
    New,
    /// What it needs is loaded; it has been tried to capture it so many times.
    WarmedUp { attempts: usize },
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
    /// at the same addresses. A graph holds the memory that it works with, at most so many bytes.
    pub fn run(
        &mut self,
        device: &Device,
        most_bytes: usize,
        mut work: impl FnMut() -> Result<R>,
    ) -> Result<R> {
        if let (&mut Graphed::WarmedUp { attempts }, Device::Cuda(cuda)) = (&mut *self, device) {
            *self = match cuda.record(&mut work) {
                Ok(graph) if graph.bytes() <= most_bytes => Graphed::Captured(graph),
                Ok(graph) => {
                    tracing::info!(bytes = graph.bytes(), "work that is too large to be captured");
                    Graphed::Eager
                }
                Err(error) => {
                    tracing::info!(%error, "work that could not be captured");
                    let attempts = attempts + 1;
                    if attempts < ATTEMPTS { Graphed::WarmedUp { attempts } } else { Graphed::Eager }
                }
            };
        }
        match self {
            Graphed::Captured(graph) => Ok(graph.replay()?.clone()),
            Graphed::Eager | Graphed::WarmedUp { .. } => work(),
            Graphed::New => {
                let made = work()?;
                *self = Graphed::WarmedUp { attempts: 0 };
                Ok(made)
            }
        }
    }
}

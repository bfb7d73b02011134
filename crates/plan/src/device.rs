//! What is to compute a run: a wish, which only a machine can grant.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A device that is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceChoice {
    /// A GPU, the processor, or whichever is there.
    pub kind: DeviceKind,
    /// Threads of the CPU; 0: all there are.
    pub threads: usize,
    /// Whether a GPU's convolutions in f32 may round their operands to TF32, as PyTorch's do.
    pub tf32: bool,
    /// Whether a run that needs more memory than is left is refused before it starts.
    pub check_memory: bool,
    /// The cluster that step times are predicted by: the name of one that comes with the program, or a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<PathBuf>,
}

/// The processor, a GPU, or whichever there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// An NVIDIA GPU where one is found and works, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU, whatever else there is.
    Cpu,
    /// An NVIDIA GPU, or nothing.
    Cuda,
}

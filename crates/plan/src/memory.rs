//! Predicted bytes of one rank, by the categories in which memory is counted while a run goes on.
//!
//! For each parameter: its weight and its gradient in the precision of the run, the optimizer's moments in f32, and in
//! bf16 a master weight in f32. Buffers are f32 whatever the precision. Activations are those of one micro-batch.

use serde::Serialize;

use crate::config::{Optimizer, Precision, Recompute};
use crate::spec::{Model, ShapeError};

/// Bytes by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Weights, and the running statistics of norms.
    pub weights: u64,
    /// Gradients of all parameters.
    pub gradients: u64,
    /// Master weights and moments.
    pub optimizer: u64,
    /// Which weights are kept; nothing without pruning.
    pub mask: u64,
    /// What the forward pass of one micro-batch keeps for the backward pass, and what the head reads.
    pub activations: u64,
    /// Scratch space of the kernels: theirs to know, so not predicted.
    pub workspace: Option<u64>,
    /// Buffers of messages to other ranks; nothing on one rank.
    pub communication: u64,
}

impl Memory {
    /// The prediction for a whole model on one rank.
    pub fn predict(
        model: &Model,
        optimizer: &Optimizer,
        precision: Precision,
        recompute: Recompute,
        micro_batch: usize,
    ) -> Result<Memory, ShapeError> {
        let parameters = model.parameter_count();
        let bytes = |each: u64| parameters.saturating_mul(each);
        let buffers: u64 = model.buffers().iter().map(|buffer| 4 * buffer.elements()).sum();
        let master = match precision {
            Precision::F32 => 0,
            Precision::Bf16 => 4,
        };
        Ok(Memory {
            weights: bytes(precision.size()).saturating_add(buffers),
            gradients: bytes(precision.size()),
            optimizer: bytes(master + 4 * optimizer.moments()),
            mask: 0,
            activations: model.activation_bytes(micro_batch, precision, recompute)?,
            workspace: None,
            communication: 0,
        })
    }

    /// All that is predicted.
    pub fn total(&self) -> u64 {
        let parts =
            [self.weights, self.gradients, self.optimizer, self.mask, self.activations, self.communication];
        parts.into_iter().chain(self.workspace).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunFile;
    use crate::spec::presets::{Form, ResNet, resnet};

    fn predict(model: &Model, optimizer: &str, precision: Precision) -> Memory {
        let set = [format!("optimizer.name={optimizer}")];
        let optimizer = RunFile::parse("", &set).unwrap().optimizer;
        Memory::predict(model, &optimizer, precision, Recompute::None, 2).unwrap()
    }

    /// 16 bytes a parameter for Adam in either precision; the split differs.
    #[test]
    fn bytes_for_each_parameter() {
        let model = resnet(ResNet::R18, (32, 32, 3), 10, Form::Small);
        let parameters = model.parameter_count();
        let buffers = 4 * 2 * 4800; // two statistics for each of its 4800 channels
        for (name, moments) in [
            ("sgd", 0),
            ("momentum", 4),
            ("nesterov", 4),
            ("lars", 4),
            ("adam", 8),
            ("adamw", 8),
            ("lamb", 8),
        ] {
            let full = predict(&model, name, Precision::F32);
            assert_eq!(full.weights, 4 * parameters + buffers);
            assert_eq!(full.gradients, 4 * parameters);
            assert_eq!(full.optimizer, moments * parameters, "{name}");
            let half = predict(&model, name, Precision::Bf16);
            assert_eq!(half.weights, 2 * parameters + buffers);
            assert_eq!(half.gradients, 2 * parameters);
            assert_eq!(half.optimizer, (4 + moments) * parameters, "{name}");
            assert_eq!(half.total(), half.weights + half.gradients + half.optimizer + half.activations);
        }
    }
}

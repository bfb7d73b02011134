//! What a rank has of the layers that it shares with others, as far as its bytes depend on them.

use crate::layout::Layout;
use crate::spec::Parameter;
use crate::spec::message_sizes::{LOGITS_ON_GPU, LOGITS_ON_HOST};

/// A rank among those of the same model-parallel group.
#[derive(Debug, Clone)]
pub struct ModelParallelRank {
    /// How many have a partial sum of each parameter's gradient, the rank itself among them.
    pub partial_ranks: Vec<u64>,
    /// Elements of all of each parameter.
    pub(super) full: Vec<u64>,
    /// How many make the logits of some classes each, where they do.
    pub(super) classes: Option<usize>,
    /// Bytes of logits that exist at once.
    pub(super) logits: usize,
    /// Whether the next block's weights are expanded while one runs.
    pub(super) expands_ahead: bool,
}

impl ModelParallelRank {
    /// Of one of the ranks that have shards of a model of these parameters.
    pub fn of(layout: &Layout, peer: usize, parameters: &[Parameter], on_gpu: bool) -> ModelParallelRank {
        ModelParallelRank {
            partial_ranks: (0..parameters.len()).map(|id| layout.partial_ranks(id, peer) as u64).collect(),
            classes: layout.local_models()[peer].classes.as_ref().map(|classes| classes.ranks),
            logits: if on_gpu { LOGITS_ON_GPU } else { LOGITS_ON_HOST },
            expands_ahead: on_gpu,
            ..ModelParallelRank::none(parameters)
        }
    }

    /// Nobody else has any of these parameters.
    pub(super) fn none(parameters: &[Parameter]) -> ModelParallelRank {
        ModelParallelRank {
            partial_ranks: vec![1; parameters.len()],
            full: parameters.iter().map(Parameter::elements).collect(),
            classes: None,
            logits: LOGITS_ON_HOST,
            expands_ahead: false,
        }
    }
}

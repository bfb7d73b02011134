//! What a rank has of the layers that it shares with others, as far as its bytes depend on them.

use crate::layout::Layout;
use crate::spec::Parameter;
use crate::spec::rooms::{LOGITS_ON_GPU, LOGITS_ON_HOST};

/// A rank among those that have parts of the same layers.
#[derive(Debug, Clone)]
pub struct Peers {
    /// How many have a summand of each parameter's gradient, the rank itself among them.
    pub summands: Vec<u64>,
    /// Elements of all of each parameter.
    pub(super) whole: Vec<u64>,
    /// How many make the logits of some classes each, where they do.
    pub(super) classes: Option<usize>,
    /// Bytes of logits that exist at once.
    pub(super) logits: usize,
    /// Whether the next block's weights are expanded while one runs.
    pub(super) expands_ahead: bool,
}

impl Peers {
    /// Of one of the ranks that have parts of a model of these parameters.
    pub fn of(layout: &Layout, peer: usize, parameters: &[Parameter], on_gpu: bool) -> Peers {
        Peers {
            summands: (0..parameters.len()).map(|id| layout.summands(id, peer) as u64).collect(),
            classes: layout.peers()[peer].classes.as_ref().map(|classes| classes.ranks),
            logits: if on_gpu { LOGITS_ON_GPU } else { LOGITS_ON_HOST },
            expands_ahead: on_gpu,
            ..Peers::none(parameters)
        }
    }

    /// Nobody else has any of these parameters.
    pub(super) fn none(parameters: &[Parameter]) -> Peers {
        Peers {
            summands: vec![1; parameters.len()],
            whole: parameters.iter().map(Parameter::elements).collect(),
            classes: None,
            logits: LOGITS_ON_HOST,
            expands_ahead: false,
        }
    }
}

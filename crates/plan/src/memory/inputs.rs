//! What predictions of memory have in common: lists of a model's tensors and messages, made once for the
//! thousands of candidates that a search holds against each other.

use std::collections::HashSet;
use std::rc::Rc;

use crate::spec::message_sizes::BlockMessages;
use crate::spec::{BufferSpec, ModelSpec, Parameter};
use crate::stages::BlockTensors;

/// The tensors of a model: which blocks use them, and which are treated in ways of their own. They are the
/// same whatever the batch, so a search lists them once for many predictions.
pub struct Tensors {
    /// Which parameters and buffers each block uses.
    pub blocks: BlockTensors,
    pub(super) buffers: Vec<BufferSpec>,
    /// Indices of parameters that several blocks use.
    pub tied: HashSet<usize>,
    /// Indices of weights that may be multiplied without their zeros.
    pub(super) linear: HashSet<usize>,
    /// Classes of the logits.
    pub(super) classes: usize,
}

impl Tensors {
    /// Of a model of these parameters.
    pub fn of(model: &ModelSpec, parameters: &[Parameter]) -> Tensors {
        let linear: HashSet<String> = model.linear_weights().into_iter().collect();
        let is_linear = |id: &usize| linear.contains(&parameters[*id].name);
        let blocks = model.block_tensors();
        Tensors {
            tied: blocks.tied(),
            linear: (0..parameters.len()).filter(is_linear).collect(),
            buffers: model.buffers(),
            classes: model.classes,
            blocks,
        }
    }
}

/// What predictions of a model for micro-batches of one size have in common.
#[derive(Clone)]
pub struct PredictionInputs {
    pub tensors: Rc<Tensors>,
    /// The messages of each block.
    pub messages: Rc<Vec<BlockMessages>>,
    /// Rows of the logits.
    pub logit_rows: usize,
}

impl PredictionInputs {
    /// Of a model of these parameters, for so many samples of a micro-batch.
    pub fn of(model: &ModelSpec, parameters: &[Parameter], samples: usize) -> PredictionInputs {
        let messages = model.messages(parameters, samples).unwrap_or_default();
        let logit_rows = model.logit_rows(samples).unwrap_or(0);
        PredictionInputs {
            tensors: Rc::new(Tensors::of(model, parameters)),
            messages: Rc::new(messages),
            logit_rows,
        }
    }
}

//! A rank's own model, with what all candidates that partition the model in the same way ask of it: listed once,
//! since a search has thousands of them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::block_weights::BlockWeights;
use crate::error::Error;
use crate::layout::{Layout, LocalModel};
use crate::memory::{ModelParallelRank, PredictionInputs, Tensors};
use crate::plan::Plan;
use crate::spec::activations::StageActivations;
use crate::spec::message_sizes::BlockMessages;
use crate::spec::{Parameter, RecomputeMode, ShapeError};
use crate::stages::StageBlocks;

/// The model of the first of the ranks of one model-parallel group: none has more.
pub struct RankModel {
    pub local: LocalModel,
    /// What it has of the layers that it shares.
    pub model_parallel: ModelParallelRank,
    /// What its blocks hold.
    pub block_weights: BlockWeights,
    /// Elements of a sample that flow between the layers of each block.
    pub transient: Vec<u64>,
    pub tensors: Rc<Tensors>,
    messages: RefCell<HashMap<usize, Rc<Vec<BlockMessages>>>>,
    activations: RefCell<HashMap<ActivationKey, Rc<Vec<StageActivations>>>>,
}

/// What tells apart what two splits into stages keep: how many virtual stages there are, samples of a
/// micro-batch, and what is run again.
type ActivationKey = (usize, usize, RecomputeMode);

impl RankModel {
    /// Of a layout of a plan's model, which has these parameters.
    pub fn new(
        plan: &Plan,
        parameters: &[Parameter],
        layout: &Layout,
        on_gpu: bool,
    ) -> Result<RankModel, Error> {
        let local = layout.local_models()[0].clone();
        let tensors = Rc::new(Tensors::of(&local.model, &local.parameters));
        let pruning = plan.pruning.as_ref();
        let kept = pruning.map(|pruning| local.kept(pruning.kept_by_parameter(parameters)));
        Ok(RankModel {
            model_parallel: ModelParallelRank::of(layout, 0, parameters, on_gpu),
            block_weights: BlockWeights::new(tensors.clone(), &local.parameters, kept),
            transient: local.model.transient_elements()?,
            tensors,
            messages: RefCell::default(),
            activations: RefCell::default(),
            local,
        })
    }

    /// What predictions of its bytes have in common, for so many samples of a micro-batch.
    pub fn inputs(&self, samples: usize) -> PredictionInputs {
        let LocalModel { model, parameters, .. } = &self.local;
        let list = || Rc::new(model.messages(parameters, samples).unwrap_or_default());
        let messages = self.messages.borrow_mut().entry(samples).or_insert_with(list).clone();
        let logit_rows = self.local.model.logit_rows(samples).unwrap_or(0);
        PredictionInputs { tensors: self.tensors.clone(), messages, logit_rows }
    }

    /// What each of a number of virtual stages keeps of a micro-batch of so many samples. A model is always
    /// split into so many in one way.
    pub fn activations(
        &self,
        plan: &Plan,
        stage_blocks: &StageBlocks,
        samples: usize,
        recompute: RecomputeMode,
    ) -> Result<Rc<Vec<StageActivations>>, ShapeError> {
        let key = (stage_blocks.len(), samples, recompute);
        if let Some(known) = self.activations.borrow().get(&key) {
            return Ok(known.clone());
        }
        let (model, precision) = (&self.local.model, plan.storage.precision);
        let found =
            Rc::new(model.stage_activations(stage_blocks.iter().cloned(), samples, precision, recompute)?);
        self.activations.borrow_mut().insert(key, found.clone());
        Ok(found)
    }
}

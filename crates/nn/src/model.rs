//! From the model as data to layers that run: names become parameter ids, linear layers and the cheap
//! operations before them become chains, and each block, or the inside of each attention, is wrapped for
//! recomputation where that is asked for.

mod builder;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::ops::Range;

use espalier_plan::layout::LocalModel;
use espalier_plan::spec;
use espalier_tensor::Tensor;
use espalier_tensor::ops::cross_entropy::LossTotal;

use crate::layers::*;
use crate::weights::{ParameterId, WeightStore};
use crate::{AxisGroups, Result};
use builder::Builder;

/// A model that runs, or a stage of one.
#[derive(Debug)]
pub struct Model {
    blocks: Vec<Box<dyn Layer>>,
    /// The number of the first of them in the full model.
    first_block: usize,
    /// The end of the model, where this is the last stage.
    head: Option<Head>,
    /// Whether samples enter here, whose gradient nobody wants.
    is_first: bool,
    tied: HashSet<ParameterId>,
}

impl Model {
    /// Builds the layers of an unsharded model whose shapes have been checked.
    pub fn build(spec: &spec::ModelSpec, recompute: spec::RecomputeMode) -> Model {
        Model::of_rank(&LocalModel::unsharded(spec), &AxisGroups::single_rank(), recompute, None)
    }

    /// Builds the layers of a rank's model, where asked with gates that can be frozen.
    pub fn of_rank(
        local: &LocalModel,
        groups: &AxisGroups,
        recompute: spec::RecomputeMode,
        frozen_gates: Option<&FrozenGates>,
    ) -> Model {
        let spec = &local.model;
        let mut builder = Builder::new(local, groups, recompute, frozen_gates);
        let last = spec.blocks.len() - 1;
        let blocks = spec
            .blocks
            .iter()
            .enumerate()
            .map(|(i, block)| -> Box<dyn Layer> {
                let head = usize::from(i == last && spec.head().is_some());
                let layers = builder.sequence(&block.layers[..block.layers.len() - head]);
                // The last block's backward pass follows at once: forgetting its activations would save nothing.
                match recompute.remakes(i, last) {
                    true => Box::new(RecomputeLayer(layers)),
                    false => Box::new(layers),
                }
            })
            .collect();
        let classes = local.classes.as_ref().map(|classes| {
            let group = groups.along(classes.axis).clone();
            LogitShard { group, local: classes.own.clone(), count: spec.classes }
        });
        let head = Head { linear: spec.head().and_then(|layer| builder.linear(layer)), classes };
        Model { blocks, first_block: 0, head: Some(head), is_first: true, tied: builder.into_tied() }
    }

    /// Splits it into stages of consecutive blocks.
    pub fn into_stages(self, block_ranges: &[Range<usize>]) -> Vec<Model> {
        let Model { blocks, mut head, tied, .. } = self;
        let mut blocks = blocks.into_iter();
        let stage = |(i, range): (usize, &Range<usize>)| Model {
            blocks: blocks.by_ref().take(range.len()).collect(),
            first_block: range.start,
            head: if i + 1 == block_ranges.len() { head.take() } else { None },
            is_first: i == 0,
            tied: tied.clone(),
        };
        block_ranges.iter().enumerate().map(stage).collect()
    }

    /// Whether samples enter here.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Whether the loss is made here.
    pub fn is_last(&self) -> bool {
        self.head.is_some()
    }

    /// What the head, or the next stage, reads of a batch.
    pub fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let mut blocks = (self.first_block..).zip(&self.blocks);
        let x = blocks.try_fold(x, |x, (number, block)| {
            let next = (number < self.last_block()).then_some(number + 1);
            ctx.in_block(number, next, |ctx| block.forward(x, ctx))
        })?;
        if let Some(Head { linear: Some(linear), .. }) = &self.head {
            ctx.observe(linear, &x)?;
        }
        Ok(x)
    }

    /// The loss of a batch whose rows have these targets, and the gradient of `scale` times it for
    /// [`Model::backward`], from what [`Model::forward`] gave. On a GPU this waits for all queued work, once.
    pub fn loss(
        &self,
        x: Tensor,
        targets: &Tensor,
        scale: LossScaling,
        ctx: &mut BackwardContext<'_>,
    ) -> Result<HeadOutput> {
        ctx.in_block(self.last_block(), None, |ctx| self.end().loss(x, targets, scale, ctx))
    }

    /// The loss and correct predictions, without gradients.
    pub fn evaluate(&self, x: &Tensor, targets: &Tensor, weights: &dyn WeightStore) -> Result<LossTotal> {
        let dense = weights.enter(self.last_block(), None)?;
        self.end().evaluate(x, targets, dense.as_deref().unwrap_or(weights))
    }

    /// The logits of what [`Model::forward`] gave, of this rank's classes: for models of few classes.
    pub fn logits(&self, x: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        let dense = weights.enter(self.last_block(), None)?;
        self.end().logits(x, dense.as_deref().unwrap_or(weights))
    }

    /// The logits of the last row of what [`Model::forward`] gave, of this rank's classes.
    pub fn last_logits(&self, x: &Tensor, weights: &dyn WeightStore) -> Result<Tensor> {
        let dense = weights.enter(self.last_block(), None)?;
        self.end().last_logits(x, dense.as_deref().unwrap_or(weights))
    }

    /// Whether such a row has all classes.
    pub fn has_all_classes(&self) -> bool {
        self.end().has_all_classes()
    }

    /// Such a row on the host, of all classes.
    pub fn read_logits(&self, logits: &Tensor) -> Result<Vec<f32>> {
        self.end().read_logits(logits)
    }

    /// Sends the gradient of what [`Model::forward`] gave back through all blocks; what comes out is for the
    /// stage before.
    pub fn backward(&self, gradient: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
        let mut gradient = Some(GradientParts::from(gradient));
        for (i, block) in self.blocks.iter().enumerate().rev() {
            let dy = gradient.expect("only the first block has no input gradient");
            let needs_dx = i > 0 || !self.is_first;
            let number = self.first_block + i;
            let next = (i > 0).then(|| number - 1);
            gradient = ctx.in_block(number, next, |ctx| block.backward_parts(dy, ctx, needs_dx))?;
        }
        debug_assert!(ctx.stash.is_empty(), "a layer left something on the stash");
        gradient.map(GradientParts::join).transpose()
    }

    /// The block that the head belongs to.
    fn last_block(&self) -> usize {
        self.first_block + self.blocks.len() - 1
    }

    fn end(&self) -> &Head {
        self.head.as_ref().expect("the last part of a model")
    }

    /// Parameters that more than one layer uses.
    pub fn tied(&self) -> &HashSet<ParameterId> {
        &self.tied
    }
}

//! The Hessian of the loss times a direction v, by differences of four gradients:
//!
//! ```text
//! H v = (8 (g(w + e v) - g(w - e v)) - (g(w + 2 e v) - g(w - 2 e v))) / 12 e + O(e^4)        e = STEP |w| / |v|
//! ```
//!
//! Norms are over all parameters that move, so that they move by the same fraction whatever the scale of the
//! loss. The error of the difference grows with STEP^4, that of rounding to f32 with 1 / STEP. Batch norm
//! bends the gradient so much along the way that with two points no step is good: on resnet-18 the best is
//! off by 3e-4, four points at the step below by 1e-4, and two at the step that suits networks without norms
//! (3e-4) by 4e-2, which is 2 % of GraSP's mask.
//!
//! ReLU and max pool choose at both points as they do at w ([`FrozenGates`]): without that the difference is
//! noise. In bf16 it would drown in rounding, so the passes run in f32 on a copy of the weights, whatever the
//! run's precision. The copy is what moves: the weights themselves are never touched.

use espalier_nn::layers::FrozenGates;
use espalier_nn::model::Model;
use espalier_nn::weights::{ParameterId, Weights};
use espalier_tensor::ops::elementwise::{add_into, scale_into};
use espalier_tensor::{Category, DType, Tensor};

use super::gradient::{GradientSums, ScoringSamples, gradient};
use crate::Result;
use crate::context::TrainContext;
use crate::stage::Stage;
use crate::state::ParamStore;
use crate::step::NoUpdatePass;

/// How far the weights move, as a fraction of their norm.
const STEP: f64 = 1e-4;

/// The points, in steps, and the weights of the gradients there, in twelfths of a step.
const POINTS: [(f32, f32); 4] = [(1.0, 8.0), (-1.0, -8.0), (2.0, -1.0), (-2.0, 1.0)];

/// Derivatives of the loss of a network with respect to some of its parameters, as f32.
#[derive(Debug)]
pub struct Curvature<'a> {
    params: &'a ParamStore,
    ids: &'a [ParameterId],
    scored: ScoringSamples<'a>,
    /// The weights in f32.
    copy: Weights,
}

impl<'a> Curvature<'a> {
    /// Over the loss of some samples at these weights, with respect to the parameters of these ids.
    pub fn new(
        params: &'a ParamStore,
        ids: &'a [ParameterId],
        scored: ScoringSamples<'a>,
    ) -> Result<Curvature<'a>> {
        Ok(Curvature { params, ids, scored, copy: params.widened()? })
    }

    /// The gradient at the weights themselves.
    pub fn gradient(&self) -> Result<Vec<Tensor>> {
        gradient(self.no_update_pass(&self.scored.context.stage), self.ids, self.scored)
    }

    /// The Hessian times a direction, which has a tensor for each parameter.
    pub fn hessian_product(&mut self, direction: &[Tensor]) -> Result<Vec<Tensor>> {
        self.hessian_product_of(direction, self.ids)
    }

    /// The same for some parameters.
    pub(super) fn hessian_product_of(
        &mut self,
        direction: &[Tensor],
        ids: &[ParameterId],
    ) -> Result<Vec<Tensor>> {
        let weights = self.norm(self.ids.iter().map(|id| self.copy.get(*id)))?;
        let step = STEP * weights / self.norm(direction.iter())?;
        if !step.is_normal() {
            // Nothing moves, or nowhere.
            let zeros =
                |like: &Tensor| Tensor::zeros(&like.device(), like.shape(), like.dtype(), Category::Scoring);
            return Ok(ids.iter().map(|id| zeros(self.copy.get(*id))).collect::<Result<_, _>>()?);
        }
        let gates = FrozenGates::default();
        let TrainContext { plan, ranks, .. } = self.scored.context;
        let local = plan.layout.of(ranks.coords());
        let model = Model::of_rank(local, ranks.axes(), plan.storage.recompute, Some(&gates));
        let stage = Stage::of_model(model, plan, ranks)?;
        let (mut sums, mut nothing) = (GradientSums::of(ids), GradientSums::of(&[]));
        for micro_batch in self.scored.micro_batches_of_all() {
            let train = |curvature: &Self, sink: &mut GradientSums| {
                let (no_update_pass, loss) = (curvature.no_update_pass(&stage), curvature.scored.loss());
                no_update_pass
                    .train(micro_batch.samples, loss, &micro_batch.batch_slice, &mut Vec::new(), sink)
                    .map(|_| ())
            };
            gates.release();
            train(self, &mut nothing)?;
            gates.freeze();
            for (steps, weight) in POINTS {
                self.move_by(direction, steps * step as f32)?;
                sums.factor = weight;
                train(self, if micro_batch.counts { &mut sums } else { &mut nothing })?;
            }
            self.move_by(direction, 0.0)?;
        }
        let mut product = sums.take(ids, self.scored.context)?;
        for sum in &mut product {
            scale_into(sum, (1.0 / (12.0 * step)) as f32)?;
        }
        Ok(product)
    }

    /// The norm of the parameters' tensors, those of all stages.
    fn norm<'t>(&self, tensors: impl Iterator<Item = &'t Tensor>) -> Result<f64> {
        let tensors: Vec<_> = self.ids.iter().copied().zip(tensors).collect();
        Ok(self.scored.context.squared_norm(&tensors)?.sqrt())
    }

    /// Puts the copy that far from the weights.
    fn move_by(&mut self, direction: &[Tensor], by: f32) -> Result<()> {
        let params = self.params;
        let fresh = |id: &ParameterId, direction: &Tensor| -> Result<Tensor> {
            let mut moved = params.param(*id).widened(Category::Workspace)?;
            if by != 0.0 {
                let mut shift = direction.duplicate(Category::Workspace)?;
                scale_into(&mut shift, by)?;
                add_into(&mut moved, &shift)?;
            }
            Ok(moved)
        };
        for (id, direction) in self.ids.iter().zip(direction) {
            // Workspace until it replaces the old one.
            let weight = self.copy.get_mut(*id);
            *weight = fresh(id, direction)?;
            weight.tag_memory(Category::Scoring);
        }
        Ok(())
    }

    fn no_update_pass<'b>(&'b self, stage: &'b Stage) -> NoUpdatePass<'b> {
        NoUpdatePass { stage, dtype: DType::F32, ..NoUpdatePass::of(self.scored.context, &self.copy) }
    }
}

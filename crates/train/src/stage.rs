//! The chunks of a model that a rank holds, and where the others are.
//!
//! Without a pipeline there is one chunk, which is the model.

use espalier_nn::model::Model;
use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_plan::schedule::{Chunk, Payload, Placement, StageMessage};
use espalier_plan::spec::Shape;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::parallel::Ranks;

/// What one rank runs of a model.
#[derive(Debug)]
pub struct Stage {
    /// One for each chunk of the rank, in the order of the placement.
    models: Vec<Model>,
    /// Of each chunk the parameters that it uses, ascending.
    parameters: Vec<Vec<ParameterId>>,
    placement: Placement,
    rank: usize,
    /// The shape of a sample before each virtual stage.
    borders: Vec<Shape>,
}

impl Stage {
    /// An unsharded model on one rank.
    pub fn unsharded(model: Model, plan: &Plan) -> Stage {
        let placement = Placement::round_robin(1, 1, plan.batch.micro_batches);
        let parameters = vec![(0..plan.model.parameters().len()).map(ParameterId).collect()];
        let borders = vec![plan.model.input.shape()];
        Stage { models: vec![model], parameters, placement, rank: 0, borders }
    }

    /// What a rank of a plan runs.
    pub fn new(plan: &Plan, ranks: &Ranks) -> Result<Stage> {
        let local = plan.layout.of(ranks.coords());
        Stage::of_model(Model::of_rank(local, ranks.axes(), plan.storage.recompute, None), plan, ranks)
    }

    /// What a rank of a plan runs of this model.
    pub fn of_model(model: Model, plan: &Plan, ranks: &Ranks) -> Result<Stage> {
        let placement = plan.schedule(1)?.placement;
        let (rank, local) = (ranks.stages().rank(), &plan.layout.of(ranks.coords()).model);
        let mut models: Vec<Option<Model>> =
            model.into_stages(&plan.stage_blocks).into_iter().map(Some).collect();
        let (tensors, borders) =
            (local.block_tensors(), local.borders().map_err(espalier_plan::Error::from)?);
        let parameters = |chunk: &Chunk| {
            let param_indices = tensors.parameters(plan.stage_blocks[chunk.virtual_stage].clone());
            param_indices.into_iter().map(ParameterId).collect()
        };
        let mut take = |chunk: &Chunk| models[chunk.virtual_stage].take().expect("a rank holds a chunk once");
        Ok(Stage {
            models: placement.chunks(rank).iter().map(&mut take).collect(),
            parameters: placement.chunks(rank).iter().map(parameters).collect(),
            borders: plan.stage_blocks.iter().map(|blocks| borders[blocks.start]).collect(),
            placement,
            rank,
        })
    }

    /// The layers of a chunk.
    pub fn model(&self, chunk: usize) -> &Model {
        &self.models[chunk]
    }

    /// What a chunk uses, ascending.
    pub fn parameters(&self, chunk: usize) -> &[ParameterId] {
        &self.parameters[chunk]
    }

    /// What each chunk is.
    pub fn chunks(&self) -> &[Chunk] {
        self.placement.chunks(self.rank)
    }

    /// Which rank holds which chunk, in every pipeline.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The shape of a sample of what a message brings to a chunk: activations enter it, gradients come from behind it.
    pub fn border(&self, message: &StageMessage) -> Shape {
        let stage = self.chunks()[message.chunk].virtual_stage;
        self.borders[stage + usize::from(message.payload == Payload::Gradient)]
    }

    /// A receive buffer for a message of so many samples; in the precision of the kernels.
    pub fn recv_buffer(
        &self,
        message: &StageMessage,
        samples: usize,
        device: &Device,
        dtype: DType,
    ) -> Result<Tensor> {
        let shape = dimensions(self.border(message), samples);
        Ok(Tensor::empty(device, &shape, dtype, Category::Transient)?)
    }
}

/// The dimensions of so many samples.
fn dimensions(shape: Shape, samples: usize) -> Vec<usize> {
    match shape {
        Shape::Tokens { seq } => vec![samples, seq],
        Shape::Sequence { seq, width } => vec![samples, seq, width],
        Shape::Image { height, width, channels } => vec![samples, height, width, channels],
        Shape::Vector { width } => vec![samples, width],
    }
}

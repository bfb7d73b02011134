//! The parts of a model that a rank holds, and where the others are.
//!
//! Without a pipeline there is one part, which is the model. Work that is not on a schedule (evaluation, scores) goes
//! through the parts one after the other ([`Stage::through`]), whoever holds them.

use std::ops::Range;

use espalier_comm::Communicator;
use espalier_plan::Plan;
use espalier_plan::schedule::{Chunk, Placement};
use espalier_plan::spec::Recompute;
use espalier_plan::spec::Shape;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::model::Model;
use crate::parallel::Ranks;
use crate::weights::{Held, ParameterId};

/// What one rank runs of a model.
#[derive(Debug)]
pub struct Stage {
    /// One for each chunk of the rank, in the order of the placement.
    models: Vec<Model>,
    /// What each uses.
    parameters: Vec<Vec<ParameterId>>,
    placement: Placement,
    rank: usize,
    /// What a sample looks like before each part.
    borders: Vec<Shape>,
}

impl Stage {
    /// A whole model on one rank.
    pub fn whole(model: Model, plan: &Plan) -> Stage {
        let placement = Placement::round_robin(1, 1, plan.batch.micro_batches);
        let parameters = vec![(0..plan.model.parameters().len()).map(ParameterId).collect()];
        let borders = vec![plan.model.input.shape()];
        Stage { models: vec![model], parameters, placement, rank: 0, borders }
    }

    /// What a rank of a plan runs.
    pub fn new(plan: &Plan, ranks: Option<&Ranks>) -> Result<Stage> {
        let model = Model::build(&plan.model, plan.storage.recompute == Recompute::Block);
        Stage::cut(model, plan, ranks)
    }

    /// What a rank of a plan runs of this model.
    pub fn cut(model: Model, plan: &Plan, ranks: Option<&Ranks>) -> Result<Stage> {
        let placement = plan.schedule(1)?.placement;
        let rank = ranks.map_or(0, |ranks| ranks.stages().rank());
        let mut models: Vec<Option<Model>> = model.cut(&plan.parts).into_iter().map(Some).collect();
        let (tensors, borders) =
            (plan.model.block_tensors(), plan.model.borders().map_err(espalier_plan::Error::from)?);
        let parameters = |chunk: &Chunk| {
            let places = tensors.parameters(plan.parts[chunk.part].clone());
            places.into_iter().map(ParameterId).collect()
        };
        let mut take = |chunk: &Chunk| models[chunk.part].take().expect("a rank holds a part once");
        Ok(Stage {
            models: placement.chunks(rank).iter().map(&mut take).collect(),
            parameters: placement.chunks(rank).iter().map(parameters).collect(),
            borders: plan.parts.iter().map(|part| borders[part.start]).collect(),
            placement,
            rank,
        })
    }

    /// The parameters and statistics of what a rank of a plan runs.
    pub fn held(plan: &Plan, ranks: Option<&Ranks>) -> Result<Held> {
        let placement = plan.schedule(1)?.placement;
        let rank = ranks.map_or(0, |ranks| ranks.stages().rank());
        let parts = placement.chunks(rank).iter().map(|chunk| plan.parts[chunk.part].clone());
        Ok(Held::of(&plan.model, parts.collect::<Vec<Range<usize>>>()))
    }

    /// A chunk.
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

    /// Who holds what.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Room for what enters a chunk, or leaves it; in the precision of the kernels.
    pub fn room(
        &self,
        chunk: usize,
        side: Side,
        samples: usize,
        device: &Device,
        dtype: DType,
    ) -> Result<Tensor> {
        let part = self.placement.chunks(self.rank)[chunk].part;
        let border = match side {
            Side::Input => part,
            Side::Output => part + 1,
        };
        let shape = dimensions(self.borders[border], samples);
        Ok(Tensor::empty(device, &shape, dtype, Category::Activations)?)
    }

    /// Runs the chunks of one copy of the model in the order of the forward pass, each on what the part before it gave.
    pub fn through(
        &self,
        copy: usize,
        relay: Option<&Communicator>,
        mut room: impl FnMut(usize, Side) -> Result<Tensor>,
        mut run: impl FnMut(usize, Option<Tensor>) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        self.relay(copy, Side::Input, relay, &mut room, &mut run)
    }

    /// The same in the order of the backward pass.
    pub fn back_through(
        &self,
        copy: usize,
        relay: Option<&Communicator>,
        mut room: impl FnMut(usize, Side) -> Result<Tensor>,
        mut run: impl FnMut(usize, Option<Tensor>) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        self.relay(copy, Side::Output, relay, &mut room, &mut run)
    }

    /// `from` is the side on which a part takes what the other has made.
    fn relay(
        &self,
        copy: usize,
        from: Side,
        relay: Option<&Communicator>,
        room: &mut dyn FnMut(usize, Side) -> Result<Tensor>,
        run: &mut dyn FnMut(usize, Option<Tensor>) -> Result<Option<Tensor>>,
    ) -> Result<()> {
        let chunks = self.placement.chunks(self.rank).iter().copied().enumerate();
        let mut own: Vec<(usize, Chunk)> = chunks.filter(|(_, chunk)| chunk.pipeline == copy).collect();
        if from == Side::Output {
            own.reverse();
        }
        let (mut carried, mut sending) = (None, Vec::new());
        let others = || relay.expect("a stage of several has the others");
        for (index, chunk) in own {
            let (before, after) = match from {
                Side::Input => (self.placement.before(chunk), self.placement.after(chunk)),
                Side::Output => (self.placement.after(chunk), self.placement.before(chunk)),
            };
            let rank_of = |chunk: Option<Chunk>| chunk.map(|chunk| self.placement.rank_of(chunk));
            // A border is named by the part before it.
            let tag = |border: usize| 2 * border as u32 + u32::from(from == Side::Output);
            let (taken, given) = match from {
                Side::Input => (tag(chunk.part.saturating_sub(1)), tag(chunk.part)),
                Side::Output => (tag(chunk.part), tag(chunk.part.saturating_sub(1))),
            };
            let input = match rank_of(before) {
                None => None,
                Some(rank) if rank == self.rank => carried.take(),
                Some(rank) => Some(others().receive(room(index, from)?, rank, taken)?),
            };
            let output = run(index, input)?;
            match rank_of(after) {
                None => {}
                Some(rank) if rank == self.rank => carried = output,
                Some(rank) => {
                    let output = output.expect("what the next part takes");
                    sending.push(others().start_send(output, rank, given)?);
                }
            }
        }
        // Nobody runs further ahead than the next part has room for.
        sending.into_iter().try_for_each(|request| request.wait().map(drop))?;
        Ok(())
    }
}

/// A side of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where activations enter and gradients leave.
    Input,
    /// Where activations leave and gradients enter.
    Output,
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

//! Buffers of the collectives between layers: a message of several ranks' shards lies beside the tensor that
//! it is made of, or becomes, while it travels. And of what ranks send each other about logits, where each
//! makes those of some classes.

use std::collections::HashMap;

use super::shape::Shape;
use super::{
    CollectiveLayer, CollectiveOp, LayerSpec, ModelSpec, Parameter, Precision, ShapeError, ShardDim,
};

/// Bytes of logits that exist at once on the host: the loss takes rows in chunks.
pub const LOGITS_ON_HOST: usize = 64 << 20;
/// The same on a GPU.
pub const LOGITS_ON_GPU: usize = 256 << 20;
/// Numbers that a rank sends for a row of logits, in f32.
pub const NUMBERS_OF_A_ROW: usize = 4;

/// Rows of logits that exist at once, of `rows` in all: about equal chunks, and whole tiles of the products.
/// A row has so many `bytes`, of at most `most` together.
pub fn chunk_rows(rows: usize, bytes: usize, most: usize) -> usize {
    let count = rows.div_ceil((most / bytes.max(1)).max(1)).max(1);
    rows.div_ceil(count).next_multiple_of(128)
}

/// The messages of a block.
#[derive(Debug, Clone, Default)]
pub struct BlockMessages {
    /// Elements of the largest message, forward or backward.
    pub most: u64,
    /// What its backward pass does, in order.
    pub backward: Vec<BackwardEvent>,
}

/// A moment of a backward pass.
#[derive(Debug, Clone)]
pub enum BackwardEvent {
    /// A message of so many elements.
    Message(u64),
    /// The gradients of the parameters of these indices are made.
    Gradients(Vec<usize>),
}

impl ModelSpec {
    /// The messages of each block in a pass of so many samples; nothing where no layer does. The model has
    /// these parameters.
    pub fn messages(
        &self,
        parameters: &[Parameter],
        samples: usize,
    ) -> Result<Vec<BlockMessages>, ShapeError> {
        let mut has_collectives = false;
        self.for_each(&mut |layer| has_collectives |= matches!(layer, LayerSpec::Collective(_)));
        if !has_collectives {
            return Ok(vec![BlockMessages::default(); self.blocks.len()]);
        }
        let borders = self.borders()?;
        let ids = parameters.iter().enumerate().map(|(id, one)| (one.name.as_str(), id)).collect();
        let blocks = self.blocks.iter().zip(borders).map(|(block, shape)| {
            let mut walk =
                MessageWalk { samples: samples as u64, ids: &ids, found: BlockMessages::default() };
            walk.row(&block.layers, shape);
            walk.found.backward.reverse();
            walk.found
        });
        Ok(blocks.collect())
    }

    /// Rows of the logits, in a pass of so many samples.
    pub(crate) fn logit_rows(&self, samples: usize) -> Result<usize, ShapeError> {
        let (borders, samples) = (self.borders()?, self.samples_at_borders(samples as u64));
        let end = borders.last().zip(samples.last());
        Ok(end.map_or(0, |(shape, samples)| shape.rows().saturating_mul(*samples) as usize))
    }
}

/// Bytes of what ranks that have the logits of some of all classes each send one another about a chunk of rows.
pub(crate) fn shared_logit_bytes(
    rows: usize,
    classes: usize,
    ranks: usize,
    precision: Precision,
    most: usize,
) -> u64 {
    let bytes = classes.div_ceil(ranks.max(1)).saturating_mul(precision.size() as usize);
    let chunk = rows.min(chunk_rows(rows, bytes, most));
    (ranks as u64).saturating_mul(chunk as u64).saturating_mul(4 * NUMBERS_OF_A_ROW as u64)
}

/// A walk through a block, forwards: what its backward pass does is found in the reverse order.
struct MessageWalk<'a> {
    samples: u64,
    ids: &'a HashMap<&'a str, usize>,
    found: BlockMessages,
}

impl MessageWalk<'_> {
    fn row(&mut self, layers: &[LayerSpec], mut shape: Shape) {
        for layer in layers {
            let output = layer.output(shape).expect("the shapes were checked");
            match (layer, layer.description().branches()) {
                (_, Some(branches)) => branches.all.iter().for_each(|branch| self.row(branch.layers, shape)),
                (LayerSpec::Collective(collective), None) => {
                    let sent = |how, shape| elements(collective, how, shape, self.samples);
                    let (forward, backward) =
                        (sent(collective.forward, shape), sent(collective.backward, output));
                    self.found.most = self.found.most.max(forward).max(backward);
                    // What a linear layer reads may be gathered once more for its gradient.
                    let again = if collective.is_entrance() { forward } else { 0 };
                    let message = backward.max(again);
                    self.found.backward.extend((message > 0).then_some(BackwardEvent::Message(message)));
                }
                (_, None) => {
                    let names = layer.parameters();
                    let ids: Vec<usize> = names
                        .iter()
                        .rev()
                        .filter_map(|one| self.ids.get(one.name.as_str()).copied())
                        .collect();
                    self.found.backward.extend((!ids.is_empty()).then_some(BackwardEvent::Gradients(ids)));
                }
            }
            shape = output;
        }
    }
}

/// Elements of one collective on a tensor of that shape: the shards of all ranks, each as large as the largest.
fn elements(collective: &CollectiveLayer, how: CollectiveOp, shape: Shape, samples: u64) -> u64 {
    let (CollectiveOp::AllGather(along) | CollectiveOp::ReduceScatter(along)) = how else { return 0 };
    let ranks = collective.ranks() as u64;
    let padded = ranks * collective.shard_sizes.iter().copied().max().unwrap_or(0) as u64;
    let width = shape.last() as u64;
    match along {
        ShardDim::Samples => samples.next_multiple_of(ranks) * shape.elements(),
        ShardDim::Sequence => samples * padded * width,
        ShardDim::Last => samples * shape.rows() * padded,
    }
}

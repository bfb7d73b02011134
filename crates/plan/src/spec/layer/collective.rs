//! A collective between two layers, over the ranks of an axis. A person does not write it: the layout puts
//! it into each rank's own model, so that the layers around it need not know of other ranks.

use std::ops::Range;

use serde::Serialize;

use super::super::shape::Shape;
use super::{LayerDescription, Properties, expect_last, floats};
use crate::mesh::Axis;
use crate::split::split;

/// A tensor from one sharding to the next, forward, and its gradient backward.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CollectiveLayer {
    /// The ranks that take part.
    pub axis: Axis,
    /// What becomes of the tensor.
    pub forward: CollectiveOp,
    /// What becomes of its gradient.
    pub backward: CollectiveOp,
    /// How much each rank has of the dimension that is sharded, where one is; of samples only a batch says
    /// how many there are.
    #[serde(rename = "parts")]
    pub shard_sizes: Vec<usize>,
    /// Which of them this rank is.
    pub rank: usize,
}

/// What becomes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveOp {
    /// It is already as the next layer wants it.
    #[serde(rename = "nothing")]
    Identity,
    /// Every rank has a partial sum, and gets the sum.
    #[serde(rename = "sum")]
    AllReduce,
    /// Every rank has its shard, and gets all.
    #[serde(rename = "gather")]
    AllGather(ShardDim),
    /// Every rank has all, and keeps its shard: nothing is sent.
    Slice(ShardDim),
    /// Every rank has a partial sum, and gets its shard of the sum.
    ReduceScatter(ShardDim),
    /// Every rank has its shard along one dimension, and gets its shard along another.
    #[serde(rename = "deal")]
    AllToAll {
        /// The dimension that was sharded,
        from: ShardDim,
        /// and the one that then is.
        to: ShardDim,
    },
}

/// The dimension that is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardDim {
    /// The samples of a micro-batch: the first dimension.
    Samples,
    /// The positions of a sequence: the last dimension but one.
    Sequence,
    /// The last: channels, features.
    Last,
}

/// What the batch norm behind it measures, all-reduced before it normalises; backward likewise what
/// the gradient of its input needs of all rows. The tensor itself stays where it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedStatistics {
    /// Channels of that norm.
    pub channels: usize,
    /// The axes whose ranks measure together. Those along the data axis do in the steps of training alone:
    /// elsewhere some may have fewer micro-batches than others.
    pub over: Vec<Axis>,
    /// Whether the ranks of one replica among them have other samples of a micro-batch, rather than other pixels.
    pub shares_samples: bool,
}

impl SharedStatistics {
    /// Numbers that travel forward, and backward, in f64: two sums for each channel, and the rows.
    pub fn numbers(&self) -> u64 {
        2 * self.channels as u64 + 1
    }
}

impl LayerDescription for SharedStatistics {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        expect_last(input, self.channels)
    }

    fn properties(&self) -> Properties {
        Properties { passes_gradient: true, ..Properties::PLAIN }
    }
}

impl CollectiveLayer {
    /// Whether what it gives is what it gets, or is gathered anew for the backward pass: then a linear layer
    /// behind it keeps what stands before it.
    pub fn is_entrance(&self) -> bool {
        matches!(self.forward, CollectiveOp::Identity | CollectiveOp::AllGather(ShardDim::Sequence))
    }

    /// Ranks that take part.
    pub fn ranks(&self) -> usize {
        self.shard_sizes.len()
    }

    /// The samples of a micro-batch that are a rank's where they are sharded.
    pub fn samples_of(&self, rank: usize, all: usize) -> Range<usize> {
        split(all, self.ranks(), rank)
    }

    /// How many samples of a micro-batch of `all` this rank has behind it, of the `now` that it has before.
    pub(crate) fn samples_behind(&self, now: u64, all: u64) -> u64 {
        match self.forward {
            CollectiveOp::Slice(ShardDim::Samples)
            | CollectiveOp::ReduceScatter(ShardDim::Samples)
            | CollectiveOp::AllToAll { to: ShardDim::Samples, .. } => {
                self.samples_of(self.rank, all as usize).len() as u64
            }
            CollectiveOp::AllGather(ShardDim::Samples)
            | CollectiveOp::AllToAll { from: ShardDim::Samples, .. } => all,
            _ => now,
        }
    }
}

impl LayerDescription for CollectiveLayer {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        let input = floats(input)?;
        let (local, all) = (self.shard_sizes.get(self.rank).copied(), self.shard_sizes.iter().sum());
        let (along, before, after) = match self.forward {
            CollectiveOp::Identity | CollectiveOp::AllReduce => return Ok(input),
            CollectiveOp::AllGather(along) => (along, local.unwrap_or(0), all),
            CollectiveOp::Slice(along) | CollectiveOp::ReduceScatter(along) => {
                (along, all, local.unwrap_or(0))
            }
            CollectiveOp::AllToAll { from: ShardDim::Samples, to } => (to, all, local.unwrap_or(0)),
            CollectiveOp::AllToAll { from, .. } => (from, local.unwrap_or(0), all),
        };
        let (found, output) = match (along, input) {
            // A shape is that of one sample.
            (ShardDim::Samples, _) => return Ok(input),
            (ShardDim::Last, _) => (input.last(), input.with_last(after)),
            (ShardDim::Sequence, Shape::Sequence { seq, width }) => {
                (seq, Shape::Sequence { seq: after, width })
            }
            (ShardDim::Sequence, _) => return Err(format!("splits a sequence, got {input}")),
        };
        if found == before { Ok(output) } else { Err(format!("takes {before} of them, got {input}")) }
    }

    fn properties(&self) -> Properties {
        Properties { passes_gradient: self.backward == CollectiveOp::Identity, ..Properties::PLAIN }
    }
}

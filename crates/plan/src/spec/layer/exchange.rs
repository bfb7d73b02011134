//! What the ranks of an axis do with a tensor between two layers. A person does not write it: the layout puts it into each rank's
//! own model, so that the layers around it need not know of other ranks.

use std::ops::Range;

use serde::Serialize;

use super::super::shape::Shape;
use super::{Entry, Properties, expect_last, floats};
use crate::mesh::Axis;
use crate::split::split;

/// A tensor on its way from one sharding to the next, forward, and its gradient on the way back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// The ranks that take part.
    pub axis: Axis,
    /// What becomes of the tensor.
    pub forward: Move,
    /// What becomes of its gradient.
    pub backward: Move,
    /// What each rank has of the dimension that is cut, where one is; of samples only a batch says how many there are.
    pub parts: Vec<usize>,
    /// Which of them this rank is.
    pub rank: usize,
}

/// What becomes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Move {
    /// It is already as the next layer wants it.
    Nothing,
    /// Every rank has a summand, and gets the sum.
    Sum,
    /// Every rank has its part, and gets all.
    Gather(Along),
    /// Every rank has all, and keeps its part: nothing is sent.
    Slice(Along),
    /// Every rank has a summand, and gets its part of the sum.
    ReduceScatter(Along),
    /// Every rank has its part of one dimension, and gets its part of another: an all-to-all.
    Deal {
        /// The dimension that was cut,
        from: Along,
        /// and the one that then is.
        to: Along,
    },
}

/// The dimension that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Along {
    /// The samples of a micro-batch: the first dimension.
    Samples,
    /// The positions of a sequence: the last dimension but one.
    Sequence,
    /// The last: channels, columns.
    Last,
}

/// What the batch norm behind it measures, summed over ranks before it normalises; backwards likewise what the gradient of its input
/// needs of all rows. The tensor itself stays where it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedStatistics {
    /// Channels of that norm.
    pub channels: usize,
    /// The axes whose ranks measure together. Those along the data axis do in the steps of training alone: elsewhere some may have
    /// fewer micro-batches than others.
    pub over: Vec<Axis>,
    /// Whether the ranks of one replica among them have other samples of a micro-batch, rather than other pixels.
    pub shares_samples: bool,
}

impl SharedStatistics {
    /// Numbers that travel each way, in f64: two sums for each channel, and the rows.
    pub fn numbers(&self) -> u64 {
        2 * self.channels as u64 + 1
    }
}

impl Entry for SharedStatistics {
    fn word(&self) -> &'static str {
        "shared_statistics"
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        expect_last(input, self.channels)
    }

    fn properties(&self) -> Properties {
        Properties { passes_gradient: true, ..Properties::PLAIN }
    }
}

impl Exchange {
    /// Whether what it gives is what it gets, or is gathered anew for the backward pass: then a linear layer behind it keeps
    /// what stands before it.
    pub fn is_entrance(&self) -> bool {
        matches!(self.forward, Move::Nothing | Move::Gather(Along::Sequence))
    }

    /// Ranks that take part.
    pub fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// The samples of a micro-batch that are a rank's where they are cut.
    pub fn samples_of(&self, rank: usize, all: usize) -> Range<usize> {
        split(all, self.ranks(), rank)
    }

    /// How many samples of a micro-batch of `all` this rank has behind it, of the `now` that it has before.
    pub fn samples_behind(&self, now: u64, all: u64) -> u64 {
        match self.forward {
            Move::Slice(Along::Samples)
            | Move::ReduceScatter(Along::Samples)
            | Move::Deal { to: Along::Samples, .. } => self.samples_of(self.rank, all as usize).len() as u64,
            Move::Gather(Along::Samples) | Move::Deal { from: Along::Samples, .. } => all,
            _ => now,
        }
    }
}

impl Entry for Exchange {
    fn word(&self) -> &'static str {
        "exchange"
    }

    fn output(&self, input: Shape) -> Result<Shape, String> {
        let input = floats(input)?;
        let (own, all) = (self.parts.get(self.rank).copied(), self.parts.iter().sum());
        let (along, before, after) = match self.forward {
            Move::Nothing | Move::Sum => return Ok(input),
            Move::Gather(along) => (along, own.unwrap_or(0), all),
            Move::Slice(along) | Move::ReduceScatter(along) => (along, all, own.unwrap_or(0)),
            Move::Deal { from: Along::Samples, to } => (to, all, own.unwrap_or(0)),
            Move::Deal { from, .. } => (from, own.unwrap_or(0), all),
        };
        let (found, output) = match (along, input) {
            // A shape is that of one sample.
            (Along::Samples, _) => return Ok(input),
            (Along::Last, _) => (input.last(), input.with_last(after)),
            (Along::Sequence, Shape::Sequence { seq, width }) => (seq, Shape::Sequence { seq: after, width }),
            (Along::Sequence, _) => return Err(format!("splits a sequence, got {input}")),
        };
        if found == before { Ok(output) } else { Err(format!("takes {before} of them, got {input}")) }
    }

    fn properties(&self) -> Properties {
        Properties { passes_gradient: self.backward == Move::Nothing, ..Properties::PLAIN }
    }
}

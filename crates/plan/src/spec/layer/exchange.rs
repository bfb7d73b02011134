//! What the ranks of an axis do with a tensor between two layers. A person does not write it: the layout puts it into each rank's
//! own model, so that the layers around it need not know of other ranks.

use serde::Serialize;

use super::super::shape::Shape;
use super::{Entry, floats};
use crate::mesh::Axis;

/// A tensor on its way from one sharding to the next, forward, and its gradient on the way back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// The ranks that take part.
    pub axis: Axis,
    /// What becomes of the tensor.
    pub forward: Move,
    /// What becomes of its gradient.
    pub backward: Move,
    /// What each rank has of the dimension that is cut, where one is.
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
}

/// The dimension that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Along {
    /// Positions.
    Sequence,
    /// The last: channels, columns.
    Last,
}

impl Exchange {
    /// Whether what it gives is what it gets, or is gathered anew for the backward pass: then a linear layer behind it keeps
    /// what stands before it.
    pub fn is_entrance(&self) -> bool {
        matches!(self.forward, Move::Nothing | Move::Gather(Along::Sequence))
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
        };
        let (found, output) = match (along, input) {
            (Along::Last, _) => (input.last(), input.with_last(after)),
            (Along::Sequence, Shape::Sequence { seq, width }) => (seq, Shape::Sequence { seq: after, width }),
            (Along::Sequence, _) => return Err(format!("cuts a sequence, got {input}")),
        };
        if found == before { Ok(output) } else { Err(format!("takes {before} of them, got {input}")) }
    }
}

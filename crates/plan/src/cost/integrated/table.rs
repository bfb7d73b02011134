//! How activations lie between layers, and the cheapest ways from one split of them to another.

use super::super::{Cost, Setting};
use super::Choice;

/// How an activation lies on the ranks between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Each has some of the samples.
    Samples,
    /// Each has a slab of every image.
    Rows,
    /// Each has some of the channels, or of the columns.
    Columns,
    /// Each has all of it.
    Whole,
}

impl Split {
    pub(super) const ALL: [Split; 4] = [Split::Samples, Split::Rows, Split::Columns, Split::Whole];
}

/// How a layer finds its input and leaves its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    /// How its input lies, moved there where the layer before left it otherwise.
    pub from: Split,
    /// How its output lies.
    pub to: Split,
}

/// A way through some layers, and what it costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    pub cost: Cost,
    /// The last of what was decided on it, an index into the steps of a walk.
    pub step: Option<usize>,
}

/// Something decided on a way.
#[derive(Debug)]
pub(super) enum Step {
    /// How a layer finds its input and leaves its output, and how it is shared out where it multiplies.
    Layer(Stop, Option<Choice>),
    /// An activation is moved.
    Exchange(Cost),
    /// Both, in this order.
    Then(usize, usize),
}

/// The cheapest way from each split to each split, where there is one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table([[Option<Way>; 4]; 4]);

impl Table {
    pub const NONE: Table = Table([[None; 4]; 4]);

    pub fn get(&self, from: Split, to: Split) -> Option<Way> {
        self.0[from as usize][to as usize]
    }

    /// Takes a way where it is cheaper than what is known.
    pub fn offer(&mut self, from: Split, to: Split, way: Way, at: &Setting) {
        let known = &mut self.0[from as usize][to as usize];
        if known.is_none_or(|known| at.seconds(way.cost) < at.seconds(known.cost)) {
            *known = Some(way);
        }
    }

    pub fn ways(&self) -> impl Iterator<Item = (Split, Split, Way)> {
        let table = *self;
        let pairs = Split::ALL.into_iter().flat_map(|from| Split::ALL.map(|to| (from, to)));
        pairs.filter_map(move |(from, to)| Some((from, to, table.get(from, to)?)))
    }
}

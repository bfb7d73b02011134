//! How activations lie between layers, and the cheapest ways from one split of them to another.

use super::super::{Cost, Setting};
use super::LayerChoice;

/// How an activation lies on the ranks between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationSplit {
    /// Each has some of the samples.
    Samples,
    /// Each has a slab of every image.
    Rows,
    /// Each has some of the channels, or of the columns.
    Columns,
    /// Each has all of it.
    Replicated,
}

impl ActivationSplit {
    pub(super) const ALL: [ActivationSplit; 4] = [
        ActivationSplit::Samples,
        ActivationSplit::Rows,
        ActivationSplit::Columns,
        ActivationSplit::Replicated,
    ];
}

/// How a layer finds its input and leaves its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSplit {
    /// How its input lies, moved there where the layer before left it otherwise.
    pub from: ActivationSplit,
    /// How its output lies.
    pub to: ActivationSplit,
}

/// A way through some layers, and what it costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct CostedRoute {
    pub cost: Cost,
    /// The last of what was decided on it, an index into the steps of a walk.
    pub step: Option<usize>,
}

/// Something decided on a way.
#[derive(Debug)]
pub(super) enum RouteStep {
    /// How a layer finds its input and leaves its output, and how it is shared out where it multiplies.
    Layer(LayerSplit, Option<LayerChoice>),
    /// An activation is moved.
    Exchange(Cost),
    /// Both, in this order.
    Then(usize, usize),
}

/// The cheapest way from each split to each split, where there is one.
#[derive(Debug, Clone, Copy)]
pub(super) struct RouteTable([[Option<CostedRoute>; 4]; 4]);

impl RouteTable {
    pub const NONE: RouteTable = RouteTable([[None; 4]; 4]);

    pub fn get(&self, from: ActivationSplit, to: ActivationSplit) -> Option<CostedRoute> {
        self.0[from as usize][to as usize]
    }

    /// Takes a way where it is cheaper than what is known.
    pub fn offer(&mut self, from: ActivationSplit, to: ActivationSplit, way: CostedRoute, at: &Setting) {
        let known = &mut self.0[from as usize][to as usize];
        if known.is_none_or(|known| at.seconds(way.cost) < at.seconds(known.cost)) {
            *known = Some(way);
        }
    }

    pub fn ways(&self) -> impl Iterator<Item = (ActivationSplit, ActivationSplit, CostedRoute)> {
        let table = *self;
        let pairs =
            ActivationSplit::ALL.into_iter().flat_map(|from| ActivationSplit::ALL.map(|to| (from, to)));
        pairs.filter_map(move |(from, to)| Some((from, to, table.get(from, to)?)))
    }
}

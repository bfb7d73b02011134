//! How activations are split between layers, and the cheapest routes from one split to another.

use super::super::{Cost, Setting};
use super::LayerChoice;

/// How an activation is split over the ranks between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationSplit {
    /// Each has some of the samples.
    Samples,
    /// Each has a slab of every image.
    Rows,
    /// Each has some of the channels, or of the features.
    Features,
    /// Each has all of it.
    Replicated,
}

impl ActivationSplit {
    pub(super) const ALL: [ActivationSplit; 4] = [
        ActivationSplit::Samples,
        ActivationSplit::Rows,
        ActivationSplit::Features,
        ActivationSplit::Replicated,
    ];
}

/// How a layer finds its input and leaves its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSplit {
    /// The split of its input, moved there where the layer before left it otherwise.
    pub from: ActivationSplit,
    /// The split of its output.
    pub to: ActivationSplit,
}

/// A route through some layers, and what it costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct CostedRoute {
    pub cost: Cost,
    /// The last of what was decided on it, an index into the steps of a walk.
    pub step: Option<usize>,
}

/// Something decided on a route.
#[derive(Debug)]
pub(super) enum RouteStep {
    /// How a layer finds its input and leaves its output, and how its work is split where it multiplies.
    Layer(LayerSplit, Option<LayerChoice>),
    /// An activation is moved.
    Move(Cost),
    /// Both, in this order.
    Then(usize, usize),
}

/// The cheapest route from each split to each split, where there is one.
#[derive(Debug, Clone, Copy)]
pub(super) struct RouteTable([[Option<CostedRoute>; 4]; 4]);

impl RouteTable {
    pub const NONE: RouteTable = RouteTable([[None; 4]; 4]);

    pub fn get(&self, from: ActivationSplit, to: ActivationSplit) -> Option<CostedRoute> {
        self.0[from as usize][to as usize]
    }

    /// Takes a route where it is cheaper than what is known.
    pub fn offer(&mut self, from: ActivationSplit, to: ActivationSplit, route: CostedRoute, at: &Setting) {
        let known = &mut self.0[from as usize][to as usize];
        if known.is_none_or(|known| at.seconds(route.cost) < at.seconds(known.cost)) {
            *known = Some(route);
        }
    }

    pub fn routes(&self) -> impl Iterator<Item = (ActivationSplit, ActivationSplit, CostedRoute)> {
        let table = *self;
        let pairs =
            ActivationSplit::ALL.into_iter().flat_map(|from| ActivationSplit::ALL.map(|to| (from, to)));
        pairs.filter_map(move |(from, to)| Some((from, to, table.get(from, to)?)))
    }
}

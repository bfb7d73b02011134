//! Which mixtures a group of ranks can run: what the layout has layers for.
//!
//! Ranks that all read the same samples take theirs of them where a layer is by data, or begin with a tile of
//! every image, which only a pool or a flatten ends. Features are those of the last dimension, so a flatten,
//! which puts channels of many pixels side by side, wants all of them.

use super::ActivationSplit::{self, Features, Replicated, Rows, Samples};
use super::LayerSplit;
use crate::mesh::Axis;
use crate::spec::{LayerSpec, Named, TensorRole, TileRole};

/// One group of ranks, and what a person has said of it.
#[derive(Debug, Clone, PartialEq)]
pub struct IntegratedGroup {
    /// The axis that it lies along: ranks that see all of every image, or a tile.
    pub axis: Axis,
    /// The layers that are by model, where that is said; the others are by data or by domain.
    pub by_model: Option<Named>,
}

impl IntegratedGroup {
    /// How what is read of the data is split.
    pub(super) fn begins(&self) -> ActivationSplit {
        if self.axis == Axis::Spatial { Rows } else { Replicated }
    }

    /// Whether a layer that multiplies can, and may, go so.
    pub(super) fn multiplies(&self, layer: &LayerSpec, name: &str, stop: LayerSplit) -> bool {
        let by_model = matches!(stop, LayerSplit { to: Features, .. } | LayerSplit { from: Features, .. });
        let may = self.by_model.as_ref().is_none_or(|named| named.means(name) == by_model);
        // Convolutions are split by their outputs alone.
        let can = match layer.properties().tensor_role {
            TensorRole::ColumnOrRowParallel => stop.from != Rows,
            TensorRole::ColumnParallel => stop.from != Features,
            _ => !by_model,
        };
        may && can
    }

    /// Whether a layer that does not multiply can go so.
    pub(super) fn passes(&self, layer: &LayerSpec, stop: LayerSplit) -> bool {
        match stop.from {
            Rows => ends_tiles(layer) == (stop.to == Replicated),
            Features => layer.properties().tensor_role.is_between(),
            Samples | Replicated => true,
        }
    }

    /// Whether an activation can be moved so.
    pub(super) fn moves(&self, from: ActivationSplit, to: ActivationSplit) -> bool {
        from == to || ![from, to].contains(&Rows)
    }
}

/// Whether a layer ends a split of images, by an all-reduce over their tiles.
pub(super) fn ends_tiles(layer: &LayerSpec) -> bool {
    matches!(layer.properties().tile_role, TileRole::Mean(_) | TileRole::Gathered)
}

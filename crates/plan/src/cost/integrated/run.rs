//! Which mixtures a group of ranks can run: what the layout has layers for.
//!
//! Ranks that all read the same samples take theirs of them where a layer is by data, or begin with a tile of every image, which only
//! a pool or a flatten ends. Columns are those of the last dimension, so a flatten, which puts channels of many pixels side by side,
//! wants all of them.

use super::{Split, Stop};
use crate::mesh::Axis;
use crate::spec::{Layer, Named, OnTiles, TensorRole};

/// One group of ranks, and what a person has said of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// The axis that it lies along: ranks that see all of every image, or a tile.
    pub axis: Axis,
    /// The layers that are by model, where that is said; the others are by data or by domain.
    pub by_model: Option<Named>,
}

impl Group {
    /// How what is read of the data lies.
    pub(super) fn begins(&self) -> Split {
        if self.axis == Axis::Spatial { Split::Rows } else { Split::Whole }
    }

    /// Whether a layer that multiplies can, and may, go so.
    pub(super) fn multiplies(&self, layer: &Layer, name: &str, stop: Stop) -> bool {
        let by_model = matches!(stop, Stop { to: Split::Columns, .. } | Stop { from: Split::Columns, .. });
        let may = self.by_model.as_ref().is_none_or(|named| named.means(name) == by_model);
        // Convolutions are cut by their outputs alone.
        let can = match layer.properties().tensor_role {
            TensorRole::Pairs => stop.from != Split::Rows,
            TensorRole::Opens => stop.from != Split::Columns,
            _ => !by_model,
        };
        may && can
    }

    /// Whether a layer that does not multiply can go so.
    pub(super) fn passes(&self, layer: &Layer, stop: Stop) -> bool {
        match stop.from {
            Split::Rows => ends_tiles(layer) == (stop.to == Split::Whole),
            Split::Columns => layer.properties().tensor_role.is_between(),
            Split::Samples | Split::Whole => true,
        }
    }

    /// Whether an activation can be moved so.
    pub(super) fn moves(&self, from: Split, to: Split) -> bool {
        from == to || ![from, to].contains(&Split::Rows)
    }
}

/// Whether a layer ends a cut of images, by a sum over their tiles.
pub(super) fn ends_tiles(layer: &Layer) -> bool {
    matches!(layer.properties().on_tiles, OnTiles::Mean(_) | OnTiles::Gathered)
}

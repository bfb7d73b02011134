//! What a rank does where images are split over several. A person does not write these: the layout puts them
//! into each rank's own model.

use serde::Serialize;

use super::super::shape::Shape;
use super::{LayerDescription, LayerKernel, Properties, image};
use crate::tiles::{HaloPlan, Region, TileGrid};

/// From a whole image to the tile of a rank: nothing is sent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Crop {
    /// Rows and columns of the full image.
    pub of: [usize; 2],
    /// Rows and columns of it that the rank holds.
    pub region: Region,
}

/// From a tile to all that the windows of the next layer see; backwards the gradients of what came return and
/// are added.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Halo(pub HaloPlan);

/// The mean over windows that cover an image which is cut: what follows is the same on every rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TiledMean {
    /// Who holds what of the image.
    pub tiles: TileGrid,
    /// Which of them this rank is.
    pub rank: usize,
    /// Rows and columns of the result; none: a vector.
    pub size: Option<usize>,
}

/// An image of a size, with the channels of another.
fn sized(input: Shape, from: [usize; 2], [height, width]: [usize; 2]) -> Result<Shape, String> {
    let Shape::Image { height: rows, width: columns, channels } = input else { return image(input) };
    if [rows, columns] != from {
        return Err(format!("takes {} x {} pixels, got {input}", from[0], from[1]));
    }
    Ok(Shape::Image { height, width, channels })
}

impl LayerDescription for Crop {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        sized(input, self.of, self.region.size())
    }
}

impl LayerDescription for Halo {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        sized(input, self.0.own.size(), self.0.reads.size())
    }
}

impl LayerDescription for TiledMean {
    fn output(&self, input: Shape) -> Result<Shape, String> {
        let size = self.size.unwrap_or(1);
        let pooled = sized(input, self.tiles.of(self.rank).size(), [size, size])?;
        Ok(if self.size.is_none() { Shape::Vector { width: pooled.last() } } else { pooled })
    }

    fn properties(&self) -> Properties {
        Properties { kernel: LayerKernel::pass([1.0, 1.0], [1.0, 1.0]), ..Properties::PLAIN }
    }
}

//! Images split over ranks (Jin, Ginsburg & Keutzer 2018; Dryden et al. 2019): along the height, or along
//! height and width.
//!
//! Each rank holds a tile. A window that reaches past it sees pixels of a neighbour, the halo, which have to
//! come here first; what a window sees past the whole image is padding, so a tile's padding is zero on its
//! cut sides. An output pixel belongs to the rank that holds the pixel under the middle of its window: so
//! outputs are cut where inputs are, halos are as thin as they can be, and the branches of a residual block,
//! whose windows differ, come out cut alike. With a cut at a multiple of the stride a window of k with
//! padding p needs p rows from before and k - s - p from behind.
//!
//! A convolution is linear in its image. So what a tile makes is the sum of what its own pixels add and of
//! what each neighbour's add ([`HaloPlan::contribution`]), and the first, by far the largest, can be computed
//! while the others are on their way.

mod padding;
mod region;
mod slabs;
#[cfg(test)]
mod tests;

pub use padding::WindowPadding;
pub use region::Region;
pub use slabs::{SideWindows, Slabs};

use serde::Serialize;

/// Square windows that slide over an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SlidingWindow {
    /// Rows and columns that it covers.
    pub kernel: usize,
    /// Pixels from one window to the next.
    pub stride: usize,
    /// How far it reaches past the image.
    pub padding: WindowPadding,
}

impl SlidingWindow {
    fn along(&self, [before, after]: [usize; 2]) -> SideWindows {
        SideWindows { kernel: self.kernel, stride: self.stride, before, after }
    }

    fn rows(&self) -> SideWindows {
        self.along(self.padding.rows())
    }

    fn columns(&self) -> SideWindows {
        self.along(self.padding.columns())
    }
}

/// Why an image cannot stay cut behind a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TileError {
    /// A halo comes from the next rank, not from those behind it.
    #[error(
        "{layer} needs {needs} {along} from rank {from}, whose tile has {has}: split the image over fewer ranks"
    )]
    Halo {
        /// What the layer is called.
        layer: String,
        /// `rows` or `columns`.
        along: &'static str,
        /// How many the windows of a rank reach into its neighbour's.
        needs: usize,
        /// The neighbour, among the ranks along this side.
        from: usize,
        /// How many it has.
        has: usize,
    },
    /// More ranks than rows.
    #[error(
        "rank {rank} of {ranks} gets none of the {count} {along} of {layer}: split the image over fewer ranks"
    )]
    Empty {
        /// What the layer is called.
        layer: String,
        /// `rows` or `columns`.
        along: &'static str,
        /// How many it takes, or makes.
        count: usize,
        /// The first rank along this side without any.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// Windows that lie in the padding altogether belong to no rank.
    #[error(
        "{layer} has a padding of {padding} for windows of {kernel}: with spatial parallelism padding must be smaller than the window"
    )]
    Padding {
        /// What the layer is called.
        layer: String,
        /// The most on any side.
        padding: usize,
        /// The window's side.
        kernel: usize,
    },
}

/// An image cut into a grid of tiles, one a rank; ranks are numbered row by row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TileGrid {
    /// Where the height is cut.
    pub rows: Slabs,
    /// Where the width is cut.
    pub columns: Slabs,
}

impl TileGrid {
    /// An image of `size` rows and columns on a grid of `ranks`, cut where the `strides` of the layers to
    /// come like it (see [`Slabs::cut`]).
    pub fn cut(size: [usize; 2], ranks: [usize; 2], strides: &[usize]) -> TileGrid {
        TileGrid {
            rows: Slabs::cut(size[0], ranks[0], strides),
            columns: Slabs::cut(size[1], ranks[1], strides),
        }
    }

    /// How many ranks hold a tile.
    pub fn ranks(&self) -> usize {
        self.rows.ranks() * self.columns.ranks()
    }

    /// Rows and columns of the full image.
    pub fn size(&self) -> [usize; 2] {
        [self.rows.extent(), self.columns.extent()]
    }

    /// What a rank holds.
    pub fn of(&self, rank: usize) -> Region {
        let [row, column] = self.coords(rank);
        Region { rows: self.rows.of(row), columns: self.columns.of(column) }
    }

    fn coords(&self, rank: usize) -> [usize; 2] {
        [rank / self.columns.ranks(), rank % self.columns.ranks()]
    }

    /// The tiles that windows sliding over these make, and what each rank exchanges before; `layer` is what
    /// an error calls it.
    pub fn slide(&self, layer: &str, window: SlidingWindow) -> Result<(TileGrid, Vec<HaloPlan>), TileError> {
        let (padding, kernel) = (window.padding.most(), window.kernel);
        if padding >= kernel {
            return Err(TileError::Padding { layer: layer.to_owned(), padding, kernel });
        }
        let output = TileGrid {
            rows: self.rows.slide(layer, "rows", &window.rows())?,
            columns: self.columns.slide(layer, "columns", &window.columns())?,
        };
        let halos = (0..self.ranks()).map(|rank| self.halo_plan(&output, rank, window)).collect();
        Ok((output, halos))
    }

    /// What the windows of a rank's outputs see of the image.
    fn reads(&self, output: &TileGrid, rank: usize, window: SlidingWindow) -> Region {
        let Region { rows, columns } = output.of(rank);
        let [height, width] = self.size();
        Region { rows: window.rows().see(rows, height), columns: window.columns().see(columns, width) }
    }

    fn halo_plan(&self, output: &TileGrid, rank: usize, window: SlidingWindow) -> HaloPlan {
        let (own, reads) = (self.of(rank), self.reads(output, rank, window));
        let [row, column] = self.coords(rank);
        let beside = |peer: &usize| {
            let [r, c] = self.coords(*peer);
            *peer != rank && r.abs_diff(row) <= 1 && c.abs_diff(column) <= 1
        };
        let neighbour = |peer: usize| Neighbour {
            rank: peer,
            gives: own.intersection(&self.reads(output, peer, window)),
            takes: self.of(peer).intersection(&reads),
        };
        let neighbours = (0..self.ranks()).filter(beside).map(neighbour);
        let neighbours =
            neighbours.filter(|peer| !(peer.gives.is_empty() && peer.takes.is_empty())).collect();
        HaloPlan { own, reads, output: output.of(rank), neighbours, window }
    }
}

/// What a rank sends and receives before windows slide over its tile. All regions are of the whole image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HaloPlan {
    /// The rank's own tile.
    pub own: Region,
    /// What its windows see. Pixels of its own that none of them does are not among these.
    pub reads: Region,
    /// The outputs that it makes, of the whole output.
    pub output: Region,
    /// Those next to it, diagonally too, in the order of ranks.
    pub neighbours: Vec<Neighbour>,
    /// The windows, with the padding of the whole image.
    pub window: SlidingWindow,
}

/// A rank next to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// Its number on the grid.
    pub rank: usize,
    /// What goes there; nothing, where it is empty.
    pub gives: Region,
    /// What comes from there.
    pub takes: Region,
}

/// What some pixels add to the outputs of a rank: windows over the pixels alone, zeros around them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contribution {
    /// The pixels that any window sees, of the whole image.
    pub input: Region,
    /// The outputs whose windows see any, of the whole output.
    pub output: Region,
    /// How far those windows reach past the pixels.
    pub padding: WindowPadding,
}

impl HaloPlan {
    /// Whether every window sees pixels of the own tile alone.
    pub fn is_empty(&self) -> bool {
        self.neighbours.is_empty()
    }

    /// What these pixels add to the rank's outputs. Over all of [`HaloPlan::reads`] it is the outputs
    /// themselves, and the padding is what is left of the whole image's: zero on the sides where the image
    /// was cut.
    pub fn contribution(&self, pixels: &Region) -> Contribution {
        let (rows, columns) = (self.window.rows(), self.window.columns());
        let rows = rows.reach(pixels.rows.clone(), self.output.rows.clone());
        let columns = columns.reach(pixels.columns.clone(), self.output.columns.clone());
        let ([top, bottom], [left, right]) = (rows.padding, columns.padding);
        Contribution {
            input: Region { rows: rows.input, columns: columns.input },
            output: Region { rows: rows.output, columns: columns.output },
            padding: WindowPadding { top, bottom, left, right },
        }
    }
}

//! The mean over windows that cover an image which is tiled over ranks: each adds its tile's pixels, and the
//! sum is on all of them. Here the tiling ends; what follows, a classifier, is the same on every rank of it,
//! and so are the gradients of its weights.

use espalier_comm::{Communicator, Reduce};
use espalier_plan::tiles::TileGrid;
use espalier_tensor::Tensor;
use espalier_tensor::ops::pool::{self, Tile};

use crate::Result;
use crate::layers::{BackwardContext, ForwardContext, Layer};

/// An average pool to `size` x `size`, or to one vector, of an image that is tiled over a group of ranks.
#[derive(Debug)]
pub struct TiledMean {
    tile: Tile,
    /// Rows, columns and channels of the tile.
    input: [usize; 3],
    /// Rows and columns of the result; none: a vector.
    size: Option<usize>,
    group: Communicator,
}

impl TiledMean {
    /// To exactly `size` x `size`; without a size, over all positions: `[h, w, c]` becomes `[c]`.
    pub fn new(tiles: &TileGrid, channels: usize, size: Option<usize>, group: &Communicator) -> TiledMean {
        let local = tiles.of(group.rank());
        let [rows, columns] = local.size();
        let tile = Tile { full_size: tiles.size(), first: local.first() };
        TiledMean { tile, input: [rows, columns, channels], size, group: group.clone() }
    }
}

impl Layer for TiledMean {
    fn forward(&self, x: Tensor, _: &mut ForwardContext<'_>) -> Result<Tensor> {
        let partial = pool::adaptive_avg_forward_tile(&x, self.size.unwrap_or(1), self.tile)?;
        let y = self.group.all_reduce(partial, Reduce::Sum)?;
        let shape = [x.shape()[0], x.width()];
        Ok(if self.size.is_none() { y.reshape(&shape) } else { y })
    }

    fn backward(&self, dy: Tensor, _: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let ([rows, columns, channels], size) = (self.input, self.size.unwrap_or(1));
        let batch = dy.shape()[0];
        let dy = dy.reshape(&[batch, size, size, channels]);
        Ok(Some(pool::adaptive_avg_backward_tile(&dy, &[batch, rows, columns, channels], self.tile)?))
    }
}

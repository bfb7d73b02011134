//! The shard of the images that enter a model: a tile of each, or some of them.

use espalier_plan::tiles::Region;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, BatchSlice, CollectiveLayer, ForwardContext, Layer, Sequence};
use crate::Result;

/// Takes the rank's shard, and runs the layers behind it. It holds them, since nobody wants the gradient of
/// images: so the first of them neither makes it nor sends its halo.
#[derive(Debug)]
pub(crate) struct InputSharding {
    pub shard: InputShard,
    pub behind: Sequence,
}

/// A rank's shard of a batch of images.
#[derive(Debug)]
pub(crate) enum InputShard {
    /// A tile of every image.
    Tile(Region),
    /// Some of the samples.
    Samples(CollectiveLayer),
}

impl InputSharding {
    fn take(&self, x: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
        match &self.shard {
            InputShard::Tile(Region { rows, columns }) => {
                Ok(region::take(&x, rows.clone(), columns.clone(), Category::Transient)?)
            }
            InputShard::Samples(slice) => slice.run_forward(x, batch_slice),
        }
    }
}

impl Layer for InputSharding {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let x = self.take(x, &ctx.batch_slice)?;
        self.behind.forward(x, ctx)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        self.behind.backward(dy, ctx, false)
    }
}

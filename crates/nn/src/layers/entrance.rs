//! What of the images that enter a model is a rank's own: a tile of each, or some of them.

use espalier_plan::tiles::Region;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use super::{Backward, BatchSlice, Exchange, Forward, Layer, Sequence};
use crate::Result;

/// Takes what is its own, and runs the layers behind it. It holds them, since nobody wants the gradient of images: so the first of
/// them neither makes it nor sends its halo.
#[derive(Debug)]
pub(crate) struct Entrance {
    pub own: Own,
    pub behind: Sequence,
}

/// What is its own.
#[derive(Debug)]
pub(crate) enum Own {
    /// A part of every image.
    Tile(Region),
    /// Some of the samples.
    Samples(Exchange),
}

impl Entrance {
    fn take(&self, x: Tensor, share: &BatchSlice) -> Result<Tensor> {
        match &self.own {
            Own::Tile(Region { rows, columns }) => {
                Ok(region::take(&x, rows.clone(), columns.clone(), Category::Transient)?)
            }
            Own::Samples(exchange) => exchange.there(x, share),
        }
    }
}

impl Layer for Entrance {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let own = self.take(x, &pass.share)?;
        self.behind.forward(own, pass)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        self.behind.backward(dy, pass, false)
    }
}

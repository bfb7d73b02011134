//! The tile of a rank out of whole images, where these enter.

use espalier_plan::tiles::Region;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use crate::Result;
use crate::layers::{Backward, Forward, Layer, Sequence};

/// Takes a tile, and runs the layers behind it. It holds them, since nobody wants the gradient of images: so the first of them neither
/// makes it nor sends its halo.
#[derive(Debug)]
pub(crate) struct Crop {
    pub tile: Region,
    pub behind: Sequence,
}

impl Layer for Crop {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let Region { rows, columns } = self.tile.clone();
        self.behind.forward(region::take(&x, rows, columns, Category::Transient)?, pass)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        self.behind.backward(dy, pass, false)
    }
}

//! The tile of a rank out of whole images, where these enter.

use espalier_plan::layout::spatial::Region;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use crate::Result;
use crate::layers::{Backward, Forward, Layer};

/// Takes a tile. Nobody wants the gradient of images.
#[derive(Debug)]
pub struct Crop(pub Region);

impl Layer for Crop {
    fn forward(&self, x: Tensor, _: &mut Forward<'_>) -> Result<Tensor> {
        let Region { rows, columns } = self.0.clone();
        Ok(region::take(&x, rows, columns, Category::Activations)?)
    }

    fn backward(&self, _: Tensor, _: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

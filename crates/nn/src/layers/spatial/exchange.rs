//! The exchange of a halo as a layer by itself: the tile comes out with what windows see of the neighbours'
//! around it.
//!
//! It copies the tile, so a convolution, whose windows see much of the tile and little of the halo, does
//! better with [`TiledConv`](super::TiledConv). It serves layers that are not linear: max pool.

use espalier_plan::tiles::Region;
use espalier_tensor::ops::region;
use espalier_tensor::{Category, Tensor};

use super::HaloComm;
use super::halo::PixelFormat;
use crate::Result;
use crate::layers::{BackwardContext, ForwardContext, Layer};

/// From the local tile to all that the windows of the next layer see; backwards the gradients of the halo
/// return and are added.
#[derive(Debug)]
pub struct HaloExchange(pub HaloComm);

impl HaloExchange {
    /// Local pixels that windows see.
    fn kept(&self) -> Region {
        let plan = self.0.plan();
        plan.own.intersection(&plan.reads)
    }

    /// Whether the tile is all that windows see.
    fn is_identity(&self) -> bool {
        let plan = self.0.plan();
        plan.is_empty() && plan.own == plan.reads
    }
}

impl Layer for HaloExchange {
    fn forward(&self, x: Tensor, _: &mut ForwardContext<'_>) -> Result<Tensor> {
        if self.is_identity() {
            return Ok(x);
        }
        let plan = self.0.plan();
        let in_flight = self.0.start_forward(&x)?;
        let mut y = PixelFormat::of(&x).empty(&plan.reads, Category::Transient)?;
        let kept = self.kept();
        let local = if kept == plan.own {
            x
        } else {
            let Region { rows, columns } = kept.within(&plan.own);
            region::take(&x, rows, columns, Category::Workspace)?
        };
        region::put(&mut y, kept.within(&plan.reads).first(), &local)?;
        for (index, pixels) in in_flight.wait()? {
            let at = self.0.neighbour(index).takes.within(&plan.reads);
            region::put(&mut y, at.first(), &pixels)?;
        }
        Ok(y)
    }

    fn backward(&self, dy: Tensor, _: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        if !needs_dx {
            return Ok(None);
        }
        if self.is_identity() {
            return Ok(Some(dy));
        }
        let plan = self.0.plan();
        let region_of = |pixels: &Region, category| {
            let Region { rows, columns } = pixels.within(&plan.reads);
            Ok(region::take(&dy, rows, columns, category)?)
        };
        let takes = plan.neighbours.iter().map(|peer| &peer.takes).filter(|takes| !takes.is_empty());
        let halo_gradients =
            takes.map(|takes| region_of(takes, Category::Communication)).collect::<Result<Vec<_>>>()?;
        let in_flight = self.0.start_backward(halo_gradients, PixelFormat::of(&dy))?;
        let kept = self.kept();
        let mut dx = region_of(&kept, Category::Transient)?;
        if kept != plan.own {
            let visible =
                std::mem::replace(&mut dx, PixelFormat::of(&dy).zeros(&plan.own, Category::Transient)?);
            region::put(&mut dx, kept.within(&plan.own).first(), &visible)?;
        }
        for (index, pixels) in in_flight.wait()? {
            let at = self.0.neighbour(index).gives.within(&plan.own);
            region::add(&mut dx, at.first(), &pixels)?;
        }
        Ok(Some(dx))
    }
}

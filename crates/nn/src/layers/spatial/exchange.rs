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

/// From the own tile to all that the windows of the next layer see; backwards the gradients of the halo
/// return and are added.
#[derive(Debug)]
pub struct HaloExchange(pub HaloComm);

impl HaloExchange {
    /// Own pixels that windows see.
    fn kept(&self) -> Region {
        let exchange = self.0.exchange();
        exchange.own.intersection(&exchange.reads)
    }

    /// Whether the tile is all that windows see.
    fn passes(&self) -> bool {
        let exchange = self.0.exchange();
        exchange.is_empty() && exchange.own == exchange.reads
    }
}

impl Layer for HaloExchange {
    fn forward(&self, x: Tensor, _: &mut ForwardContext<'_>) -> Result<Tensor> {
        if self.passes() {
            return Ok(x);
        }
        let exchange = self.0.exchange();
        let in_flight = self.0.start_forward(&x)?;
        let mut y = PixelFormat::of(&x).empty(&exchange.reads, Category::Transient)?;
        let kept = self.kept();
        let own = if kept == exchange.own {
            x
        } else {
            let Region { rows, columns } = kept.within(&exchange.own);
            region::take(&x, rows, columns, Category::Workspace)?
        };
        region::put(&mut y, kept.within(&exchange.reads).first(), &own)?;
        for (index, part) in in_flight.wait()? {
            let at = self.0.neighbour(index).takes.within(&exchange.reads);
            region::put(&mut y, at.first(), &part)?;
        }
        Ok(y)
    }

    fn backward(
        &self,
        dy: Tensor,
        _: &mut BackwardContext<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        if !input_gradient {
            return Ok(None);
        }
        if self.passes() {
            return Ok(Some(dy));
        }
        let exchange = self.0.exchange();
        let cut = |part: &Region, category| {
            let Region { rows, columns } = part.within(&exchange.reads);
            Ok(region::take(&dy, rows, columns, category)?)
        };
        let takes = exchange.neighbours.iter().map(|peer| &peer.takes).filter(|takes| !takes.is_empty());
        let ghosts = takes.map(|takes| cut(takes, Category::Communication)).collect::<Result<Vec<_>>>()?;
        let in_flight = self.0.start_backward(ghosts, PixelFormat::of(&dy))?;
        let kept = self.kept();
        let mut dx = cut(&kept, Category::Transient)?;
        if kept != exchange.own {
            let seen =
                std::mem::replace(&mut dx, PixelFormat::of(&dy).zeros(&exchange.own, Category::Transient)?);
            region::put(&mut dx, kept.within(&exchange.own).first(), &seen)?;
        }
        for (index, part) in in_flight.wait()? {
            let at = self.0.neighbour(index).gives.within(&exchange.own);
            region::add(&mut dx, at.first(), &part)?;
        }
        Ok(Some(dx))
    }
}

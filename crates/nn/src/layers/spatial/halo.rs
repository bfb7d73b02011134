//! The messages of a halo, started and waited for apart, so that a rank can compute in between.
//!
//! Forwards a rank sends pixels that neighbours read and receives those that it reads itself; backwards
//! gradients go the same ways in reverse. Diagonal neighbours send their corners directly: all messages of an
//! exchange start at once, and none waits for another, as it would if corners travelled along two sides.

use espalier_comm::{Communicator, Request};
use espalier_plan::tiles::{HaloPlan, Neighbour, Region};
use espalier_tensor::ops::region;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;

/// The tag of halos, which have a group of their own and come in the order in which they were sent.
const HALO: u32 = 0;

/// A rank's part in an exchange.
#[derive(Debug)]
pub struct HaloComm {
    exchange: HaloPlan,
    group: Communicator,
}

/// Messages on their way: those that come, each with the neighbour's place in the exchange, and those that go.
pub(super) struct HaloRequests {
    coming: Vec<(usize, Request<Tensor>)>,
    going: Vec<Request<Tensor>>,
}

impl HaloComm {
    /// Of the ranks of a group, which are numbered as the plan numbers tiles.
    pub fn new(exchange: HaloPlan, group: &Communicator) -> HaloComm {
        HaloComm { exchange, group: group.for_halos() }
    }

    /// Who sends what.
    pub fn exchange(&self) -> &HaloPlan {
        &self.exchange
    }

    pub(super) fn neighbour(&self, index: usize) -> &Neighbour {
        &self.exchange.neighbours[index]
    }

    /// Sends what neighbours read of the own tile x, and makes room for what is read of theirs.
    pub(super) fn start_forward(&self, x: &Tensor) -> Result<HaloRequests> {
        let own = &self.exchange.own;
        let part = |peer: &Neighbour| {
            let Region { rows, columns } = peer.gives.within(own);
            Ok(region::take(x, rows, columns, Category::Communication)?)
        };
        let goes = self
            .exchange
            .neighbours
            .iter()
            .map(|peer| (!peer.gives.is_empty()).then(|| part(peer)).transpose());
        self.start(goes.collect::<Result<_>>()?, |peer| &peer.takes, &PixelFormat::of(x))
    }

    /// Sends back the gradients of what came, one for each neighbour that sent any, and makes room for those
    /// of what went.
    pub(super) fn start_backward(&self, ghosts: Vec<Tensor>, like: PixelFormat) -> Result<HaloRequests> {
        let mut ghosts = ghosts.into_iter();
        let next = |peer: &Neighbour| {
            (!peer.takes.is_empty()).then(|| ghosts.next().expect("a gradient of each halo"))
        };
        let goes = self.exchange.neighbours.iter().map(next).collect();
        self.start(goes, |peer| &peer.gives, &like)
    }

    /// `goes` has what goes to each neighbour, where anything does.
    fn start(
        &self,
        goes: Vec<Option<Tensor>>,
        comes: impl Fn(&Neighbour) -> &Region,
        like: &PixelFormat,
    ) -> Result<HaloRequests> {
        let (mut coming, mut going) = (Vec::new(), Vec::new());
        let neighbours = &self.exchange.neighbours;
        for (index, peer) in neighbours.iter().enumerate() {
            if !comes(peer).is_empty() {
                let room = like.empty(comes(peer), Category::Communication)?;
                coming.push((index, self.group.start_receive(room, peer.rank, HALO)?));
            }
        }
        for (peer, part) in neighbours.iter().zip(goes) {
            if let Some(part) = part {
                going.push(self.group.start_send(part, peer.rank, HALO)?);
            }
        }
        Ok(HaloRequests { coming, going })
    }
}

impl HaloRequests {
    /// What came, in the order of neighbours, each with its place among them.
    pub(super) fn wait(self) -> Result<Vec<(usize, Tensor)>> {
        let came = self.coming.into_iter().map(|(index, request)| Ok((index, request.wait()?)));
        let mut came = came.collect::<Result<Vec<_>>>()?;
        came.sort_by_key(|(index, _)| *index);
        for request in self.going {
            request.wait()?;
        }
        Ok(came)
    }
}

/// What pixels are like that have no tensor yet.
pub(super) struct PixelFormat {
    batch: usize,
    channels: usize,
    dtype: DType,
    device: Device,
}

impl PixelFormat {
    /// The pixels of a tensor [batch, h, w, channels].
    pub(super) fn of(x: &Tensor) -> PixelFormat {
        PixelFormat { batch: x.shape()[0], channels: x.width(), dtype: x.dtype(), device: x.device() }
    }

    /// Room for a region.
    pub(super) fn empty(&self, region: &Region, category: Category) -> Result<Tensor> {
        Ok(Tensor::empty(&self.device, &self.shape(region), self.dtype, category)?)
    }

    /// Zeros for a region.
    pub(super) fn zeros(&self, region: &Region, category: Category) -> Result<Tensor> {
        Ok(Tensor::zeros(&self.device, &self.shape(region), self.dtype, category)?)
    }

    fn shape(&self, region: &Region) -> [usize; 4] {
        let [rows, columns] = region.size();
        [self.batch, rows, columns, self.channels]
    }
}

//! The messages of a halo, started and waited for apart, so that a rank can compute in between.
//!
//! Forwards a rank sends pixels that neighbours read and receives those that it reads itself; backwards
//! gradients go the same paths in reverse. Diagonal neighbours send their corners directly: all messages of an
//! exchange start at once, and none waits for another, as it would if corners travelled along two sides.

use espalier_comm::{Communicator, Request};
use espalier_plan::tiles::{HaloPlan, Neighbour, Region};
use espalier_tensor::ops::region;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;

/// The tag of halos, which have a group of their own and come in the order in which they were sent.
const HALO: u32 = 0;

/// A rank's communication of a halo.
#[derive(Debug)]
pub struct HaloComm {
    plan: HaloPlan,
    group: Communicator,
}

/// Messages on their way: those that come, each with the neighbour's index in the plan, and those that go.
pub(super) struct HaloRequests {
    receives: Vec<(usize, Request<Tensor>)>,
    sends: Vec<Request<Tensor>>,
}

impl HaloComm {
    /// Of the ranks of a group, which are numbered as the plan numbers tiles.
    pub fn new(plan: HaloPlan, group: &Communicator) -> HaloComm {
        HaloComm { plan, group: group.for_halos() }
    }

    pub fn plan(&self) -> &HaloPlan {
        &self.plan
    }

    pub(super) fn neighbour(&self, index: usize) -> &Neighbour {
        &self.plan.neighbours[index]
    }

    /// Sends what neighbours read of the local tile x, and starts to receive what is read of theirs.
    pub(super) fn start_forward(&self, x: &Tensor) -> Result<HaloRequests> {
        let tile = &self.plan.own;
        let pixels = |peer: &Neighbour| {
            let Region { rows, columns } = peer.gives.within(tile);
            Ok(region::take(x, rows, columns, Category::Communication)?)
        };
        let outgoing = self
            .plan
            .neighbours
            .iter()
            .map(|peer| (!peer.gives.is_empty()).then(|| pixels(peer)).transpose());
        self.start(outgoing.collect::<Result<_>>()?, |peer| &peer.takes, &PixelFormat::of(x))
    }

    /// Sends back the gradients of what came, one for each neighbour that sent any, and starts to receive
    /// those of what went.
    pub(super) fn start_backward(
        &self,
        halo_gradients: Vec<Tensor>,
        like: PixelFormat,
    ) -> Result<HaloRequests> {
        let mut halo_gradients = halo_gradients.into_iter();
        let next = |peer: &Neighbour| {
            (!peer.takes.is_empty()).then(|| halo_gradients.next().expect("a gradient of each halo"))
        };
        let outgoing = self.plan.neighbours.iter().map(next).collect();
        self.start(outgoing, |peer| &peer.gives, &like)
    }

    /// `outgoing` has what goes to each neighbour, where anything does.
    fn start(
        &self,
        outgoing: Vec<Option<Tensor>>,
        incoming: impl Fn(&Neighbour) -> &Region,
        like: &PixelFormat,
    ) -> Result<HaloRequests> {
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        let neighbours = &self.plan.neighbours;
        for (index, peer) in neighbours.iter().enumerate() {
            if !incoming(peer).is_empty() {
                let buffer = like.empty(incoming(peer), Category::Communication)?;
                receives.push((index, self.group.start_receive(buffer, peer.rank, HALO)?));
            }
        }
        for (peer, pixels) in neighbours.iter().zip(outgoing) {
            if let Some(pixels) = pixels {
                sends.push(self.group.start_send(pixels, peer.rank, HALO)?);
            }
        }
        Ok(HaloRequests { receives, sends })
    }
}

impl HaloRequests {
    /// What was received, in the order of neighbours, each with its index among them.
    pub(super) fn wait(self) -> Result<Vec<(usize, Tensor)>> {
        let received = self.receives.into_iter().map(|(index, request)| Ok((index, request.wait()?)));
        let mut received = received.collect::<Result<Vec<_>>>()?;
        received.sort_by_key(|(index, _)| *index);
        for request in self.sends {
            request.wait()?;
        }
        Ok(received)
    }
}

/// The format of pixels that have no tensor yet.
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

    /// Uninitialised pixels of a region.
    pub(super) fn empty(&self, region: &Region, category: Category) -> Result<Tensor> {
        Ok(Tensor::empty(&self.device, &self.shape(region), self.dtype, category)?)
    }

    pub(super) fn zeros(&self, region: &Region, category: Category) -> Result<Tensor> {
        Ok(Tensor::zeros(&self.device, &self.shape(region), self.dtype, category)?)
    }

    fn shape(&self, region: &Region) -> [usize; 4] {
        let [rows, columns] = region.size();
        [self.batch, rows, columns, self.channels]
    }
}

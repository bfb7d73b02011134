//! The messages of a halo, started and waited for apart, so that a rank can compute in between.
//!
//! Forwards a rank sends pixels that neighbours read and receives those that it reads itself; backwards gradients go the same ways
//! in reverse. Diagonal neighbours send their corners directly: all messages of an exchange start at once, and none waits for
//! another, as it would if corners travelled along two sides.

use espalier_comm::{Communicator, Request};
use espalier_plan::layout::spatial::{Exchange, Neighbour, Region};
use espalier_tensor::ops::region;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::parallel::tags::HALO;

/// A rank's part in an exchange.
#[derive(Debug)]
pub struct Halo {
    exchange: Exchange,
    group: Communicator,
}

/// Messages on their way: those that come, each with the neighbour's place in the exchange, and those that go.
pub(super) struct InFlight {
    coming: Vec<(usize, Request<Tensor>)>,
    going: Vec<Request<Tensor>>,
}

impl Halo {
    /// Of the ranks of a group, which are numbered as the plan numbers tiles.
    pub fn new(exchange: Exchange, group: &Communicator) -> Halo {
        Halo { exchange, group: group.for_halos() }
    }

    /// Who sends what.
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    pub(super) fn neighbour(&self, index: usize) -> &Neighbour {
        &self.exchange.neighbours[index]
    }

    /// Sends what neighbours read of the own tile x, and makes room for what is read of theirs.
    pub(super) fn start_forward(&self, x: &Tensor) -> Result<InFlight> {
        let own = &self.exchange.own;
        let part = |peer: &Neighbour| {
            let Region { rows, columns } = peer.gives.within(own);
            Ok(region::take(x, rows, columns, Category::Communication)?)
        };
        let like = Like::of(x);
        self.start(|peer| (!peer.gives.is_empty()).then(|| part(peer)), |peer| &peer.takes, like)
    }

    /// Sends back the gradients of what came, one for each neighbour that sent any, and makes room for those of what went.
    pub(super) fn start_backward(&self, ghosts: Vec<Tensor>, like: Like) -> Result<InFlight> {
        let mut ghosts = ghosts.into_iter();
        let next = |peer: &Neighbour| {
            (!peer.takes.is_empty()).then(|| Ok(ghosts.next().expect("a gradient of each halo")))
        };
        self.start(next, |peer| &peer.gives, like)
    }

    fn start(
        &self,
        mut goes: impl FnMut(&Neighbour) -> Option<Result<Tensor>>,
        comes: impl Fn(&Neighbour) -> &Region,
        like: Like,
    ) -> Result<InFlight> {
        let (mut coming, mut going) = (Vec::new(), Vec::new());
        for (index, peer) in self.exchange.neighbours.iter().enumerate() {
            let [rows, columns] = comes(peer).size();
            if rows * columns > 0 {
                let shape = [like.batch, rows, columns, like.channels];
                let room = Tensor::empty(&like.device, &shape, like.dtype, Category::Communication)?;
                coming.push((index, self.group.start_receive(room, peer.rank, HALO)?));
            }
        }
        for peer in &self.exchange.neighbours {
            if let Some(part) = goes(peer) {
                going.push(self.group.start_send(part?, peer.rank, HALO)?);
            }
        }
        Ok(InFlight { coming, going })
    }
}

impl InFlight {
    /// What came, in the order of neighbours, each with its place among them.
    pub(super) fn wait(self) -> Result<Vec<(usize, Tensor)>> {
        let came = self.coming.into_iter().map(|(index, request)| Ok((index, request.wait()?)));
        let came = came.collect::<Result<Vec<_>>>()?;
        for request in self.going {
            request.wait()?;
        }
        Ok(came)
    }
}

/// What pixels are like that have no tensor yet.
pub(super) struct Like {
    batch: usize,
    channels: usize,
    dtype: DType,
    device: Device,
}

impl Like {
    /// The pixels of a tensor [batch, h, w, channels].
    pub(super) fn of(x: &Tensor) -> Like {
        Like { batch: x.shape()[0], channels: x.width(), dtype: x.dtype(), device: x.device() }
    }

    /// Zeros for a region.
    pub(super) fn zeros(&self, region: &Region, category: Category) -> Result<Tensor> {
        let [rows, columns] = region.size();
        let shape = [self.batch, rows, columns, self.channels];
        Ok(Tensor::zeros(&self.device, &shape, self.dtype, category)?)
    }
}

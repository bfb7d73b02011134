//! The messages of a halo, started and waited for apart, so that a rank can compute in between.
//!
//! Forwards a rank sends pixels that neighbours read and receives those that it reads itself; backwards gradients go the same ways
//! in reverse. Diagonal neighbours send their corners directly: all messages of an exchange start at once, and none waits for
//! another, as it would if corners travelled along two sides.
//!
//! Who calls whom in which order is [`order_of_calls`]'s to say.

use espalier_comm::{Communicator, Request};
use espalier_plan::tiles::{Exchange, Neighbour, Region};
use espalier_tensor::ops::region;
use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;
use crate::layers::calls::{HALO, order_of_calls};

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
        let goes = self
            .exchange
            .neighbours
            .iter()
            .map(|peer| (!peer.gives.is_empty()).then(|| part(peer)).transpose());
        self.start(goes.collect::<Result<_>>()?, |peer| &peer.takes, &Like::of(x))
    }

    /// Sends back the gradients of what came, one for each neighbour that sent any, and makes room for those of what went.
    pub(super) fn start_backward(&self, ghosts: Vec<Tensor>, like: Like) -> Result<InFlight> {
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
        mut goes: Vec<Option<Tensor>>,
        comes: impl Fn(&Neighbour) -> &Region,
        like: &Like,
    ) -> Result<InFlight> {
        let (mut coming, mut going) = (Vec::new(), Vec::new());
        let neighbours = &self.exchange.neighbours;
        let lower = neighbours.partition_point(|peer| peer.rank < self.group.rank());
        let (from, to) = order_of_calls(lower, neighbours.len());
        for index in from {
            let peer = &neighbours[index];
            if !comes(peer).is_empty() {
                let room = like.empty(comes(peer), Category::Communication)?;
                coming.push((index, self.group.start_receive(room, peer.rank, HALO)?));
            }
        }
        for index in to {
            if let Some(part) = goes[index].take() {
                going.push(self.group.start_send(part, neighbours[index].rank, HALO)?);
            }
        }
        Ok(InFlight { coming, going })
    }
}

impl InFlight {
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use espalier_plan::tiles::{Tiles, Window};

    use super::*;

    /// Calls that are carried out one after the other, each when both ranks have come to it: none waits for ever.
    #[test]
    fn messages_in_the_order_of_calls_do_not_wait_in_a_circle() {
        for grid in [[2, 1], [5, 1], [2, 2], [3, 3], [4, 3]] {
            let tiles = Tiles::cut([60, 60], grid, &[]);
            let window = Window { kernel: 5, stride: 1, padding: 2.into() };
            let (_, exchanges) = tiles.slide("conv", window).unwrap();
            for up in [true, false] {
                // Of each rank the messages of one direction, as sender and receiver.
                let mut queues: Vec<VecDeque<(usize, usize)>> = Vec::new();
                for (rank, exchange) in exchanges.iter().enumerate() {
                    let peers: Vec<usize> = exchange.neighbours.iter().map(|peer| peer.rank).collect();
                    let lower = peers.iter().filter(|peer| **peer < rank).count();
                    let (from, to) = order_of_calls(lower, peers.len());
                    let calls = from.map(|i| (peers[i], rank)).chain(to.map(|i| (rank, peers[i])));
                    queues.push(calls.filter(|(from, to)| (from < to) == up).collect());
                }
                while let Some((from, to)) = queues.iter().flatten().next().copied() {
                    let ready = queues.iter().filter_map(|queue| queue.front());
                    let ready = ready.copied().find(|&(from, to)| {
                        queues[from].front() == Some(&(from, to)) && queues[to].front() == Some(&(from, to))
                    });
                    let (from, to) =
                        ready.unwrap_or_else(|| panic!("{from} to {to} never happens: {queues:?}"));
                    queues[from].pop_front();
                    queues[to].pop_front();
                }
            }
        }
    }
}

//! An all-to-all: ranks that have some samples each, with all their columns, and those that have all samples,
//! with some columns each.
//!
//! x: `[samples, .., columns]`. Every rank sends every other what is that one's, and puts what comes to its
//! own. Messages have the sizes that they have: parts need not be equal, and nothing is sent of a part that
//! is empty.

use std::ops::Range;

use espalier_comm::{Communicator, Request};
use espalier_tensor::ops::{columns, rows};
use espalier_tensor::{Category, Tensor};

use crate::Result;

/// The tag of what ranks along an axis deal out to each other: apart from that of halos.
const DEAL: u32 = 1;

/// Who has what.
pub(super) struct AllToAll<'a> {
    pub group: &'a Communicator,
    /// The samples of each rank.
    pub samples: Vec<Range<usize>>,
    /// The columns of each rank.
    pub columns: Vec<Range<usize>>,
}

impl AllToAll<'_> {
    /// From own samples and all columns to all samples and own columns.
    pub(crate) fn to_columns(&self, x: Tensor) -> Result<Tensor> {
        let (rank, shape) = (self.group.rank(), x.shape().to_vec());
        let (inner, all) = (inner(&shape), end(&self.samples));
        let part = |peer: usize| columns::take(&x, self.columns[peer].clone(), Category::Communication);
        let own = self.columns[rank].len();
        let room = |peer: usize| [self.samples[peer].len() * inner, own];
        let mut whole = Tensor::empty(&x.device(), &[all * inner, own], x.dtype(), Category::Transient)?;
        let is_given = |peer: usize| !self.samples[rank].is_empty() && !self.columns[peer].is_empty();
        for (peer, part) in self.exchange(&x, |peer| Ok(part(peer)?), is_given, room)? {
            rows::put(&mut whole, self.samples[peer].start * inner, &part)?;
        }
        Ok(whole.reshape(&with_ends(shape, all, own)))
    }

    /// From all samples and own columns to own samples and all columns. A rank without samples gets one of zeros.
    pub(crate) fn to_samples(&self, x: Tensor) -> Result<Tensor> {
        let (rank, shape) = (self.group.rank(), x.shape().to_vec());
        let (inner, width) = (inner(&shape), end(&self.columns));
        let part = |peer: usize| {
            let Range { start, end } = self.samples[peer];
            rows::take(&x, start * inner..end * inner, Category::Communication)
        };
        let own = self.samples[rank].len();
        let room = |peer: usize| [own * inner, self.columns[peer].len()];
        let extent = [own.max(1) * inner, width];
        let mut whole = match own {
            0 => Tensor::zeros(&x.device(), &extent, x.dtype(), Category::Transient)?,
            _ => Tensor::empty(&x.device(), &extent, x.dtype(), Category::Transient)?,
        };
        let is_given = |peer: usize| !self.samples[peer].is_empty() && !self.columns[rank].is_empty();
        for (peer, part) in self.exchange(&x, |peer| Ok(part(peer)?), is_given, room)? {
            columns::put(&mut whole, self.columns[peer].start, &part)?;
        }
        Ok(whole.reshape(&with_ends(shape, own.max(1), width)))
    }

    /// What every rank has for this one, its own included; `room` is the shape of what a peer has for it.
    fn exchange(
        &self,
        x: &Tensor,
        part: impl Fn(usize) -> Result<Tensor>,
        is_given: impl Fn(usize) -> bool,
        room: impl Fn(usize) -> [usize; 2],
    ) -> Result<Vec<(usize, Tensor)>> {
        let rank = self.group.rank();
        let others: Vec<usize> = (0..self.group.size()).filter(|peer| *peer != rank).collect();
        let (mut coming, mut going): (Vec<(usize, Request<Tensor>)>, Vec<_>) = Default::default();
        for peer in others.iter().copied().filter(|peer| room(*peer).iter().all(|n| *n > 0)) {
            let room = Tensor::empty(&x.device(), &room(peer), x.dtype(), Category::Communication)?;
            coming.push((peer, self.group.start_receive(room, peer, DEAL)?));
        }
        for peer in others.iter().copied().filter(|peer| is_given(*peer)) {
            going.push(self.group.start_send(part(peer)?, peer, DEAL)?);
        }
        let mut all = Vec::with_capacity(others.len() + 1);
        if is_given(rank) {
            all.push((rank, part(rank)?));
        }
        for (peer, request) in coming {
            all.push((peer, request.wait()?));
        }
        going.into_iter().try_for_each(|request| request.wait().map(drop))?;
        Ok(all)
    }
}

/// Rows of a matrix that each sample has.
fn inner(shape: &[usize]) -> usize {
    shape[1..shape.len() - 1].iter().product()
}

fn end(parts: &[Range<usize>]) -> usize {
    parts.last().map_or(0, |last| last.end)
}

/// A shape with another number of samples and of columns.
fn with_ends(mut shape: Vec<usize>, samples: usize, width: usize) -> Vec<usize> {
    shape[0] = samples;
    *shape.last_mut().expect("samples and columns") = width;
    shape
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use espalier_comm::threads;
    use espalier_plan::split::split;
    use espalier_tensor::{DType, Device};

    use super::*;

    /// Uneven parts, more ranks than samples among them: what is dealt out is what a slice of the whole would
    /// be, and back.
    #[test]
    fn what_is_dealt_out_is_a_slice_of_the_whole() {
        for (ranks, samples, width) in [(2, 4, 6), (3, 7, 5), (4, 3, 9), (4, 1, 4)] {
            let shape = [samples, 2, width];
            let values: Vec<f32> = (0..samples * 2 * width).map(|i| i as f32).collect();
            threads::run(ranks, Duration::from_secs(60), |group| -> Result<()> {
                let device = &Device::cpu(1)?;
                let parts = |extent| (0..ranks).map(|rank| split(extent, ranks, rank)).collect::<Vec<_>>();
                let deal = AllToAll { group: &group, samples: parts(samples), columns: parts(width) };
                let (own, columns) = (deal.samples[group.rank()].clone(), deal.columns[group.rank()].clone());
                let whole = Tensor::from_f32(device, &shape, DType::F32, &values, Category::Workspace)?;
                let mine =
                    match own.is_empty() {
                        true => Tensor::zeros(device, &[1, 2, width], DType::F32, Category::Workspace)?,
                        false => rows::take(&whole, own.start * 2..own.end * 2, Category::Workspace)?
                            .reshape(&[own.len(), 2, width]),
                    };
                let dealt = deal.to_columns(mine.clone())?;
                assert_eq!(dealt.shape(), [samples, 2, columns.len()]);
                assert_eq!(dealt.to_f32(), columns::take(&whole, columns, Category::Workspace)?.to_f32());
                assert_eq!(deal.to_samples(dealt)?.to_f32(), mine.to_f32());
                Ok(())
            })
            .unwrap();
        }
    }
}

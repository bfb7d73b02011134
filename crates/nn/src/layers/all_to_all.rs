//! An all-to-all: ranks that have some samples each, with all features, and ranks that have all samples,
//! with some features each.
//!
//! x: `[samples, .., features]`. Every rank sends every other that one's shard. Shards need not be equal, and
//! nothing is sent of one that is empty.

use std::ops::Range;

use espalier_comm::{Communicator, Request};
use espalier_tensor::ops::{columns, rows};
use espalier_tensor::{Category, Tensor};

use crate::Result;

/// The tag of its messages, apart from that of halos.
const ALL_TO_ALL: u32 = 1;

pub(super) struct AllToAll<'a> {
    pub group: &'a Communicator,
    /// The samples of each rank.
    pub samples: Vec<Range<usize>>,
    /// The features of each rank.
    pub features: Vec<Range<usize>>,
}

impl AllToAll<'_> {
    /// From local samples and all features to all samples and local features.
    pub fn to_features(&self, x: Tensor) -> Result<Tensor> {
        let (rank, shape) = (self.group.rank(), x.shape().to_vec());
        let (inner, all) = (inner(&shape), end(&self.samples));
        let shard_for = |peer: usize| columns::take(&x, self.features[peer].clone(), Category::Communication);
        let local_len = self.features[rank].len();
        let received_shape = |peer: usize| [self.samples[peer].len() * inner, local_len];
        let mut y = Tensor::empty(&x.device(), &[all * inner, local_len], x.dtype(), Category::Transient)?;
        let is_sent = |peer: usize| !self.samples[rank].is_empty() && !self.features[peer].is_empty();
        for (peer, received) in self.run(&x, |peer| Ok(shard_for(peer)?), is_sent, received_shape)? {
            rows::put(&mut y, self.samples[peer].start * inner, &received)?;
        }
        Ok(y.reshape(&with_ends(shape, all, local_len)))
    }

    /// From all samples and local features to local samples and all features. A rank without samples gets one of
    /// zeros.
    pub fn to_samples(&self, x: Tensor) -> Result<Tensor> {
        let (rank, shape) = (self.group.rank(), x.shape().to_vec());
        let (inner, width) = (inner(&shape), end(&self.features));
        let shard_for = |peer: usize| {
            let Range { start, end } = self.samples[peer];
            rows::take(&x, start * inner..end * inner, Category::Communication)
        };
        let local_len = self.samples[rank].len();
        let received_shape = |peer: usize| [local_len * inner, self.features[peer].len()];
        let out_shape = [local_len.max(1) * inner, width];
        let mut y = match local_len {
            0 => Tensor::zeros(&x.device(), &out_shape, x.dtype(), Category::Transient)?,
            _ => Tensor::empty(&x.device(), &out_shape, x.dtype(), Category::Transient)?,
        };
        let is_sent = |peer: usize| !self.samples[peer].is_empty() && !self.features[rank].is_empty();
        for (peer, received) in self.run(&x, |peer| Ok(shard_for(peer)?), is_sent, received_shape)? {
            columns::put(&mut y, self.features[peer].start, &received)?;
        }
        Ok(y.reshape(&with_ends(shape, local_len.max(1), width)))
    }

    /// What every rank sends this one, itself included; `received_shape` is the shape of what a peer sends.
    fn run(
        &self,
        x: &Tensor,
        shard_for: impl Fn(usize) -> Result<Tensor>,
        is_sent: impl Fn(usize) -> bool,
        received_shape: impl Fn(usize) -> [usize; 2],
    ) -> Result<Vec<(usize, Tensor)>> {
        let rank = self.group.rank();
        let peers: Vec<usize> = (0..self.group.size()).filter(|peer| *peer != rank).collect();
        let (mut receives, mut sends): (Vec<(usize, Request<Tensor>)>, Vec<_>) = Default::default();
        for peer in peers.iter().copied().filter(|peer| received_shape(*peer).iter().all(|n| *n > 0)) {
            let buffer =
                Tensor::empty(&x.device(), &received_shape(peer), x.dtype(), Category::Communication)?;
            receives.push((peer, self.group.start_receive(buffer, peer, ALL_TO_ALL)?));
        }
        for peer in peers.iter().copied().filter(|peer| is_sent(*peer)) {
            sends.push(self.group.start_send(shard_for(peer)?, peer, ALL_TO_ALL)?);
        }
        let mut all = Vec::with_capacity(peers.len() + 1);
        if is_sent(rank) {
            all.push((rank, shard_for(rank)?));
        }
        for (peer, request) in receives {
            all.push((peer, request.wait()?));
        }
        sends.into_iter().try_for_each(|request| request.wait().map(drop))?;
        Ok(all)
    }
}

/// Rows of a matrix that each sample has.
fn inner(shape: &[usize]) -> usize {
    shape[1..shape.len() - 1].iter().product()
}

fn end(ranges: &[Range<usize>]) -> usize {
    ranges.last().map_or(0, |last| last.end)
}

/// A shape with another number of samples and of features.
fn with_ends(mut shape: Vec<usize>, samples: usize, width: usize) -> Vec<usize> {
    shape[0] = samples;
    *shape.last_mut().expect("samples and features") = width;
    shape
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use espalier_comm::threads;
    use espalier_plan::split::split;
    use espalier_tensor::{DType, Device};

    use super::*;

    /// Uneven shards, more ranks than samples among them: what comes out is a slice of the full tensor, and back.
    #[test]
    fn shards_are_slices_of_the_full_tensor() {
        for (ranks, samples, width) in [(2, 4, 6), (3, 7, 5), (4, 3, 9), (4, 1, 4)] {
            let shape = [samples, 2, width];
            let values: Vec<f32> = (0..samples * 2 * width).map(|i| i as f32).collect();
            threads::run(ranks, Duration::from_secs(60), |group| -> Result<()> {
                let device = &Device::cpu(1)?;
                let ranges = |size| (0..ranks).map(|rank| split(size, ranks, rank)).collect::<Vec<_>>();
                let all_to_all =
                    AllToAll { group: &group, samples: ranges(samples), features: ranges(width) };
                let (local, features) =
                    (all_to_all.samples[group.rank()].clone(), all_to_all.features[group.rank()].clone());
                let full = Tensor::from_f32(device, &shape, DType::F32, &values, Category::Workspace)?;
                let by_samples = match local.is_empty() {
                    true => Tensor::zeros(device, &[1, 2, width], DType::F32, Category::Workspace)?,
                    false => rows::take(&full, local.start * 2..local.end * 2, Category::Workspace)?
                        .reshape(&[local.len(), 2, width]),
                };
                let sharded = all_to_all.to_features(by_samples.clone())?;
                assert_eq!(sharded.shape(), [samples, 2, features.len()]);
                assert_eq!(sharded.to_f32(), columns::take(&full, features, Category::Workspace)?.to_f32());
                assert_eq!(all_to_all.to_samples(sharded)?.to_f32(), by_samples.to_f32());
                Ok(())
            })
            .unwrap();
        }
    }
}

//! The moments of some rows, all of a batch or a shard of it: taken in chunks, joined in f64, sent as sums.

use super::{PartialStats, cuda, host};
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// What is known of some rows: how many they are, each channel's mean, and its sum of squared distances from it.
pub(super) struct ChannelMoments {
    pub(super) rows: f64,
    mean: Vec<f64>,
    squares: Vec<f64>,
}

impl ChannelMoments {
    /// Those of x. A GPU is waited for, as its chunks are joined on the host.
    pub(super) fn of(x: &Tensor) -> Result<ChannelMoments> {
        let (device, c) = (x.device(), x.width());
        let PartialStats { numbers, chunk } = match &device {
            Device::Cpu(cpu) => host::moments(cpu, x)?,
            Device::Cuda(gpu) => cuda::moments(gpu, x)?,
        };
        let (mut n, mut centre, mut squares) = (0.0f64, vec![0.0f64; c], vec![0.0f64; c]);
        for partial in numbers.read_f32()?.chunks_exact(2 * c) {
            let more = (chunk as f64).min(x.rows() as f64 - n);
            let (share, spread) = (more / (n + more), n * more / (n + more));
            n += more;
            for k in 0..c {
                let delta = f64::from(partial[k]) - centre[k];
                centre[k] += delta * share;
                squares[k] += f64::from(partial[c + k]) + delta * delta * spread;
            }
        }
        Ok(ChannelMoments { rows: n, mean: centre, squares })
    }

    /// As numbers that add up over shards: each channel's sum, its sum of squares, and the rows.
    pub(super) fn to_sums(&self) -> Vec<f64> {
        let n = self.rows;
        let sums = self.mean.iter().map(|mean| n * mean);
        let squares = self.squares.iter().zip(&self.mean).map(|(squares, mean)| squares + n * mean * mean);
        sums.chain(squares).chain([n]).collect()
    }

    /// From such numbers, added up.
    pub(super) fn from_sums(sums: &[f64]) -> ChannelMoments {
        let c = sums.len() / 2;
        let rows = sums[2 * c];
        let mean: Vec<f64> = sums[..c].iter().map(|sum| sum / rows.max(1.0)).collect();
        let around = |(square, mean): (&f64, &f64)| (square - rows * mean * mean).max(0.0);
        let squares = sums[c..2 * c].iter().zip(&mean).map(around).collect();
        ChannelMoments { rows, mean, squares }
    }

    /// The mean, and one over the deviation, as the kernels want them.
    pub(super) fn statistics(&self, device: &Device, eps: f32) -> Result<(Tensor, Tensor)> {
        let mean: Vec<f32> = self.mean.iter().map(|mean| *mean as f32).collect();
        let rstd = |squares: &f64| (1.0 / (squares / self.rows.max(1.0) + f64::from(eps)).sqrt()) as f32;
        let rstd: Vec<f32> = self.squares.iter().map(rstd).collect();
        let tensor = |data: &[f32]| Tensor::from_slice(device, &[data.len()], data, Category::Transient);
        Ok((tensor(&mean)?, tensor(&rstd)?))
    }
}

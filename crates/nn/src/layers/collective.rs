//! Collectives between two layers, over one axis of the mesh: all-reduce, all-gather, reduce-scatter,
//! all-to-all and slices. The only layers that know of other ranks.

use std::ops::Range;

use espalier_comm::{Communicator, Reduce};
use espalier_plan::spec::{self, CollectiveOp, ShardDim};
use espalier_tensor::ops::{columns, flat};
use espalier_tensor::{Category, Tensor};

use super::all_to_all::AllToAll;
use super::{BackwardContext, BatchSlice, ForwardContext, Layer, consecutive};
use crate::Result;

/// Brings a tensor from one sharding to the next.
#[derive(Debug, Clone)]
pub(crate) struct CollectiveLayer {
    pub group: Communicator,
    pub spec: spec::CollectiveLayer,
}

impl CollectiveLayer {
    pub fn run_forward(&self, x: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
        self.carry(self.spec.forward, x, batch_slice.samples)
    }

    pub fn run_backward(&self, dy: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
        match (self.spec.forward, self.spec.backward) {
            (CollectiveOp::Identity | CollectiveOp::AllReduce, _) => {
                self.carry(self.spec.backward, dy, batch_slice.samples)
            }
            (forward, CollectiveOp::Identity) => self.unwanted(forward, dy, batch_slice.samples),
            (_, backward) => self.carry(backward, dy, batch_slice.samples),
        }
    }

    /// A gradient that nothing before is trained by, and that is therefore not sent: zeros, as the layers
    /// before made it.
    fn unwanted(&self, forward: CollectiveOp, dy: Tensor, samples: usize) -> Result<Tensor> {
        let shards = |along| self.shards(along, samples);
        let local_len = |along| shards(along).local_len().max(1);
        let mut shape = dy.shape().to_vec();
        let mut set = |along: ShardDim, size: usize| {
            let dim = shards(along).dim(&shape);
            shape[dim] = size;
        };
        match forward {
            CollectiveOp::Slice(along) | CollectiveOp::ReduceScatter(along) => {
                set(along, shards(along).full_len())
            }
            CollectiveOp::AllGather(along) => set(along, local_len(along)),
            CollectiveOp::AllToAll { from, to } => {
                set(from, local_len(from));
                set(to, shards(to).full_len());
            }
            CollectiveOp::Identity | CollectiveOp::AllReduce => {}
        }
        Ok(Tensor::zeros(&dy.device(), &shape, dy.dtype(), Category::Transient)?)
    }

    /// `samples` are those of the micro-batch.
    fn carry(&self, how: CollectiveOp, x: Tensor, samples: usize) -> Result<Tensor> {
        match how {
            CollectiveOp::Identity => Ok(x),
            CollectiveOp::AllReduce => Ok(self.group.all_reduce(x, Reduce::Sum)?),
            CollectiveOp::AllGather(along) => self.gather(x, self.shards(along, samples)),
            CollectiveOp::Slice(along) => self.slice(x, self.shards(along, samples)),
            CollectiveOp::ReduceScatter(along) => self.reduce_scatter(x, self.shards(along, samples)),
            CollectiveOp::AllToAll { from, to } => {
                let of = |along| self.shards(along, samples).ranges;
                let all_to_all = AllToAll {
                    group: &self.group,
                    samples: of(ShardDim::Samples),
                    features: of(ShardDim::Last),
                };
                match (from, to) {
                    (ShardDim::Samples, ShardDim::Last) => all_to_all.to_features(x),
                    (ShardDim::Last, ShardDim::Samples) => all_to_all.to_samples(x),
                    other => unreachable!("no layout has an all-to-all of {other:?}"),
                }
            }
        }
    }

    /// The shards of a dimension.
    fn shards(&self, along: ShardDim, samples: usize) -> DimShards {
        let ranges = match along {
            ShardDim::Samples => {
                (0..self.spec.ranks()).map(|rank| self.spec.samples_of(rank, samples)).collect()
            }
            ShardDim::Sequence | ShardDim::Last => consecutive(&self.spec.shard_sizes).collect(),
        };
        DimShards { along, ranges, rank: self.spec.rank }
    }

    /// The rank's shard. One without samples gets one of zeros, which stands in for what has no gradient
    /// and goes nowhere.
    fn slice(&self, x: Tensor, shards: DimShards) -> Result<Tensor> {
        let local = shards.columns(&x).swap_remove(shards.rank);
        if local.is_empty() {
            let shape = shards.shape_of(&x, 1);
            return Ok(Tensor::zeros(&x.device(), &shape, x.dtype(), Category::Transient)?);
        }
        let (shape, matrix) = (shards.shape_of(&x, shards.local_len()), shards.matrix(x));
        Ok(columns::take(&matrix, local, Category::Transient)?.reshape(&shape))
    }

    fn gather(&self, x: Tensor, shards: DimShards) -> Result<Tensor> {
        let (shape, ranges) = (shards.shape_of(&x, shards.full_len()), shards.columns(&x));
        let widest = ranges.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let local = match shards.local_len() {
            0 => Tensor::zeros(&x.device(), &[1, widest], x.dtype(), Category::Communication)?,
            _ => padded(shards.matrix(x), widest)?,
        };
        let (device, dtype, rows) = (local.device(), local.dtype(), local.rows());
        let buffer = Tensor::empty(&device, &[ranges.len() * rows * widest], dtype, Category::Communication)?;
        let length = local.len();
        let all = self.group.all_gather(local.reshape(&[length]), buffer)?;
        if rows == 1 && ranges.iter().all(|range| range.len() == widest) {
            let mut all = all;
            all.tag_memory(Category::Transient);
            return Ok(all.reshape(&shape));
        }
        let width = ranges.last().expect("several ranks").end;
        let mut full = Tensor::empty(&device, &[rows, width], dtype, Category::Transient)?;
        for (rank, range) in ranges.into_iter().enumerate() {
            let from =
                flat::take(&all, rank * rows * widest..(rank + 1) * rows * widest, Category::Workspace)?;
            let from = from.reshape(&[rows, widest]);
            match range.len() == widest {
                true => columns::put(&mut full, range.start, &from)?,
                false => {
                    let from = columns::take(&from, 0..range.len(), Category::Workspace)?;
                    columns::put(&mut full, range.start, &from)?;
                }
            }
        }
        Ok(full.reshape(&shape))
    }

    fn reduce_scatter(&self, x: Tensor, shards: DimShards) -> Result<Tensor> {
        let (shape, ranges) = (shards.shape_of(&x, shards.local_len()), shards.columns(&x));
        let widest = ranges.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let (full, local_len) = (shards.matrix(x), ranges[shards.rank].len());
        let (device, dtype, rows) = (full.device(), full.dtype(), full.rows());
        let packed = match rows == 1 && ranges.iter().all(|range| range.len() == widest) {
            true => full,
            false => {
                let all = [ranges.len() * rows * widest];
                let mut packed = Tensor::empty(&device, &all, dtype, Category::Communication)?;
                for (rank, range) in ranges.into_iter().enumerate() {
                    let shard = padded(columns::take(&full, range, Category::Workspace)?, widest)?;
                    flat::put(&mut packed, rank * rows * widest, &shard, 0..shard.len())?;
                }
                packed
            }
        };
        let length = packed.len();
        let buffer = Tensor::empty(&device, &[rows * widest], dtype, Category::Transient)?;
        let shard = self.group.reduce_scatter(packed.reshape(&[length]), buffer, Reduce::Sum)?;
        let shard = shard.reshape(&[rows, widest]);
        let shard = if local_len == widest {
            shard
        } else {
            columns::take(&shard, 0..local_len, Category::Transient)?
        };
        Ok(shard.reshape(&shape))
    }
}

/// The shards of a dimension.
struct DimShards {
    along: ShardDim,
    /// The range of each rank.
    ranges: Vec<Range<usize>>,
    /// Which of them this is.
    rank: usize,
}

impl DimShards {
    fn local_len(&self) -> usize {
        self.ranges[self.rank].len()
    }

    fn full_len(&self) -> usize {
        self.ranges.last().map_or(0, |last| last.end)
    }

    /// The dimension, of a tensor with samples in front.
    fn dim(&self, shape: &[usize]) -> usize {
        match self.along {
            ShardDim::Samples => 0,
            ShardDim::Sequence => 1,
            ShardDim::Last => shape.len() - 1,
        }
    }

    /// The shape of a tensor with another size of the dimension.
    fn shape_of(&self, x: &Tensor, size: usize) -> Vec<usize> {
        let mut shape = x.shape().to_vec();
        let dim = self.dim(&shape);
        shape[dim] = size;
        shape
    }

    /// A tensor as a matrix whose columns are what is sharded: all dimensions before it are rows.
    fn matrix(&self, x: Tensor) -> Tensor {
        let shape = x.shape().to_vec();
        let (rows, columns) = shape.split_at(self.dim(&shape));
        x.reshape(&[rows.iter().product(), columns.iter().product()])
    }

    /// The columns of each rank in the full matrix.
    fn columns(&self, x: &Tensor) -> Vec<Range<usize>> {
        let unit: usize = x.shape()[self.dim(x.shape()) + 1..].iter().product();
        self.ranges.iter().map(|range| range.start * unit..range.end * unit).collect()
    }
}

/// A matrix with columns of zeros behind its own, so that the shards of all ranks have one size.
fn padded(matrix: Tensor, width: usize) -> Result<Tensor> {
    if matrix.width() == width {
        return Ok(matrix);
    }
    let shape = [matrix.rows(), width];
    let mut wide = Tensor::zeros(&matrix.device(), &shape, matrix.dtype(), Category::Communication)?;
    columns::put(&mut wide, 0, &matrix)?;
    Ok(wide)
}

impl Layer for CollectiveLayer {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        self.run_forward(x, &ctx.batch_slice)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        needs_dx.then(|| self.run_backward(dy, &ctx.batch_slice)).transpose()
    }
}

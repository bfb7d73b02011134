//! What ranks do with a tensor between two layers: sums, gathers and cuts over one axis of the mesh. The only
//! layers that know of other ranks.

use std::ops::Range;

use espalier_comm::{Communicator, Reduce};
use espalier_plan::spec::{self, CollectiveOp, ShardDim};
use espalier_tensor::ops::{columns, flat};
use espalier_tensor::{Category, Tensor};

use super::all_to_all::AllToAll;
use super::{BackwardContext, BatchSlice, ForwardContext, Layer};
use crate::Result;

/// A tensor on its way from one sharding to the next.
#[derive(Debug, Clone)]
pub(crate) struct CollectiveLayer {
    pub group: Communicator,
    pub spec: spec::CollectiveLayer,
}

impl CollectiveLayer {
    /// What becomes of an activation.
    pub(crate) fn run_forward(&self, x: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
        self.carry(self.spec.forward, x, batch_slice.samples)
    }

    /// What becomes of its gradient.
    pub(crate) fn run_backward(&self, dy: Tensor, batch_slice: &BatchSlice) -> Result<Tensor> {
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
        let cut = |along| self.cut(along, samples);
        let own = |along| cut(along).own().max(1);
        let mut shape = dy.shape().to_vec();
        let mut set = |along: ShardDim, extent: usize| {
            let dim = cut(along).dim(&shape);
            shape[dim] = extent;
        };
        match forward {
            CollectiveOp::Slice(along) | CollectiveOp::ReduceScatter(along) => set(along, cut(along).whole()),
            CollectiveOp::AllGather(along) => set(along, own(along)),
            CollectiveOp::AllToAll { from, to } => {
                set(from, own(from));
                set(to, cut(to).whole());
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
            CollectiveOp::AllGather(along) => self.gather(x, self.cut(along, samples)),
            CollectiveOp::Slice(along) => self.slice(x, self.cut(along, samples)),
            CollectiveOp::ReduceScatter(along) => self.reduce_scatter(x, self.cut(along, samples)),
            CollectiveOp::AllToAll { from, to } => {
                let of = |along| self.cut(along, samples).parts;
                let deal = AllToAll {
                    group: &self.group,
                    samples: of(ShardDim::Samples),
                    columns: of(ShardDim::Last),
                };
                match (from, to) {
                    (ShardDim::Samples, ShardDim::Last) => deal.to_columns(x),
                    (ShardDim::Last, ShardDim::Samples) => deal.to_samples(x),
                    other => unreachable!("no layout deals out {other:?}"),
                }
            }
        }
    }

    /// What each rank has of a dimension.
    fn cut(&self, along: ShardDim, samples: usize) -> DimShards {
        let parts = match along {
            ShardDim::Samples => {
                (0..self.spec.ranks()).map(|rank| self.spec.samples_of(rank, samples)).collect()
            }
            ShardDim::Sequence | ShardDim::Last => {
                let ends = self.spec.parts.iter().scan(0, |end, part| {
                    let start = *end;
                    *end += part;
                    Some(start..*end)
                });
                ends.collect()
            }
        };
        DimShards { along, parts, rank: self.spec.rank }
    }

    /// The rank's own part. One without samples gets one of zeros, which stands in for what has no gradient
    /// and goes nowhere.
    fn slice(&self, x: Tensor, cut: DimShards) -> Result<Tensor> {
        let own = cut.columns(&x).swap_remove(cut.rank);
        if own.is_empty() {
            let shape = cut.shape_of(&x, 1);
            return Ok(Tensor::zeros(&x.device(), &shape, x.dtype(), Category::Transient)?);
        }
        let (shape, matrix) = (cut.shape_of(&x, cut.own()), cut.matrix(x));
        Ok(columns::take(&matrix, own, Category::Transient)?.reshape(&shape))
    }

    fn gather(&self, x: Tensor, cut: DimShards) -> Result<Tensor> {
        let (shape, parts) = (cut.shape_of(&x, cut.whole()), cut.columns(&x));
        let widest = parts.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let own = match cut.own() {
            0 => Tensor::zeros(&x.device(), &[1, widest], x.dtype(), Category::Communication)?,
            _ => padded(cut.matrix(x), widest)?,
        };
        let (device, dtype, rows) = (own.device(), own.dtype(), own.rows());
        let room = Tensor::empty(&device, &[parts.len() * rows * widest], dtype, Category::Communication)?;
        let length = own.len();
        let all = self.group.all_gather(own.reshape(&[length]), room)?;
        if rows == 1 && parts.iter().all(|part| part.len() == widest) {
            let mut all = all;
            all.tag_memory(Category::Transient);
            return Ok(all.reshape(&shape));
        }
        let width = parts.last().expect("several ranks").end;
        let mut whole = Tensor::empty(&device, &[rows, width], dtype, Category::Transient)?;
        for (rank, part) in parts.into_iter().enumerate() {
            let from =
                flat::take(&all, rank * rows * widest..(rank + 1) * rows * widest, Category::Workspace)?;
            let from = from.reshape(&[rows, widest]);
            match part.len() == widest {
                true => columns::put(&mut whole, part.start, &from)?,
                false => {
                    let from = columns::take(&from, 0..part.len(), Category::Workspace)?;
                    columns::put(&mut whole, part.start, &from)?;
                }
            }
        }
        Ok(whole.reshape(&shape))
    }

    fn reduce_scatter(&self, x: Tensor, cut: DimShards) -> Result<Tensor> {
        let (shape, parts) = (cut.shape_of(&x, cut.own()), cut.columns(&x));
        let widest = parts.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let (whole, own) = (cut.matrix(x), parts[cut.rank].len());
        let (device, dtype, rows) = (whole.device(), whole.dtype(), whole.rows());
        let packed = match rows == 1 && parts.iter().all(|part| part.len() == widest) {
            true => whole,
            false => {
                let all = [parts.len() * rows * widest];
                let mut packed = Tensor::empty(&device, &all, dtype, Category::Communication)?;
                for (rank, part) in parts.into_iter().enumerate() {
                    let part = padded(columns::take(&whole, part, Category::Workspace)?, widest)?;
                    flat::put(&mut packed, rank * rows * widest, &part, 0..part.len())?;
                }
                packed
            }
        };
        let length = packed.len();
        let room = Tensor::empty(&device, &[rows * widest], dtype, Category::Transient)?;
        let part = self.group.reduce_scatter(packed.reshape(&[length]), room, Reduce::Sum)?;
        let part = part.reshape(&[rows, widest]);
        let part = if own == widest { part } else { columns::take(&part, 0..own, Category::Transient)? };
        Ok(part.reshape(&shape))
    }
}

/// What ranks have of a dimension.
struct DimShards {
    along: ShardDim,
    /// Of each rank.
    parts: Vec<Range<usize>>,
    /// Which of them this is.
    rank: usize,
}

impl DimShards {
    /// What this rank has.
    fn own(&self) -> usize {
        self.parts[self.rank].len()
    }

    /// What all have together.
    fn whole(&self) -> usize {
        self.parts.last().map_or(0, |last| last.end)
    }

    /// The dimension, of a tensor with samples in front.
    fn dim(&self, shape: &[usize]) -> usize {
        match self.along {
            ShardDim::Samples => 0,
            ShardDim::Sequence => 1,
            ShardDim::Last => shape.len() - 1,
        }
    }

    /// The shape of a tensor with another extent of the dimension.
    fn shape_of(&self, x: &Tensor, extent: usize) -> Vec<usize> {
        let mut shape = x.shape().to_vec();
        let dim = self.dim(&shape);
        shape[dim] = extent;
        shape
    }

    /// A tensor as a matrix whose columns are what is cut: all before it are rows.
    fn matrix(&self, x: Tensor) -> Tensor {
        let shape = x.shape().to_vec();
        let (rows, columns) = shape.split_at(self.dim(&shape));
        x.reshape(&[rows.iter().product(), columns.iter().product()])
    }

    /// The columns of each rank in the matrix of the whole.
    fn columns(&self, x: &Tensor) -> Vec<Range<usize>> {
        let unit: usize = x.shape()[self.dim(x.shape()) + 1..].iter().product();
        self.parts.iter().map(|part| part.start * unit..part.end * unit).collect()
    }
}

/// A matrix with columns of zeros behind its own, so that the parts of all ranks have one size.
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

    fn backward(
        &self,
        dy: Tensor,
        ctx: &mut BackwardContext<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        input_gradient.then(|| self.run_backward(dy, &ctx.batch_slice)).transpose()
    }
}

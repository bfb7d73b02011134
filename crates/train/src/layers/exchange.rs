//! What ranks do with a tensor between two layers: sums, gathers and cuts over one axis of the mesh. The only layers that know of
//! other ranks.

use std::ops::Range;

use espalier_comm::{Communicator, Reduce};
use espalier_plan::spec::{self, Along, Move};
use espalier_tensor::ops::{columns, flat};
use espalier_tensor::{Category, Tensor};

use super::{Backward, Forward, Layer};
use crate::Result;

/// A tensor on its way from one sharding to the next.
#[derive(Debug, Clone)]
pub(crate) struct Exchange {
    pub group: Communicator,
    pub spec: spec::Exchange,
}

impl Exchange {
    /// What becomes of an activation.
    pub fn there(&self, x: Tensor) -> Result<Tensor> {
        self.carry(self.spec.forward, x)
    }

    /// What becomes of its gradient.
    pub fn back(&self, dy: Tensor) -> Result<Tensor> {
        self.carry(self.spec.backward, dy)
    }

    fn carry(&self, how: Move, x: Tensor) -> Result<Tensor> {
        match how {
            Move::Nothing => Ok(x),
            Move::Sum => Ok(self.group.all_reduce(x, Reduce::Sum)?),
            Move::Gather(along) => self.gather(x, along),
            Move::Slice(along) => {
                let own = self.parts(&x, along).nth(self.spec.rank).expect("a part for each rank");
                let (shape, matrix) = (self.shape_of(&x, along, self.own()), matrix(x, along));
                Ok(columns::take(&matrix, own, Category::Transient)?.reshape(&shape))
            }
            Move::ReduceScatter(along) => self.reduce_scatter(x, along),
        }
    }

    /// Of the dimension that is cut, what this rank has.
    fn own(&self) -> usize {
        self.spec.parts[self.spec.rank]
    }

    /// The shape of a tensor with another extent of the dimension that is cut.
    fn shape_of(&self, x: &Tensor, along: Along, extent: usize) -> Vec<usize> {
        let mut shape = x.shape().to_vec();
        let dim = dim(&shape, along);
        shape[dim] = extent;
        shape
    }

    /// The columns of each rank in the matrix of the whole.
    fn parts(&self, x: &Tensor, along: Along) -> impl Iterator<Item = Range<usize>> + use<'_> {
        let unit: usize = x.shape()[dim(x.shape(), along) + 1..].iter().product();
        self.spec.parts.iter().scan(0, move |end, part| {
            let start = *end;
            *end += part * unit;
            Some(start..*end)
        })
    }

    fn gather(&self, x: Tensor, along: Along) -> Result<Tensor> {
        let shape = self.shape_of(&x, along, self.spec.parts.iter().sum());
        let parts: Vec<Range<usize>> = self.parts(&x, along).collect();
        let widest = parts.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let own = padded(matrix(x, along), widest)?;
        let (device, dtype, rows) = (own.device(), own.dtype(), own.rows());
        let room = Tensor::empty(&device, &[parts.len() * rows * widest], dtype, Category::Communication)?;
        let length = own.len();
        let all = self.group.all_gather(own.reshape(&[length]), room)?;
        if rows == 1 && parts.iter().all(|part| part.len() == widest) {
            let mut all = all;
            all.book_as(Category::Transient);
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

    fn reduce_scatter(&self, x: Tensor, along: Along) -> Result<Tensor> {
        let shape = self.shape_of(&x, along, self.own());
        let parts: Vec<Range<usize>> = self.parts(&x, along).collect();
        let widest = parts.iter().map(ExactSizeIterator::len).max().expect("several ranks");
        let (whole, own) = (matrix(x, along), parts[self.spec.rank].len());
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

/// The dimension that is cut, of a tensor with samples in front.
fn dim(shape: &[usize], along: Along) -> usize {
    match along {
        Along::Sequence => 1,
        Along::Last => shape.len() - 1,
    }
}

/// A tensor as a matrix whose columns are what is cut: all before it are rows.
fn matrix(x: Tensor, along: Along) -> Tensor {
    let shape = x.shape().to_vec();
    let (rows, columns) = shape.split_at(dim(&shape, along));
    x.reshape(&[rows.iter().product(), columns.iter().product()])
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

impl Layer for Exchange {
    fn forward(&self, x: Tensor, _: &mut Forward<'_>) -> Result<Tensor> {
        self.there(x)
    }

    fn backward(&self, dy: Tensor, _: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        input_gradient.then(|| self.back(dy)).transpose()
    }
}

//! A factor of a matrix product: a tensor as it is stored, some of its columns, or the transpose of these, which
//! no one makes in memory.

use std::ops::Range;

use crate::tensor::Tensor;

/// A tensor read as a matrix; every dimension but the last counts as rows. A `&Tensor` is one, [`Tensor::t`]
/// its transpose.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// As it is stored.
    pub(crate) tensor: &'a Tensor,
    /// Whether rows are read as columns.
    pub(crate) transposed: bool,
    /// The first column that is read, as it is stored,
    pub(crate) first: usize,
    /// and how many are.
    pub(crate) columns: usize,
}

impl<'a> Operand<'a> {
    /// For a weight whose file says how it lies: the transpose if `transposed`, the tensor itself if not.
    pub fn new(tensor: &'a Tensor, transposed: bool) -> Operand<'a> {
        Operand { tensor, transposed, first: 0, columns: tensor.width() }
    }

    /// Some columns of a tensor.
    pub fn columns(tensor: &'a Tensor, at: Range<usize>) -> Operand<'a> {
        assert!(at.start <= at.end && at.end <= tensor.width(), "columns {at:?} of {:?}", tensor.shape());
        Operand { tensor, transposed: false, first: at.start, columns: at.len() }
    }

    /// Its transpose.
    pub fn t(self) -> Operand<'a> {
        Operand { transposed: !self.transposed, ..self }
    }

    /// Whether it is all of its tensor.
    pub(crate) fn is_full(self) -> bool {
        self.columns == self.tensor.width()
    }

    /// Rows and columns as the product reads them.
    pub fn extents(self) -> (usize, usize) {
        match self.transposed {
            false => (self.tensor.rows(), self.columns),
            true => (self.columns, self.tensor.rows()),
        }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Operand<'a> {
        Operand::new(tensor, false)
    }
}

impl Tensor {
    /// Its transpose, as a factor of a product.
    pub fn t(&self) -> Operand<'_> {
        Operand::new(self, true)
    }
}

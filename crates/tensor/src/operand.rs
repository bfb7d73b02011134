//! A factor of a matrix product: a tensor as it is stored, or its transpose, which no one makes in memory.

use crate::tensor::Tensor;

/// A tensor read as a matrix; every dimension but the last counts as rows. A `&Tensor` is one, [`Tensor::t`]
/// its transpose.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// As it is stored.
    pub(crate) tensor: &'a Tensor,
    /// Whether rows are read as columns.
    pub(crate) transposed: bool,
}

impl<'a> Operand<'a> {
    /// For a weight whose file says how it lies: the transpose if `transposed`, the tensor itself if not.
    pub fn new(tensor: &'a Tensor, transposed: bool) -> Operand<'a> {
        Operand { tensor, transposed }
    }

    /// Rows and columns as the product reads them.
    pub fn extents(self) -> (usize, usize) {
        match self.transposed {
            false => (self.tensor.rows(), self.tensor.width()),
            true => (self.tensor.width(), self.tensor.rows()),
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

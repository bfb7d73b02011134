//! A slice of a tensor's features; backwards, zeros around its gradient.

use std::ops::Range;

use espalier_tensor::ops::columns;
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, ForwardContext, Layer};
use crate::Result;

/// `[.., of]` to `[.., at.len()]`.
#[derive(Debug)]
pub(crate) struct Columns {
    pub at: Range<usize>,
    pub of: usize,
}

impl Layer for Columns {
    fn forward(&self, x: Tensor, _: &mut ForwardContext<'_>) -> Result<Tensor> {
        Ok(columns::take(&x, self.at.clone(), Category::Transient)?)
    }

    fn backward(&self, dy: Tensor, _: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let shape = dy.shape_with_width(self.of);
        let mut dx = Tensor::zeros(&dy.device(), &shape, dy.dtype(), Category::Transient)?;
        columns::put(&mut dx, self.at.start, &dy)?;
        Ok(Some(dx))
    }
}

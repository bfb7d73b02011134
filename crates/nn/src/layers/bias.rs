//! A bias by itself, of a linear layer whose products are all-reduced over ranks first.

use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::ops::embedding::add_positions;
use espalier_tensor::ops::reduce::sum_rows;
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, ForwardContext, Layer, WeightGradients};
use crate::Result;
use crate::weights::ParameterId;

/// Adds a vector to every row.
#[derive(Debug)]
pub(crate) struct Bias(pub ParameterId);

impl Layer for Bias {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let (shape, bias) = (x.shape().to_vec(), ctx.weights.get(self.0).clone());
        let (rows, width) = (x.rows(), x.width());
        // Sequences of one position each.
        Ok(add_positions(x.reshape(&[rows, 1, width]), &bias.reshape(&[1, width]), 0)?.reshape(&shape))
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let mut y = self.forward(x, ctx)?;
        add_into(&mut y, &plus)?;
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        let upstream = dy.clone();
        let make = move |_| Ok(vec![sum_rows(&upstream, Category::Workspace)?]);
        ctx.sink.accept(&[self.0], WeightGradients::new([dy.clone()], make))?;
        Ok(Some(dy))
    }
}

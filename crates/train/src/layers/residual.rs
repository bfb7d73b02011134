//! Layers in a row, and layers in two rows that meet again.

use espalier_tensor::Tensor;
use espalier_tensor::ops::elementwise::{add, add_into};

use super::{Backward, Forward, Layer};
use crate::Result;

/// Layers one after the other; an empty one passes its input on.
#[derive(Debug)]
pub(crate) struct Sequence(pub Vec<Box<dyn Layer>>);

impl Layer for Sequence {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        self.0.iter().try_fold(x, |x, layer| layer.forward(x, pass))
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        let mut gradient = Some(dy);
        for (i, layer) in self.0.iter().enumerate().rev() {
            let dy = gradient.expect("only the first layer of a model has no input gradient");
            gradient = layer.backward(dy, pass, i > 0 || input_gradient)?;
        }
        Ok(gradient)
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let Some((last, before)) = self.0.split_last() else { return sum(x, plus) };
        let x = before.iter().try_fold(x, |x, layer| layer.forward(x, pass))?;
        last.forward_plus(x, plus, pass)
    }

    fn backward_plus(&self, mut dy: Tensor, plus: Tensor, pass: &mut Backward<'_>) -> Result<Tensor> {
        let Some((first, behind)) = self.0.split_first() else { return sum(dy, plus) };
        for layer in behind.iter().rev() {
            dy = layer.backward(dy, pass, true)?.expect("it was asked for");
        }
        first.backward_plus(dy, plus, pass)
    }
}

/// `branch(x) + shortcut(x)`. Where the shortcut passes x on, the branch's last layer adds it, and the branch's first layer
/// adds the gradient of what has passed.
#[derive(Debug)]
pub(crate) struct Residual {
    pub branch: Sequence,
    pub shortcut: Sequence,
}

impl Layer for Residual {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        if self.shortcut.0.is_empty() {
            return self.branch.forward_plus(x.clone(), x, pass);
        }
        let long = self.branch.forward(x.clone(), pass)?;
        let short = self.shortcut.forward(x, pass)?;
        sum(long, short)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        if self.shortcut.0.is_empty() && input_gradient {
            return self.branch.backward_plus(dy.clone(), dy, pass).map(Some);
        }
        let short = self.shortcut.backward(dy.clone(), pass, input_gradient)?;
        let long = self.branch.backward(dy, pass, input_gradient)?;
        long.zip(short).map(|(long, short)| sum(long, short)).transpose()
    }
}

/// `long + short`, into whichever of the two nobody else holds.
pub(super) fn sum(mut long: Tensor, mut short: Tensor) -> Result<Tensor> {
    if long.is_unique() {
        add_into(&mut long, &short)?;
        Ok(long)
    } else if short.is_unique() {
        add_into(&mut short, &long)?;
        Ok(short)
    } else {
        Ok(add(&long, &short)?)
    }
}

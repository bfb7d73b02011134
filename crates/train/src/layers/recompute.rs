//! Activations for time: a block keeps only its input and runs its forward pass again before its backward pass.

use espalier_tensor::Tensor;

use super::{Backward, Forward, Layer, Mode, Sequence, Stash};
use crate::Result;

/// A block whose activations are made twice.
#[derive(Debug)]
pub(crate) struct Recompute(pub Sequence);

impl Layer for Recompute {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        pass.stash.push(x.clone());
        let mut inner = Forward {
            weights: pass.weights,
            mode: pass.mode,
            random: pass.random,
            share: pass.share,
            stash: &mut Stash::forgetful(),
            statistics: pass.statistics,
        };
        self.0.forward(x, &mut inner)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        let (x, mut stash) = (pass.stash.pop(), Stash::new());
        let mut again = Forward {
            weights: pass.weights,
            mode: Mode::Train,
            random: pass.random,
            share: pass.share,
            stash: &mut stash,
            // The first forward pass has reported these already.
            statistics: &mut Vec::new(),
        };
        self.0.forward(x, &mut again)?;
        let mut inner = Backward {
            weights: pass.weights,
            random: pass.random,
            share: pass.share,
            stash: &mut stash,
            sink: &mut *pass.sink,
        };
        self.0.backward(dy, &mut inner, input_gradient)
    }
}

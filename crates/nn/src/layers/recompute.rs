//! Activations for time: some layers keep only their input and run their forward pass again before their backward pass. A
//! block does, or what stands inside an attention.

use espalier_tensor::Tensor;

use super::{Backward, Forward, Layer, Mode, Sequence, Stash};
use crate::Result;

/// Layers whose activations are made twice.
#[derive(Debug)]
pub(crate) struct Recompute(pub Sequence);

impl Recompute {
    /// Runs them again: what they give, and what their backward pass wants.
    pub fn again(&self, pass: &mut Backward<'_>) -> Result<(Tensor, Stash)> {
        let (x, mut stash) = (pass.stash.pop(), Stash::new());
        let mut again = Forward {
            weights: pass.weights,
            mode: Mode::Train,
            random: pass.random,
            share: pass.share,
            stash: &mut stash,
            // The first forward pass has reported these already.
            statistics: &mut Vec::new(),
            cache: None,
        };
        let y = self.0.forward(x, &mut again)?;
        Ok((y, stash))
    }

    /// Goes back through them with what they left when they ran again.
    pub fn through(
        &self,
        dy: Tensor,
        mut stash: Stash,
        pass: &mut Backward<'_>,
        input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        self.0.backward(dy, &mut inner(&mut stash, pass), input_gradient)
    }

    /// The same, and something is added to the gradient of what they read.
    pub fn through_plus(
        &self,
        dy: Tensor,
        plus: Tensor,
        mut stash: Stash,
        pass: &mut Backward<'_>,
    ) -> Result<Tensor> {
        self.0.backward_plus(dy, plus, &mut inner(&mut stash, pass))
    }
}

/// A pass with a stash of its own.
fn inner<'a>(stash: &'a mut Stash, pass: &'a mut Backward<'_>) -> Backward<'a> {
    Backward { weights: pass.weights, random: pass.random, share: pass.share, stash, sink: &mut *pass.sink }
}

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
            cache: pass.cache.as_deref_mut(),
        };
        self.0.forward(x, &mut inner)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, input_gradient: bool) -> Result<Option<Tensor>> {
        let (_, stash) = self.again(pass)?;
        self.through(dy, stash, pass, input_gradient)
    }

    fn backward_plus(&self, dy: Tensor, plus: Tensor, pass: &mut Backward<'_>) -> Result<Tensor> {
        let (_, stash) = self.again(pass)?;
        self.through_plus(dy, plus, stash, pass)
    }
}

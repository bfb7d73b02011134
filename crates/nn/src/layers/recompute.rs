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
        // The first forward pass has reported what was measured and observed already.
        let mut again = Forward::new(pass.weights, Mode::Train, pass.random, pass.share);
        let y = self.0.forward(pass.stash.pop(), &mut again)?;
        Ok((y, again.stash))
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
        let kept = std::mem::replace(&mut pass.stash, Stash::forgetful());
        let y = self.0.forward(x, pass);
        pass.stash = kept;
        y
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

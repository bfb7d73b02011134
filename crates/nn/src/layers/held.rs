//! FrozenGates held where they are: ReLU and max pool that choose as they chose at other weights.
//!
//! Second derivatives by differences of gradients go wrong at kinks. Between the two points some units cross theirs,
//! each crossing changes the gradient by a jump that does not shrink with the distance, and divided by the distance it
//! is noise: on a network of four ReLU layers, half of GraSP's mask. With every choice held as it is at the point in the
//! middle, the loss is smooth along the way, and its derivatives there are those of the network itself.

use std::sync::{Arc, Mutex};

use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::{self, Activation};
use espalier_tensor::ops::pool::{self, Pool};

use super::{Backward, Forward, Layer};
use crate::Result;

/// The choices of a model's kinks: those of the last pass, or those that passes have to follow.
#[derive(Debug, Clone, Default)]
pub struct FrozenGates(Arc<Mutex<Choices>>);

#[derive(Debug, Default)]
struct Choices {
    held: bool,
    /// What the choice of each kink is read from.
    seen: Vec<Option<Tensor>>,
}

impl FrozenGates {
    /// From here on passes choose for themselves, and leave what they chose.
    pub fn release(&self) {
        let mut choices = self.0.lock().expect("no pass panicked");
        choices.held = false;
        choices.seen.fill(None);
    }

    /// From here on passes choose as the last one before did, which must have had the same samples.
    pub fn hold(&self) {
        self.0.lock().expect("no pass panicked").held = true;
    }

    /// Room for what one more layer chooses.
    pub(crate) fn add(&self) -> Kink {
        let mut choices = self.0.lock().expect("no pass panicked");
        choices.seen.push(None);
        Kink { kinks: self.clone(), index: choices.seen.len() - 1 }
    }
}

/// One of a model's kinks.
#[derive(Debug)]
pub(crate) struct Kink {
    kinks: FrozenGates,
    index: usize,
}

impl Kink {
    /// What it chose where it is held.
    fn held(&self) -> Option<Tensor> {
        let choices = self.kinks.0.lock().expect("no pass panicked");
        choices.held.then(|| choices.seen[self.index].clone().expect("a pass before the one that is held"))
    }

    fn leave(&self, chosen: &Tensor) {
        self.kinks.0.lock().expect("no pass panicked").seen[self.index] = Some(chosen.clone());
    }
}

/// ReLU; an output above zero stands for a gate that is open.
#[derive(Debug)]
pub(crate) struct HeldRelu(pub Kink);

impl Layer for HeldRelu {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        if let Some(gates) = self.0.held() {
            pass.stash.push(gates.clone());
            // Through the gates as a gradient goes.
            return Ok(activation::backward(Activation::Relu, &gates, x)?);
        }
        let y = activation::forward(Activation::Relu, &x)?;
        self.0.leave(&y);
        pass.stash.push(y.clone());
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(activation::backward(Activation::Relu, &pass.stash.pop(), dy)?))
    }
}

/// Max pool; the input says which of a window is taken.
#[derive(Debug)]
pub(crate) struct HeldMaxPool {
    pub kink: Kink,
    pub pool: Pool,
}

impl Layer for HeldMaxPool {
    fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        if let Some(like) = self.kink.held() {
            let y = pool::max_take(&x, &like, self.pool)?;
            pass.stash.push(like);
            return Ok(y);
        }
        let y = pool::max_forward(&x, self.pool)?;
        self.kink.leave(&x);
        pass.stash.push(x);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, pass: &mut Backward<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(pool::max_backward(&dy, &pass.stash.pop(), self.pool)?))
    }
}

//! Gates frozen as they are: ReLU and max pool that choose as they chose at other weights.
//!
//! Second derivatives by differences of gradients go wrong where gates switch. Between the two points some
//! units switch theirs, each switch changes the gradient by a jump that does not shrink with the distance,
//! and divided by the distance it is noise: on a network of four ReLU layers, half of GraSP's mask. With
//! every gate frozen as it is at the point in the middle, the loss is smooth along the way, and its
//! derivatives there are those of the network itself.

use std::sync::{Arc, Mutex};

use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::pool;

use super::{BackwardContext, ForwardContext, Layer, MaxPool};
use crate::Result;

/// The states of a model's gates: those of the last pass, or those that passes have to follow.
#[derive(Debug, Clone, Default)]
pub struct FrozenGates(Arc<Mutex<GateChoices>>);

#[derive(Debug, Default)]
struct GateChoices {
    frozen: bool,
    /// What the state of each gate is read from.
    tensors: Vec<Option<Tensor>>,
}

impl FrozenGates {
    /// From here on passes choose for themselves, and leave what they chose.
    pub fn release(&self) {
        let mut choices = self.0.lock().expect("no pass panicked");
        choices.frozen = false;
        choices.tensors.fill(None);
    }

    /// From here on passes choose as the last one before did, which must have had the same samples.
    pub fn freeze(&self) {
        self.0.lock().expect("no pass panicked").frozen = true;
    }

    /// Adds the gate of one more layer.
    pub(crate) fn add(&self) -> FrozenGate {
        let mut choices = self.0.lock().expect("no pass panicked");
        choices.tensors.push(None);
        FrozenGate { frozen_gates: self.clone(), index: choices.tensors.len() - 1 }
    }
}

/// One of a model's gates.
#[derive(Debug)]
pub(crate) struct FrozenGate {
    frozen_gates: FrozenGates,
    index: usize,
}

impl FrozenGate {
    /// What it is frozen at, where it is.
    fn frozen(&self) -> Option<Tensor> {
        let choices = self.frozen_gates.0.lock().expect("no pass panicked");
        choices.frozen.then(|| choices.tensors[self.index].clone().expect("a pass before the frozen one"))
    }

    fn record(&self, chosen: &Tensor) {
        self.frozen_gates.0.lock().expect("no pass panicked").tensors[self.index] = Some(chosen.clone());
    }
}

/// ReLU; an output above zero stands for a gate that is open.
#[derive(Debug)]
pub(crate) struct FrozenRelu(pub FrozenGate);

impl Layer for FrozenRelu {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if let Some(gates) = self.0.frozen() {
            ctx.stash.push(gates.clone());
            // Through the gates as a gradient goes.
            return Ok(activation::backward(ActivationFn::Relu, &gates, x)?);
        }
        let y = activation::forward(ActivationFn::Relu, &x)?;
        self.0.record(&y);
        ctx.stash.push(y.clone());
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, _: bool) -> Result<Option<Tensor>> {
        Ok(Some(activation::backward(ActivationFn::Relu, &ctx.stash.pop(), dy)?))
    }
}

/// Max pool; its places say which of a window is taken.
#[derive(Debug)]
pub(crate) struct FrozenMaxPool {
    pub gate: FrozenGate,
    pub pool: MaxPool,
}

impl Layer for FrozenMaxPool {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let (y, places) = match self.gate.frozen() {
            Some(places) => (pool::max_take(&x, &places, self.pool.pool)?, places),
            None => pool::max_forward(&x, self.pool.pool, false)?,
        };
        self.gate.record(&places);
        ctx.stash.push(places);
        Ok(y)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        self.pool.backward(dy, ctx, needs_dx)
    }
}

//! Seconds of passes, by what they are spent on, and their sums.

use std::iter::Sum;
use std::ops::{Add, Mul, Sub};

use super::collective::Group;

/// Seconds, of which some are spent on messages within the pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seconds {
    /// In kernels.
    pub compute: f64,
    /// In collectives and halos.
    pub exchange: f64,
    /// Beside these, where ranks take turns on cores: for which cores have nothing to do behind meetings.
    pub stall: f64,
}

impl Seconds {
    pub(super) fn computing(compute: f64) -> Seconds {
        Seconds { compute, ..Seconds::default() }
    }

    pub(super) fn exchanging(exchange: f64) -> Seconds {
        Seconds { exchange, ..Seconds::default() }
    }

    /// A meeting of a group, which takes so long.
    pub(super) fn meeting(group: &Group, exchange: f64) -> Seconds {
        Seconds { exchange, stall: if exchange > 0.0 { group.stall() } else { 0.0 }, ..Seconds::default() }
    }

    /// For which a rank is busy.
    pub fn total(self) -> f64 {
        self.compute + self.exchange
    }
}

impl Add for Seconds {
    type Output = Seconds;

    fn add(self, other: Seconds) -> Seconds {
        Seconds {
            compute: self.compute + other.compute,
            exchange: self.exchange + other.exchange,
            stall: self.stall + other.stall,
        }
    }
}

impl Sub for Seconds {
    type Output = Seconds;

    fn sub(self, other: Seconds) -> Seconds {
        Seconds {
            compute: self.compute - other.compute,
            exchange: self.exchange - other.exchange,
            stall: self.stall - other.stall,
        }
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;

    fn mul(self, by: f64) -> Seconds {
        Seconds { compute: self.compute * by, exchange: self.exchange * by, stall: self.stall * by }
    }
}

/// The passes of a micro-batch through some layers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Passes {
    /// Forward.
    pub forward: Seconds,
    /// What of the forward is run again before the backward.
    pub again: Seconds,
    /// The gradient of the input.
    pub backward_input: Seconds,
    /// The gradients of the weights.
    pub backward_weight: Seconds,
}

impl Passes {
    /// A whole backward pass, with what is run again for it.
    pub fn backward(&self) -> Seconds {
        self.again + self.backward_input + self.backward_weight
    }
}

impl Add for Passes {
    type Output = Passes;

    fn add(self, other: Passes) -> Passes {
        Passes {
            forward: self.forward + other.forward,
            again: self.again + other.again,
            backward_input: self.backward_input + other.backward_input,
            backward_weight: self.backward_weight + other.backward_weight,
        }
    }
}

impl Sum for Passes {
    fn sum<I: Iterator<Item = Passes>>(all: I) -> Passes {
        all.fold(Passes::default(), Add::add)
    }
}

impl Mul<f64> for Passes {
    type Output = Passes;

    fn mul(self, by: f64) -> Passes {
        Passes {
            forward: self.forward * by,
            again: self.again * by,
            backward_input: self.backward_input * by,
            backward_weight: self.backward_weight * by,
        }
    }
}

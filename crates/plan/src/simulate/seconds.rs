//! Seconds of passes, by what they are spent on, and their sums.

use std::iter::Sum;
use std::ops::{Add, Mul, Sub};

use super::collective::RankGroup;

/// Seconds, of which some are spent on messages within the pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PassSeconds {
    /// In kernels.
    pub compute: f64,
    /// In collectives and halos.
    pub communication: f64,
    /// Beside these, where ranks take turns on cores: for which cores have nothing to do behind collectives.
    pub stall: f64,
}

impl PassSeconds {
    pub(super) fn computing(compute: f64) -> PassSeconds {
        PassSeconds { compute, ..PassSeconds::default() }
    }

    pub(super) fn communicating(communication: f64) -> PassSeconds {
        PassSeconds { communication, ..PassSeconds::default() }
    }

    /// A collective of a group, which takes so long.
    pub(super) fn collective(group: &RankGroup, communication: f64) -> PassSeconds {
        PassSeconds {
            communication,
            stall: if communication > 0.0 { group.stall() } else { 0.0 },
            ..PassSeconds::default()
        }
    }

    /// For which a rank is busy.
    pub fn total(self) -> f64 {
        self.compute + self.communication
    }
}

impl Add for PassSeconds {
    type Output = PassSeconds;

    fn add(self, other: PassSeconds) -> PassSeconds {
        PassSeconds {
            compute: self.compute + other.compute,
            communication: self.communication + other.communication,
            stall: self.stall + other.stall,
        }
    }
}

impl Sub for PassSeconds {
    type Output = PassSeconds;

    fn sub(self, other: PassSeconds) -> PassSeconds {
        PassSeconds {
            compute: self.compute - other.compute,
            communication: self.communication - other.communication,
            stall: self.stall - other.stall,
        }
    }
}

impl Mul<f64> for PassSeconds {
    type Output = PassSeconds;

    fn mul(self, by: f64) -> PassSeconds {
        PassSeconds {
            compute: self.compute * by,
            communication: self.communication * by,
            stall: self.stall * by,
        }
    }
}

/// The passes of a micro-batch through some layers.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Passes {
    pub forward: PassSeconds,
    /// What of the forward is run again before the backward.
    pub again: PassSeconds,
    /// The gradient of the input.
    pub backward_input: PassSeconds,
    /// The gradients of the weights.
    pub backward_weight: PassSeconds,
}

impl Passes {
    /// A whole backward pass, with what is run again for it.
    pub fn backward(&self) -> PassSeconds {
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

//! Optimizer state in bf16: arithmetic is f32, and what a step leaves is rounded at random, up with the
//! probability that keeps the mean where it was.
//!
//! To the nearest it would stand still: Adam's mean square moves by a thousandth of itself a step where beta2
//! is 0.999, and half of the distance between two numbers of bf16 is two to four thousandths.
//!
//! The random bits are a function of the seed, the step, the parameter and an element's position in the full,
//! dense tensor. So ranks that have all of a parameter, a shard, some of its kept values or kept values
//! alone round it alike, on every device.

use super::StepParams;
use crate::mask::Mask;
use crate::{bf16, random, simd};

/// How the states of a target are rounded, and where its elements stand.
#[derive(Debug, Clone, Copy)]
pub struct Rounding<'a> {
    /// The stream of random bits: of a seed and a parameter. Each step has one of its own in it.
    pub key: u64,
    /// The mask that says where elements stand, if all that the target has are kept values and it has no mask
    /// itself.
    pub kept_by: Option<&'a Mask>,
    /// The number of the target's first element: among those values, or else among all of the shard.
    pub first: usize,
    /// Where the elements of the shard stand in the full tensor.
    pub positions: Positions,
}

impl Rounding<'_> {
    /// The stream of a step.
    pub(super) fn stream(&self, step: StepParams) -> u64 {
        random::key(self.key, step.number)
    }
}

/// Where the elements of a shard stand in the full tensor: the shard is rows of some ranges of longer rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Positions {
    /// Elements of a row here; 0 where the shard is the full tensor.
    pub row: u64,
    /// Elements of a row of the full tensor.
    pub full_row: u64,
    /// Of each range, where it ends in a row here, and how much further on it is in a row of the full tensor.
    /// They ascend, and the last one is repeated where there are fewer.
    pub ranges: [(u64, u64); Positions::MOST_RANGES],
}

impl Positions {
    /// Ranges that a row may be cut into: queries, keys and values of some heads.
    pub const MOST_RANGES: usize = 3;

    /// The shard is the full tensor.
    pub const FULL: Positions = Positions { row: 0, full_row: 0, ranges: [(0, 0); Positions::MOST_RANGES] };

    /// Where an element of the shard stands.
    #[inline(always)]
    pub fn in_full(&self, at: u64) -> u64 {
        if self.row == 0 {
            return at;
        }
        let (outer, rest) = (at / self.row, at % self.row);
        let [first, second, third] = self.ranges;
        let (_, shift) = if rest < first.0 {
            first
        } else if rest < second.0 {
            second
        } else {
            third
        };
        outer * self.full_row + rest + shift
    }
}

/// One of the two bf16 numbers around x, by the 16 random bits: up where they and what is to be lost carry
/// over. Numbers of bf16 stay as they are; a number that is not finite never gets here.
#[inline(always)]
pub(super) fn stochastic(x: f32, bits: u32) -> bf16 {
    bf16::from_bits((x.to_bits().wrapping_add(bits & 0xffff) >> 16) as u16)
}

/// The random bits of a state: the first has the lower half, the second the upper one.
#[inline(always)]
pub(super) fn of_state(bits: u32, state: usize) -> u32 {
    bits >> (16 * state)
}

/// Rounds numbers that stand side by side in the full tensor too, from position `start` on.
pub(super) fn round_run(
    isa: crate::cpu::Isa,
    key: u64,
    start: u64,
    from: &[&mut [f32]],
    to: &mut [&mut [bf16]],
) {
    const SHORT: usize = 512;
    let mut bits = [0u32; SHORT];
    let length = to.first().map_or(0, |state| state.len());
    for at in (0..length).step_by(SHORT) {
        let here = at..(at + SHORT).min(length);
        sample(isa, &mut bits[..here.len()], key, start + at as u64);
        for (state, (from, to)) in from.iter().zip(to.iter_mut()).enumerate() {
            round(isa, &from[here.clone()], &mut to[here.clone()], &bits, state);
        }
    }
}

simd! {
    fn sample(bits: &mut [u32], key: u64, start: u64) {
        for (i, bits) in bits.iter_mut().enumerate() {
            *bits = random::bits(key, start + i as u64);
        }
    }

    fn round(from: &[f32], to: &mut [bf16], bits: &[u32], state: usize) {
        for ((from, to), bits) in from.iter().zip(to).zip(bits) {
            *to = stochastic(*from, of_state(*bits, state));
        }
    }

    pub(super) fn widen(from: &[bf16], to: &mut [f32]) {
        for (from, to) in from.iter().zip(to) {
            *to = from.to_f32();
        }
    }
}

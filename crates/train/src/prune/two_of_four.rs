//! 2:4: of each four neighbours along the dimension that a product sums over, the two largest stay.
//!
//! That dimension is the one which sparse tensor cores compress: a product reads two of four numbers of a row
//! of the left matrix, or of a column of the right one, and skips the matching inputs. It is the last one of
//! a weight `[output, input]` and of a convolution's `[output, kernel, kernel, input]`, where neighbours are the
//! same position of the kernel in neighbouring channels, and the first one of GPT-2's `[input, output]`. Where
//! four do not divide it, the rest keeps its larger half, rounded up: a single one stays, one of two, two of
//! three.

use espalier_nn::weights::ParameterId;
use espalier_plan::spec::Parameter;
use rayon::prelude::*;

use super::{Decision, MaskBits, Network, NewMasks, Pruner, StepClock};
use crate::Result;

/// Pruning to a pattern.
#[derive(Debug)]
pub struct TwoOfFour {
    /// After so many steps.
    pub at: u64,
}

impl Pruner for TwoOfFour {
    fn should_run(&self, at: StepClock) -> bool {
        at.step == self.at
    }

    fn run(&mut self, network: &mut Network<'_>) -> Result<Decision> {
        let parameters = network.context.plan.model.parameters();
        let mask = |id: ParameterId| {
            // Outputs lie along the first dimension or the last, inputs along the other one.
            let Parameter { shape, output_dim, .. } = &parameters[id.0];
            let dim = shape.len() - 1 - output_dim;
            let keys = network.exclude_pruned(id, network.magnitudes(id)?)?;
            Ok((id, network.mask_on_host(id, &keys, |keys, shape| larger_halves(keys, shape, dim))?))
        };
        Ok(NewMasks::of(network.candidates.iter().copied().map(mask).collect::<Result<_>>()?))
    }
}

/// Keeps the larger half of every four neighbours along a dimension; what has no key stays out. Ties go to
/// the earlier.
fn larger_halves(keys: &[u32], shape: &[usize], dim: usize) -> MaskBits {
    let inner: usize = shape[dim + 1..].iter().product();
    let (row, four) = (shape[dim] * inner, 4 * inner);
    let mut flags = vec![false; keys.len()];
    flags.par_chunks_mut(row).zip(keys.par_chunks(row)).for_each(|(flags, keys)| {
        flags.par_chunks_mut(four).zip(keys.par_chunks(four)).for_each(|(flags, keys)| {
            let neighbours = keys.len() / inner;
            for i in 0..inner {
                let key = |n: usize| keys[n * inner + i];
                for n in 0..neighbours {
                    let better = |m: &usize| key(*m) > key(n) || (key(*m) == key(n) && *m < n);
                    let rank = (0..neighbours).filter(better).count();
                    flags[n * inner + i] = rank < neighbours.div_ceil(2) && key(n) > 0;
                }
            }
        });
    });
    let word = |flags: &[bool]| flags.iter().rev().fold(0, |word, flag| word << 1 | u32::from(*flag));
    flags.par_chunks(32).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The indices kept of magnitudes given as digits.
    fn kept(digits: &[u32], shape: &[usize], dim: usize) -> Vec<usize> {
        let keys: Vec<u32> = digits.iter().map(|digit| digit + 1).collect();
        super::super::kept_indices(&larger_halves(&keys, shape, dim))
    }

    #[test]
    fn by_hand_along_each_dimension() {
        // Two rows of six along the last: 3 9 | 1 4 of each, then a rest of two.
        let digits = [3, 9, 1, 4, 7, 2, /**/ 5, 5, 5, 5, 0, 0];
        assert_eq!(kept(&digits, &[2, 6], 1), [1, 3, 4, 6, 7, 10]);
        // Six rows of two along the first: columns 3 1 7 5 | 5 0 and 9 4 2 5 | 5 0.
        assert_eq!(kept(&digits, &[6, 2], 0), [1, 4, 6, 7, 8, 9]);
        // A convolution of three channels and a kernel of two positions: 3 9 1, 4 7 2, 5 5 5 and 5 0 0.
        assert_eq!(kept(&digits, &[2, 2, 3], 2), [0, 1, 3, 4, 6, 7, 9, 10]);
        assert_eq!(kept(&[2, 0, 1], &[3, 1], 1), [0, 1, 2], "single ones stay");
    }

    #[test]
    fn what_has_gone_does_not_come_back() {
        assert_eq!(larger_halves(&[0, 0, 0, 5, 0, 0, 0, 0], &[1, 8], 1), [0b1000]);
    }
}

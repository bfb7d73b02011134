//! Dropout: y_i = x_i / (1 - rate) where element i is kept, else 0.
//!
//! Whether i is kept is a pure function of the key and i ([`random::bits`]), so no mask is stored: the backward
//! pass, or a forward pass that is computed again, is the same call with the same key. Elements are counted from
//! wherever the caller says, so that a shard of a batch drops what the full batch would drop there.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::random;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// The numbers by which elements are counted: runs of equal length at equal distances. Element i has the number
/// `first + i / run * of + i % run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementNumbering {
    /// That of the first element.
    pub first: u64,
    /// How many follow each other,
    pub run: u64,
    /// and of how many.
    pub of: u64,
}

impl ElementNumbering {
    /// One after the other from `first` on.
    pub fn from(first: u64) -> ElementNumbering {
        ElementNumbering { first, run: 1 << 62, of: 1 << 62 }
    }

    fn of(&self, element: u64) -> u64 {
        self.first + element / self.run * self.of + element % self.run
    }
}

/// The elements of `x` that survive, by their numbers, scaled so that their mean is kept; the same call maps
/// dy to dx.
pub fn apply(x: &Tensor, rate: f32, key: u64, numbers: ElementNumbering) -> Result<Tensor> {
    assert!((0.0..1.0).contains(&rate), "dropout: a rate of {rate} is not in [0, 1)");
    let threshold = (f64::from(rate) * 4_294_967_296.0) as u32;
    let scale = 1.0 / (1.0 - rate);
    let mut y = x.empty_like(Category::Transient)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            cpu.for_chunks(y.slice_mut::<T>(), CHUNK, |at, y| {
                let mut done = 0;
                while done < y.len() {
                    // As far as numbers follow each other.
                    let place = (at.start + done) as u64;
                    let end = y.len().min(done + usize::try_from(numbers.run - place % numbers.run).unwrap_or(usize::MAX));
                    let x = &x[at.start + done..at.start + end];
                    thin(cpu.isa(), x, &mut y[done..end], threshold, scale, key, numbers.of(place));
                    done = end;
                }
            });
        }),
        Device::Cuda(cuda) => cuda::apply(&cuda, x, &mut y, threshold, scale, key, numbers)?,
    }
    Ok(y)
}

simd! {
    fn thin[T: Float](x: &[T], y: &mut [T], threshold: u32, scale: f32, key: u64, first: u64) {
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            let kept = random::bits(key, first + i as u64) >= threshold;
            *y = T::from_f32(if kept { x.to_f32() * scale } else { 0.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{check, devices, tensor, values};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn an_element_is_kept_by_its_number_alone(
            n in 1usize..60_000, first in 0u64..1 << 40, run in 1u64..9000, skipped in 0u64..50, seed: u64, rate in 0f32..0.99,
        ) {
            let x = values(seed, n, 1.0);
            let key = random::key(seed, 5);
            let numbers = ElementNumbering { first, run, of: run + skipped };
            let number = |i: u64| first + i / run * (run + skipped) + i % run;
            let kept = |i: usize| f64::from(random::bits(key, number(i as u64))) >= (f64::from(rate) * 4294967296.0).floor();
            let y = (0..n).map(|i| if kept(i) { f64::from(x[i]) / (1.0 - f64::from(rate)) } else { 0.0 });
            check(&[y.collect()], |device, dtype| {
                vec![apply(&tensor(device, dtype, &[n], &x), rate, key, numbers).unwrap()]
            });
        }
    }

    #[test]
    fn the_rate_is_met_and_rate_zero_changes_nothing() {
        let n = 200_000;
        for [device, ..] in devices() {
            let x = tensor(device, DType::F32, &[n], &vec![1.0; n]);
            let dropped = apply(&x, 0.3, random::key(1, 2), ElementNumbering::from(0))
                .unwrap()
                .to_f32()
                .iter()
                .filter(|&&y| y == 0.0)
                .count();
            assert!((dropped as f64 / n as f64 - 0.3).abs() < 0.005);
            assert_eq!(apply(&x, 0.0, 9, ElementNumbering::from(0)).unwrap().to_f32(), x.to_f32());
        }
    }
}

//! Dropout: y_i = x_i / (1 - rate) where element i is kept, else 0.
//!
//! Whether i is kept is a pure function of the key and i ([`random::bits`]), so no mask is stored: the backward
//! pass, or a forward pass that is computed again, is the same call with the same key. Elements are counted from
//! wherever the caller says, so that a part of a batch drops what the whole batch would drop there.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::pieces::PIECE;
use crate::random;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// The elements of `x`, counted from `first`, that survive, scaled so that their mean is kept; the same call maps dy
/// to dx.
pub fn apply(x: &Tensor, rate: f32, key: u64, first: u64) -> Result<Tensor> {
    assert!((0.0..1.0).contains(&rate), "dropout: a rate of {rate} is not in [0, 1)");
    let threshold = (f64::from(rate) * 4_294_967_296.0) as u32;
    let scale = 1.0 / (1.0 - rate);
    let mut y = x.empty_like(Category::Activations)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            cpu.for_pieces(y.slice_mut::<T>(), PIECE, |at, y| {
                thin(cpu.isa(), &x[at.clone()], y, threshold, scale, key, first + at.start as u64)
            });
        }),
        Device::Cuda(cuda) => cuda::apply(&cuda, x, &mut y, threshold, scale, key, first)?,
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
        fn an_element_is_kept_by_its_number_alone(n in 1usize..60_000, first in 0u64..1 << 40, seed: u64, rate in 0f32..0.99) {
            let x = values(seed, n, 1.0);
            let key = random::key(seed, 5);
            let kept = |i: usize| f64::from(random::bits(key, first + i as u64)) >= (f64::from(rate) * 4294967296.0).floor();
            let y = (0..n).map(|i| if kept(i) { f64::from(x[i]) / (1.0 - f64::from(rate)) } else { 0.0 });
            check(&[y.collect()], |device, dtype| {
                vec![apply(&tensor(device, dtype, &[n], &x), rate, key, first).unwrap()]
            });
        }
    }

    #[test]
    fn the_rate_is_met_and_rate_zero_changes_nothing() {
        let n = 200_000;
        for [device, ..] in devices() {
            let x = tensor(device, DType::F32, &[n], &vec![1.0; n]);
            let dropped =
                apply(&x, 0.3, random::key(1, 2), 0).unwrap().to_f32().iter().filter(|&&y| y == 0.0).count();
            assert!((dropped as f64 / n as f64 - 0.3).abs() < 0.005);
            assert_eq!(apply(&x, 0.0, 9, 0).unwrap().to_f32(), x.to_f32());
        }
    }
}

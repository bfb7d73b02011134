//! Sums, products and multiples, element by element; any shape.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// a + b, in the type of a.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    assert_eq!(a.shape(), b.shape(), "add");
    let mut y = a.empty_like(Category::Transient)?;
    match a.device() {
        Device::Cpu(cpu) => with_float!(a.dtype(), T => with_float!(b.dtype(), U => {
            let (a, b) = (a.slice::<T>(), b.slice::<U>());
            cpu.for_chunks(y.slice_mut::<T>(), CHUNK, |at, y| sum(cpu.isa(), &a[at.clone()], &b[at], y));
        })),
        Device::Cuda(cuda) => cuda::add(&cuda, a, b, &mut y)?,
    }
    Ok(y)
}

/// a += b; the two may be of different float types.
pub fn add_into(a: &mut Tensor, b: &Tensor) -> Result<()> {
    assert_eq!(a.shape(), b.shape(), "add_into");
    match a.device() {
        Device::Cpu(cpu) => with_float!(a.dtype(), T => with_float!(b.dtype(), U => {
            let b = b.slice::<U>();
            cpu.for_chunks(a.slice_mut::<T>(), CHUNK, |at, a| sum_into(cpu.isa(), &b[at], a));
        })),
        Device::Cuda(cuda) => cuda::add_into(&cuda, a, b)?,
    }
    Ok(())
}

/// a b, both of one type.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "mul");
    let mut y = a.empty_like(Category::Transient)?;
    match a.device() {
        Device::Cpu(cpu) => with_float!(a.dtype(), T => {
            let (a, b) = (a.slice::<T>(), b.slice::<T>());
            cpu.for_chunks(y.slice_mut::<T>(), CHUNK, |at, y| product(cpu.isa(), &a[at.clone()], &b[at], y));
        }),
        Device::Cuda(cuda) => cuda::mul(&cuda, a, b, &mut y)?,
    }
    Ok(y)
}

/// a *= s.
pub fn scale_into(a: &mut Tensor, s: f32) -> Result<()> {
    match a.device() {
        Device::Cpu(cpu) => with_float!(a.dtype(), T => {
            cpu.for_chunks(a.slice_mut::<T>(), CHUNK, |_, a| multiply(cpu.isa(), s, a));
        }),
        Device::Cuda(cuda) => cuda::scale_into(&cuda, a, s)?,
    }
    Ok(())
}

simd! {
    fn sum[T: Float, U: Float](a: &[T], b: &[U], y: &mut [T]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = T::from_f32(a.to_f32() + b.to_f32());
        }
    }

    /// a += b.
    pub(crate) fn sum_into[T: Float, U: Float](b: &[U], a: &mut [T]) {
        for (a, b) in a.iter_mut().zip(b) {
            *a = T::from_f32(a.to_f32() + b.to_f32());
        }
    }

    fn product[T: Float](a: &[T], b: &[T], y: &mut [T]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = T::from_f32(a.to_f32() * b.to_f32());
        }
    }

    fn multiply[T: Float](s: f32, a: &mut [T]) {
        for a in a {
            *a = T::from_f32(a.to_f32() * s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{check, tensor, values};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn sums_products_and_multiples_are_those_of_the_elements(n in 1usize..60_000, seed: u64, s in -3f32..3.0) {
            let (a, b) = (values(seed, n, 1.0), values(seed ^ 1, n, 2.0));
            let sum: Vec<f64> = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) + f64::from(b)).collect();
            let multiple: Vec<f64> = a.iter().map(|&a| f64::from(a) * f64::from(s)).collect();
            let product: Vec<f64> = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b)).collect();
            check(&[sum.clone(), sum.clone(), sum, multiple, product], |device, dtype| {
                let fresh = || tensor(device, dtype, &[n], &a);
                let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
                let (mut same, mut mixed, mut scaled) = (fresh(), fresh(), fresh());
                add_into(&mut same, &tensor(device, dtype, &[n], &b)).unwrap();
                add_into(&mut mixed, &tensor(device, other, &[n], &b)).unwrap();
                scale_into(&mut scaled, s).unwrap();
                let b = tensor(device, dtype, &[n], &b);
                vec![add(&fresh(), &b).unwrap(), same, mixed, scaled, mul(&fresh(), &b).unwrap()]
            });
        }
    }
}

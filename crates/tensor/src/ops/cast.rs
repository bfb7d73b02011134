//! A tensor in another float type: exact when it widens, to the nearest when it narrows.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// A copy of `x` as `dtype`; a plain copy if it already is.
pub fn cast(x: &Tensor, dtype: DType, category: Category) -> Result<Tensor> {
    let mut y = Tensor::empty(&x.device(), x.shape(), dtype, category)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => with_float!(dtype, U => {
            let x = x.slice::<T>();
            cpu.for_chunks(y.slice_mut::<U>(), CHUNK, |at, y| convert(cpu.isa(), &x[at], y));
        })),
        Device::Cuda(cuda) => cuda::cast(&cuda, x, &mut y)?,
    }
    Ok(y)
}

simd! {
    /// y = x, rounded where need be.
    pub(crate) fn convert[T: Float, U: Float](x: &[T], y: &mut [U]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = U::from_f32(x.to_f32());
        }
    }
}

/// A small tensor (a norm's scale) in f32, so that kernels need no second type.
pub(crate) fn widened(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F32 => Ok(x.clone()),
        _ => cast(x, DType::F32, Category::Workspace),
    }
}

/// What a kernel with one `wide` flag reads weights as: themselves where all have the type of its rows, f32
/// (and the flag set) otherwise.
pub(crate) fn weights<const N: usize>(rows: DType, weights: [&Tensor; N]) -> Result<([Tensor; N], bool)> {
    let wide = weights.iter().any(|weight| weight.dtype() != rows);
    let mut read = weights.map(Tensor::clone);
    for weight in read.iter_mut().filter(|_| wide) {
        *weight = widened(weight)?;
    }
    Ok((read, wide))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{devices, tensor, values};

    #[test]
    fn widening_is_exact_and_narrowing_rounds_to_the_nearest() {
        let n = 40_001;
        let x: Vec<f32> = values(3, n, 1.0).iter().map(|x| x * 1.003).collect();
        let nearest: Vec<f32> = x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
        for device in devices().iter().flatten() {
            let full = tensor(device, DType::F32, &[n], &x);
            let narrow = cast(&full, DType::Bf16, Category::Weights).unwrap();
            assert_eq!(narrow.to_f32(), nearest);
            assert_eq!(cast(&narrow, DType::F32, Category::Weights).unwrap().to_f32(), nearest);
            assert_eq!(cast(&full, DType::F32, Category::Weights).unwrap().to_f32(), x);
        }
    }
}

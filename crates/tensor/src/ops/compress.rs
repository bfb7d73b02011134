//! Between a dense tensor and its kept elements. dense: any shape of `mask.len()`; compressed: `[mask.kept()]`.

mod ahead;
pub(crate) mod cuda;

use bytemuck::Pod;

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::mask::{Mask, split_at_ranges};
use crate::memory::Category;
use crate::ops::chunks;
use crate::tensor::Tensor;
use crate::with_float;

pub use ahead::{Compressed, Expanding, expand_ahead, expand_all};

/// The kept elements of a dense tensor.
pub fn compress(dense: &Tensor, mask: &Mask, category: Category) -> Result<Tensor> {
    assert_eq!(dense.len(), mask.len(), "compress");
    let mut kept = Tensor::empty(&dense.device(), &[mask.kept()], dense.dtype(), category)?;
    match dense.device() {
        Device::Cpu(cpu) => match dense.dtype().bytes() {
            1 => gather::<u8>(&cpu, dense, mask, &mut kept),
            2 => gather::<u16>(&cpu, dense, mask, &mut kept),
            _ => gather::<u32>(&cpu, dense, mask, &mut kept),
        },
        Device::Cuda(cuda) => cuda::compress(&cuda, dense, mask, &mut kept)?,
    }
    Ok(kept)
}

/// Adds the kept elements of a dense tensor to a compressed one, which may be of the other float type:
/// gradients of several micro-batches.
pub fn compress_add(kept: &mut Tensor, dense: &Tensor, mask: &Mask) -> Result<()> {
    assert_eq!((dense.len(), kept.len()), (mask.len(), mask.kept()), "compress_add");
    match dense.device() {
        Device::Cpu(cpu) => with_float!(dense.dtype(), T => with_float!(kept.dtype(), U => {
            let dense = dense.slice::<T>();
            let spans = mask.spans();
            let slices = split_at_ranges(kept.slice_mut::<U>(), spans.iter().map(|span| span.kept.clone()));
            chunks::each(&cpu, spans.iter().zip(slices), |(span, kept)| {
                let dense = &dense[span.dense.clone()];
                mask.each(span, |k, p| kept[k] = U::from_f32(Float::to_f32(kept[k]) + Float::to_f32(dense[p])));
            });
        })),
        Device::Cuda(cuda) => cuda::compress_add(&cuda, dense, mask, kept)?,
    }
    Ok(())
}

/// A dense tensor with the kept elements at their indices and zeros elsewhere.
pub fn expand(kept: &Tensor, mask: &Mask, shape: &[usize], category: Category) -> Result<Tensor> {
    let mut dense = Tensor::empty(&kept.device(), shape, kept.dtype(), category)?;
    expand_into(kept, mask, &mut dense)?;
    Ok(dense)
}

/// Writes the kept elements to their indices in a dense tensor, and zeros elsewhere.
pub fn expand_into(kept: &Tensor, mask: &Mask, dense: &mut Tensor) -> Result<()> {
    assert_eq!((dense.len(), kept.len()), (mask.len(), mask.kept()), "expand");
    assert_eq!(kept.dtype(), dense.dtype(), "expand");
    match kept.device() {
        Device::Cpu(cpu) => match kept.dtype().bytes() {
            1 => scatter::<u8>(&cpu, kept, mask, dense),
            2 => scatter::<u16>(&cpu, kept, mask, dense),
            _ => scatter::<u32>(&cpu, kept, mask, dense),
        },
        Device::Cuda(cuda) => cuda::expand(&cuda, cuda.compute(), kept, mask, dense)?,
    }
    Ok(())
}

/// Sets all that is not kept to zero.
pub fn apply(dense: &mut Tensor, mask: &Mask) -> Result<()> {
    let kept = compress(dense, mask, Category::Workspace)?;
    expand_into(&kept, mask, dense)
}

/// Copies the kept elements of `dense`, which are moved as numbers `T` of their width, whatever they are.
fn gather<T: Pod + Send + Sync>(cpu: &Cpu, dense: &Tensor, mask: &Mask, kept: &mut Tensor) {
    let (dense, spans): (&[T], _) = (bytemuck::cast_slice(dense.bytes()), mask.spans());
    let kept: &mut [T] = bytemuck::cast_slice_mut(kept.bytes_mut());
    let slices = split_at_ranges(kept, spans.iter().map(|span| span.kept.clone()));
    chunks::each(cpu, spans.iter().zip(slices), |(span, kept)| {
        let dense = &dense[span.dense.clone()];
        mask.each(span, |k, p| kept[k] = dense[p]);
    });
}

/// The way back, with zeros elsewhere.
fn scatter<T: Pod + Send + Sync>(cpu: &Cpu, kept: &Tensor, mask: &Mask, dense: &mut Tensor) {
    let (kept, spans): (&[T], _) = (bytemuck::cast_slice(kept.bytes()), mask.spans());
    let dense: &mut [T] = bytemuck::cast_slice_mut(dense.bytes_mut());
    let slices = split_at_ranges(dense, spans.iter().map(|span| span.dense.clone()));
    chunks::each(cpu, spans.iter().zip(slices), |(span, dense)| {
        let kept = &kept[span.kept.clone()];
        dense.fill(T::zeroed());
        mask.each(span, |k, p| dense[p] = kept[k]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{devices, mask_words, tensor, values};
    use crate::{DType, bf16};
    use proptest::prelude::*;

    /// A number as a tensor of this type holds it.
    fn rounded(dtype: DType, x: f32) -> f32 {
        if dtype == DType::Bf16 { Float::to_f32(<bf16 as Float>::from_f32(x)) } else { x }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn what_is_kept_comes_back_and_the_rest_is_zero(len in 0usize..150_000, fraction in 0.0f64..1.0, seed: u64) {
            let fraction = if seed.is_multiple_of(2) { fraction } else { fraction / 50.0 };
            let (words, x, y) = (mask_words(seed, len, fraction), values(seed, len, 1.0), values(seed ^ 1, len, 1.0));
            let is_kept = |i: &usize| words[i / 32] >> (i % 32) & 1 == 1;
            let kept: Vec<f32> = (0..len).filter(is_kept).map(|i| x[i]).collect();
            let masked: Vec<f32> = (0..len).map(|i| if is_kept(&i) { x[i] } else { 0.0 }).collect();
            for device in devices().iter().flatten() {
                for dtype in [DType::F32, DType::Bf16] {
                    let (a, b) = (tensor(device, dtype, &[len], &x), tensor(device, dtype, &[len], &y));
                    let mask = Mask::new(device, len, &words).unwrap();
                    let mut small = compress(&a, &mask, Category::Gradients).unwrap();
                    prop_assert_eq!(small.to_f32(), kept.clone());
                    prop_assert_eq!(expand(&small, &mask, &[len], Category::Weights).unwrap().to_f32(), masked.clone());
                    let mut applied = a.duplicate(Category::Weights).unwrap();
                    apply(&mut applied, &mask).unwrap();
                    prop_assert_eq!(applied.to_f32(), masked.clone());
                    // The sum of compressed tensors is the compressed sum, to the bit.
                    compress_add(&mut small, &b, &mask).unwrap();
                    let sum = crate::ops::elementwise::add(&a, &b).unwrap();
                    prop_assert_eq!(small.to_f32(), compress(&sum, &mask, Category::Gradients).unwrap().to_f32());
                    // So it is where it is held in f32, whatever comes.
                    let mut wide = compress(&tensor(device, DType::F32, &[len], &x), &mask, Category::Gradients).unwrap();
                    compress_add(&mut wide, &b, &mask).unwrap();
                    let sum: Vec<f32> = (0..len).filter(is_kept).map(|i| x[i] + rounded(dtype, y[i])).collect();
                    prop_assert_eq!(wide.to_f32(), sum);
                }
                let halves: Vec<u16> = (0..len).map(|i| (i * 40_503) as u16).collect();
                let mask = Mask::as_bits(device, len, &words).unwrap();
                let low = Tensor::from_slice(device, &[len], &halves, Category::Optimizer).unwrap();
                let small = compress(&low, &mask, Category::Optimizer).unwrap();
                let expected: Vec<u16> = (0..len).filter(is_kept).map(|i| halves[i]).collect();
                prop_assert_eq!(&small.host_bytes()[..], bytemuck::cast_slice::<u16, u8>(&expected));
            }
        }
    }
}

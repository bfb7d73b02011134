//! Convolution by cuDNN. It reads images as we keep them, channels last, and wants filters so too: a weight passes
//! through a copy in that order, and its gradient back.
//!
//! The tensor cores take channels by 16 bytes. An image with an odd number of them is given zeros to fill up. Where
//! there are fewer, as in the first layer of a network, and the window is small too, those zeros would be most of the
//! work, and our own kernels are faster.

use super::cuda::{add_bias, filter_back, filter_rows};
use super::{Conv, Sizes};
use crate::cuda::Cuda;
use crate::cuda::dnn::{Key, Pass};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::layout;
use crate::tensor::Tensor;

/// Elements under the window up to which our kernels beat cuDNN's on few channels.
const SMALL_WINDOW: usize = 64;

/// `None` where cuDNN does not serve, here and below.
pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    z: &Sizes,
) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, Pass::Forward, z, x.dtype())? else { return Ok(None) };
    let x = resized(cuda, x, key.x[3], Category::Workspace)?;
    let rows = filter_rows(cuda, w, key.x[3])?;
    let mut y = Tensor::empty(&x.device(), &key.y, x.dtype(), Category::Activations)?;
    run(cuda, &key, [address(&x), address(&rows), address_mut(&mut y)])?;
    if let Some(bias) = bias {
        add_bias(cuda, &mut y, bias)?;
    }
    Ok(Some(y))
}

pub(super) fn backward_input(cuda: &Cuda, dy: &Tensor, w: &Tensor, z: &Sizes) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, Pass::Input, z, dy.dtype())? else { return Ok(None) };
    let rows = filter_rows(cuda, w, key.x[3])?;
    let mut dx = Tensor::empty(&dy.device(), &key.x, dy.dtype(), Category::Activations)?;
    run(cuda, &key, [address_mut(&mut dx), address(&rows), address(dy)])?;
    resized(cuda, &dx, z.c, Category::Activations).map(Some)
}

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &Sizes) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, Pass::Weight, z, x.dtype())? else { return Ok(None) };
    let x = resized(cuda, x, key.x[3], Category::Workspace)?;
    let shape = [z.o, z.conv.kernel, z.conv.kernel, key.x[3]];
    let mut rows = Tensor::empty(&x.device(), &shape, x.dtype(), Category::Workspace)?;
    run(cuda, &key, [address(&x), address_mut(&mut rows), address(dy)])?;
    filter_back(cuda, &rows, z.c).map(Some)
}

/// What cuDNN has a plan for.
fn planned(cuda: &Cuda, pass: Pass, z: &Sizes, dtype: DType) -> Result<Option<Key>> {
    match key(cuda, pass, z, dtype) {
        Some(key) if cuda.plans_convolution(&key)? => Ok(Some(key)),
        _ => Ok(None),
    }
}

/// The convolution as cuDNN is asked for it; `None` where it is better not asked.
fn key(cuda: &Cuda, pass: Pass, z: &Sizes, dtype: DType) -> Option<Key> {
    let exact = dtype == DType::F32 && !cuda.tf32_in_convolutions();
    let lanes = 16 / dtype.bytes();
    let small = z.c < lanes && z.window() <= SMALL_WINDOW && pass != Pass::Input;
    let Conv { kernel, stride, padding } = z.conv;
    let x = [z.batch, z.h, z.w, z.c.next_multiple_of(lanes)];
    let key = Key { pass, dtype, x, y: z.output_shape(), kernel, stride, padding };
    (!exact && !small).then_some(key)
}

/// x with this many channels.
fn resized(cuda: &Cuda, x: &Tensor, channels: usize, category: Category) -> Result<Tensor> {
    if x.width() == channels {
        return Ok(x.clone());
    }
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("an image has four dimensions") = channels;
    let mut y = Tensor::empty(&x.device(), &shape, x.dtype(), category)?;
    layout::cuda::resize(cuda, x, &mut y)?;
    Ok(y)
}

fn run(cuda: &Cuda, key: &Key, tensors: [u64; 3]) -> Result<()> {
    // SAFETY: each caller hands over x, w and y in the shapes of its key, which it has alive on this card.
    unsafe { cuda.run_convolution(key, tensors) }
}

fn address(tensor: &Tensor) -> u64 {
    tensor.cuda_buffer().address()
}

/// Of a tensor that is about to be written, whose only owner this must be.
fn address_mut(tensor: &mut Tensor) -> u64 {
    tensor.cuda_buffer_mut().address()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::testing;

    /// Falling back to our own kernels is silent: here it is not.
    #[test]
    fn cudnn_serves_what_is_large_enough_and_may_be_rounded() {
        let found = testing::devices().iter().any(|devices| matches!(devices[0], Device::Cuda(_)));
        if !found || Cuda::cudnn().is_err() {
            return eprintln!("SKIPPED, no card with cuDNN was asked");
        }
        let card = Cuda::open(0).unwrap();
        for (side, c, o, kernel, stride, padding) in [
            (32, 64, 64, 3, 1, 1),
            (16, 32, 64, 3, 2, 1),
            (8, 256, 64, 1, 1, 0),
            (32, 3, 64, 7, 2, 3),
            (32, 3, 64, 3, 1, 1),
        ] {
            let z = Sizes::new(&[8, side, side, c], o, Conv { kernel, stride, padding });
            for pass in [Pass::Forward, Pass::Input, Pass::Weight] {
                for (dtype, tf32) in [(DType::F32, true), (DType::F32, false), (DType::Bf16, false)] {
                    card.allow_tf32_in_convolutions(tf32);
                    let small = z.window() == 27 && pass != Pass::Input;
                    let expected = !small && (tf32 || dtype == DType::Bf16);
                    let served = planned(&card, pass, &z, dtype).unwrap().is_some();
                    assert_eq!(served, expected, "{pass:?} of {z:?} in {dtype:?}, TF32 allowed: {tf32}");
                }
            }
        }
    }
}

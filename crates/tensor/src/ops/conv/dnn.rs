//! Convolution by cuDNN. It reads images as we keep them, channels last, and wants filters so too: a weight passes
//! through a copy in that order, and its gradient back.
//!
//! The tensor cores take channels by 16 bytes. An image with fewer, or with an odd number of them, is given zeros to
//! fill up: three channels of a photograph become four or eight.

use super::cuda::{add_bias, filter_back, filter_rows};
use super::{Conv, Sizes};
use crate::cuda::Cuda;
use crate::cuda::dnn::{Key, Pass};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::layout;
use crate::tensor::Tensor;

/// `None` where cuDNN does not serve, here and below.
pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    z: &Sizes,
) -> Result<Option<Tensor>> {
    let key = key(cuda, Pass::Forward, z, x.dtype());
    if !cuda.plans_convolution(&key)? {
        return Ok(None);
    }
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
    let key = key(cuda, Pass::Input, z, dy.dtype());
    if !cuda.plans_convolution(&key)? {
        return Ok(None);
    }
    let rows = filter_rows(cuda, w, key.x[3])?;
    let mut dx = Tensor::empty(&dy.device(), &key.x, dy.dtype(), Category::Activations)?;
    run(cuda, &key, [address_mut(&mut dx), address(&rows), address(dy)])?;
    resized(cuda, &dx, z.c, Category::Activations).map(Some)
}

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &Sizes) -> Result<Option<Tensor>> {
    let key = key(cuda, Pass::Weight, z, x.dtype());
    if !cuda.plans_convolution(&key)? {
        return Ok(None);
    }
    let x = resized(cuda, x, key.x[3], Category::Workspace)?;
    let shape = [z.o, z.conv.kernel, z.conv.kernel, key.x[3]];
    let mut rows = Tensor::empty(&x.device(), &shape, x.dtype(), Category::Workspace)?;
    run(cuda, &key, [address(&x), address_mut(&mut rows), address(dy)])?;
    filter_back(cuda, &rows, z.c).map(Some)
}

fn key(cuda: &Cuda, pass: Pass, z: &Sizes, dtype: DType) -> Key {
    let Conv { kernel, stride, padding } = z.conv;
    let x = [z.batch, z.h, z.w, padded(z.c, dtype)];
    let tf32 = dtype == DType::F32 && cuda.tf32_in_convolutions();
    Key { pass, dtype, tf32, x, y: z.output_shape(), kernel, stride, padding }
}

/// Channels that fill packs of 16 bytes.
fn padded(c: usize, dtype: DType) -> usize {
    c.next_multiple_of(16 / dtype.bytes())
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
    fn cudnn_serves_the_layers_of_known_networks() {
        let card = testing::devices().iter().find_map(|devices| match &devices[0] {
            Device::Cuda(card) => Some(card.clone()),
            Device::Cpu(_) => None,
        });
        let (Some(card), Ok(_)) = (card, Cuda::cudnn()) else {
            return eprintln!("SKIPPED, no card with cuDNN was asked");
        };
        for (side, c, o, kernel, stride, padding) in
            [(32, 3, 64, 3, 1, 1), (32, 64, 64, 3, 1, 1), (16, 32, 64, 3, 2, 1), (8, 256, 64, 1, 1, 0)]
        {
            let z = Sizes::new(&[8, side, side, c], o, Conv { kernel, stride, padding });
            for pass in [Pass::Forward, Pass::Input, Pass::Weight] {
                for (dtype, tf32) in [(DType::F32, true), (DType::F32, false), (DType::Bf16, false)] {
                    let key = Key { tf32, ..key(&card, pass, &z, dtype) };
                    assert!(card.plans_convolution(&key).unwrap(), "{key:?}");
                }
            }
        }
    }

    #[test]
    fn channels_fill_whole_packs() {
        assert_eq!([1, 3, 4, 6].map(|c| padded(c, DType::F32)), [4, 4, 4, 8]);
        assert_eq!([1, 3, 8, 20].map(|c| padded(c, DType::Bf16)), [8, 8, 8, 24]);
    }
}

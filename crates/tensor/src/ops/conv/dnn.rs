//! Convolution by cuDNN, which reads images and filters as we keep them, channels last.
//!
//! The tensor cores take channels by 16 bytes. An image with an odd number of them is given zeros to fill up, and
//! so is its filter.
//! Where there are fewer, as in the first layer of a network, and the window is small too, those zeros would
//! be most of the work, and our own kernels are faster.

use super::kernels::add_bias;
use super::{ConvDims, ConvParams};
use crate::cuda::Cuda;
use crate::cuda::dnn::{ConvKey, ConvPass};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::activation::{self, ActivationFn};
use crate::ops::layout;
use crate::tensor::Tensor;

/// Elements under the window up to which our kernels beat cuDNN's on few channels (`benches/cuda_conv.rs`).
const SMALL_WINDOW: usize = 96;

/// `None` where cuDNN does not serve, here and below.
pub(super) fn forward(
    cuda: &Cuda,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    relu: bool,
    z: &ConvDims,
) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, ConvPass::Forward, z, x.dtype())? else { return Ok(None) };
    let x = layout::resize(x, key.x[3], Category::Workspace)?;
    let w = layout::resize(w, key.x[3], Category::Workspace)?;
    let mut y = Tensor::empty(&x.device(), &key.y, x.dtype(), Category::Transient)?;
    run(cuda, &key, [address(&x), address(&w), address_mut(&mut y)])?;
    match bias {
        Some(bias) => add_bias(cuda, &mut y, bias, relu)?,
        None if relu => y = activation::forward(ActivationFn::Relu, &y)?,
        None => {}
    }
    Ok(Some(y))
}

pub(super) fn backward_input(cuda: &Cuda, dy: &Tensor, w: &Tensor, z: &ConvDims) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, ConvPass::Input, z, dy.dtype())? else { return Ok(None) };
    let w = layout::resize(w, key.x[3], Category::Workspace)?;
    let mut dx = Tensor::empty(&dy.device(), &key.x, dy.dtype(), Category::Transient)?;
    run(cuda, &key, [address_mut(&mut dx), address(&w), address(dy)])?;
    layout::resize(&dx, z.c, Category::Transient).map(Some)
}

pub(super) fn backward_weight(cuda: &Cuda, x: &Tensor, dy: &Tensor, z: &ConvDims) -> Result<Option<Tensor>> {
    let Some(key) = planned(cuda, ConvPass::Weight, z, x.dtype())? else { return Ok(None) };
    let x = layout::resize(x, key.x[3], Category::Workspace)?;
    let shape = [z.o, z.conv.kernel, z.conv.kernel, key.x[3]];
    let mut dw = Tensor::empty(&x.device(), &shape, x.dtype(), Category::Workspace)?;
    run(cuda, &key, [address(&x), address_mut(&mut dw), address(dy)])?;
    layout::resize(&dw, z.c, Category::Workspace).map(Some)
}

/// What cuDNN has a plan for.
fn planned(cuda: &Cuda, pass: ConvPass, z: &ConvDims, dtype: DType) -> Result<Option<ConvKey>> {
    match key(cuda.tf32_in_convolutions(), pass, z, dtype) {
        Some(key) if cuda.plans_convolution(&key)? => Ok(Some(key)),
        _ => Ok(None),
    }
}

/// The convolution as cuDNN is asked for it; `None` where it may not round, or is slower than our own kernels.
fn key(tf32: bool, pass: ConvPass, z: &ConvDims, dtype: DType) -> Option<ConvKey> {
    let lanes = 16 / dtype.bytes();
    let exact = dtype == DType::F32 && !tf32;
    let slower = match pass {
        ConvPass::Forward => true,
        ConvPass::Weight => dtype == DType::F32,
        ConvPass::Input => false,
    };
    if exact || slower && z.c < lanes && z.window() <= SMALL_WINDOW {
        return None;
    }
    let ConvParams { kernel, stride, padding } = z.conv;
    let x = [z.batch, z.h, z.w, z.c.next_multiple_of(lanes)];
    let (padding_before, padding_after) = ([padding.top, padding.left], [padding.bottom, padding.right]);
    Some(ConvKey { pass, dtype, x, y: z.output_shape(), kernel, stride, padding_before, padding_after })
}

fn run(cuda: &Cuda, key: &ConvKey, tensors: [u64; 3]) -> Result<()> {
    // SAFETY: each caller hands over x, w and y in the shapes of its key, which it has alive on this GPU.
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
    use super::super::Padding;
    use super::*;
    use crate::device::Device;
    use crate::testing;

    const SAME: Padding = Padding { top: 0, bottom: 1, left: 0, right: 1 };

    const PASSES: [ConvPass; 3] = [ConvPass::Forward, ConvPass::Input, ConvPass::Weight];

    fn sizes(side: usize, c: usize, o: usize, kernel: usize, stride: usize, padding: usize) -> ConvDims {
        ConvDims::new(&[8, side, side, c], o, ConvParams { kernel, stride, padding: padding.into() })
    }

    fn slab(padding: Padding) -> ConvDims {
        ConvDims::new(&[8, 18, 32, 64], 64, ConvParams { kernel: 3, stride: 1, padding })
    }

    #[test]
    fn cudnn_is_asked_where_it_may_round_and_is_faster() {
        let asked = |tf32, z, dtype| PASSES.map(|pass| key(tf32, pass, z, dtype).is_some());
        let (layer, first, stem) =
            (sizes(32, 64, 64, 3, 1, 1), sizes(32, 3, 64, 3, 1, 1), sizes(32, 3, 64, 7, 2, 3));
        for z in [&layer, &first, &stem] {
            assert_eq!(asked(false, z, DType::F32), [false; 3], "f32 is exact unless TF32 is allowed");
        }
        for z in [&layer, &stem] {
            assert_eq!((asked(true, z, DType::F32), asked(false, z, DType::Bf16)), ([true; 3], [true; 3]));
        }
        assert_eq!(asked(true, &first, DType::F32), [false, true, false]);
        assert_eq!(asked(false, &first, DType::Bf16), [false, true, true]);
        let channels = |dtype| key(true, ConvPass::Input, &first, dtype).unwrap().x[3];
        assert_eq!((channels(DType::F32), channels(DType::Bf16)), (4, 8), "channels fill 16 bytes");
    }

    /// Falling back to our own kernels is silent: here it is not.
    #[test]
    fn cudnn_has_a_plan_for_what_it_is_asked() {
        let found = testing::devices().iter().any(|devices| matches!(devices[0], Device::Cuda(_)));
        if !found {
            return;
        }
        if let Err(why) = Cuda::cudnn() {
            return espalier_testing::skipped(espalier_testing::Need::Cudnn, why);
        }
        let gpu = Cuda::open(0).unwrap();
        for z in [
            sizes(32, 64, 64, 3, 1, 1),
            sizes(16, 32, 64, 3, 2, 1),
            sizes(8, 256, 64, 1, 1, 0),
            sizes(32, 3, 64, 7, 2, 3),
            // A slab of an image that is tiled over ranks: one in the middle, and the first.
            slab(Padding { top: 0, bottom: 0, left: 1, right: 1 }),
            slab(Padding { top: 1, bottom: 0, left: 1, right: 1 }),
            // resnet8's convolutions at stride 2, padded as TensorFlow's "same".
            ConvDims::new(&[8, 32, 32, 16], 32, ConvParams { kernel: 3, stride: 2, padding: SAME }),
            ConvDims::new(&[8, 16, 16, 32], 64, ConvParams { kernel: 3, stride: 2, padding: SAME }),
        ] {
            for (pass, dtype) in PASSES.into_iter().flat_map(|pass| [(pass, DType::F32), (pass, DType::Bf16)])
            {
                let key = key(true, pass, &z, dtype).unwrap();
                assert!(gpu.plans_convolution(&key).unwrap(), "{key:?}");
            }
        }
    }
}

//! Our kernels of convolutions: their source, the sizes that all of them get, and the one that serves cuDNN too,
//! the bias.

use super::{ConvDims, ConvParams};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::error::Result;
use crate::ops::lanes::{self, ColumnSumLaunch};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[
        KernelInclude::LANES,
        KernelInclude::COPIES,
        KernelInclude::TENSOR_CORES,
        KernelInclude { name: "conv/patches.cuh", text: include_str!("patches.cuh") },
        KernelInclude { name: "conv/product_f32.cuh", text: include_str!("product_f32.cuh") },
        KernelInclude { name: "conv/product_bf16.cuh", text: include_str!("product_bf16.cuh") },
        KernelInclude { name: "conv/thin.cuh", text: include_str!("thin.cuh") },
    ],
    ..lanes::source("conv.cu", include_str!("../conv.cu"), Build::FLOATS)
};

/// The kernels' struct of sizes.
pub(super) fn shape(z: &ConvDims) -> [u32; 11] {
    let most = (z.batch * z.h * z.w).max(z.batch * z.oh * z.ow);
    assert!(most < 1 << 31, "a convolution of {most} pixels: their numbers have 31 bits");
    let ConvParams { kernel, stride, padding } = z.conv;
    [z.batch, z.h, z.w, z.c, z.oh, z.ow, z.o, kernel, stride, padding.top, padding.left]
        .map(|n| i32::try_from(n).expect("an image's extents have 31 bits") as u32)
}

/// Adds the bias to every pixel of y, and sets what is negative to zero where ReLU stands behind.
pub(super) fn add_bias(cuda: &Cuda, y: &mut Tensor, bias: &Tensor, relu: bool) -> Result<()> {
    let (rows, o, dtype) = (y.rows(), y.width(), y.dtype());
    let ColumnSumLaunch { grid, block, chunk, .. } = lanes::columns(rows, o, dtype);
    let args = Args::new().output(y).input(bias).i32(relu.into()).size(rows).size(o).size(chunk);
    // SAFETY: y is [rows, o], the bias [o], of one type.
    unsafe { cuda.kernel(&SOURCE, Build::of(dtype), "conv_add_bias")?.launch(grid, block, 0, args) }
}

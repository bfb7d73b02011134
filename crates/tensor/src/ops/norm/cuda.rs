//! Layer norm and RMS norm on a GPU: their kernels take the same arguments, but for the number N of weights.

use super::{all, empty_statistics};
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast;
use crate::ops::lanes::{self, ColumnSumLaunch};
use crate::tensor::Tensor;

/// The walk over a row that both norms' kernels share.
const BACKWARD_INPUT: KernelInclude =
    KernelInclude { name: "norm/backward_input.cuh", text: include_str!("backward_input.cuh") };

/// A norm's file of kernels.
pub(crate) const fn source(name: &'static str, text: &'static str) -> KernelSource {
    KernelSource {
        includes: &[KernelInclude::LANES, BACKWARD_INPUT],
        ..lanes::source(name, text, Build::FLOATS)
    }
}

/// A norm's kernels, by their names in its file.
pub(crate) struct NormKernels {
    pub(crate) source: &'static KernelSource,
    pub(crate) forward: &'static str,
    pub(crate) backward_input: &'static str,
    pub(crate) backward_remaking: &'static str,
    pub(crate) backward_weights: &'static str,
    pub(crate) backward_weights_total: &'static str,
}

pub(super) fn forward<const N: usize>(
    cuda: &Cuda,
    kernels: &NormKernels,
    x: &Tensor,
    weights: [&Tensor; N],
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    let (weights, wide) = cast::weights(x.dtype(), weights)?;
    let mut y = x.empty_like(Category::Transient)?;
    let mut statistics = empty_statistics::<N>(x)?;
    let kernel = cuda.kernel(kernels.source, Build::of(x.dtype()), kernels.forward)?;
    let args = weights.iter().fold(Args::new().input(x), Args::input).i32(wide.into());
    let args = args.output(&mut y).output(&mut statistics).size(rows).size(c).f32(eps);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: x and y are [rows, c], the statistics [rows, N], the N weights [c] in the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok((y, statistics))
}

pub(super) fn backward_input(
    cuda: &Cuda,
    kernels: &NormKernels,
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    statistics: &Tensor,
) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    check_types(kernels, dy, x, statistics);
    let ([scale], wide) = cast::weights(x.dtype(), [scale])?;
    let mut dx = x.empty_like(Category::Transient)?;
    let kernel = cuda.kernel(kernels.source, Build::of(x.dtype()), kernels.backward_input)?;
    let args = Args::new().input(dy).input(x).input(&scale).i32(wide.into()).input(statistics);
    let args = args.output(&mut dx).size(rows).size(c);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: dy, x and dx are [rows, c], the statistics [rows, N], scale [c] in the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(dx)
}

pub(super) fn backward_remaking<const N: usize>(
    cuda: &Cuda,
    kernels: &NormKernels,
    dy: &Tensor,
    x: &Tensor,
    weights: [&Tensor; N],
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    check_types(kernels, dy, x, statistics);
    let (weights, wide) = cast::weights(x.dtype(), weights)?;
    let mut dx = lanes::Addend::new(x, plus)?;
    let mut y = x.empty_like(Category::Transient)?;
    let kernel = cuda.kernel(kernels.source, Build::of(x.dtype()), kernels.backward_remaking)?;
    let args = weights.iter().fold(Args::new().input(dy).input(x), Args::input);
    let args = args.i32(wide.into()).input(statistics);
    let args = args.pointer(dx.from).output(&mut dx.sum).output(&mut y).size(rows).size(c);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: dy, x, what is added, dx and y are [rows, c], the statistics [rows, N], the N weights [c] in
    // the type that `wide` says; the kernel lets dx be what is added.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok((dx.sum, y))
}

pub(super) fn backward_weights<const N: usize>(
    cuda: &Cuda,
    kernels: &NormKernels,
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    dtype: DType,
) -> Result<[Tensor; N]> {
    let (rows, c, device) = (x.rows(), x.width(), x.device());
    check_types(kernels, dy, x, statistics);
    let build = Build::of(x.dtype());
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let mut partial = Tensor::empty(&device, &[chunks, N, c], DType::F32, Category::Workspace)?;
    let args = Args::new().input(dy).input(x).input(statistics).output(&mut partial);
    let args = args.size(rows).size(c).size(chunk);
    let kernel = cuda.kernel(kernels.source, build, kernels.backward_weights)?;
    // SAFETY: dy and x are [rows, c], the statistics [rows, N], and each chunk has its N c numbers in `partial`.
    unsafe { kernel.launch(grid, block, 0, args)? };

    let empty = |_| Tensor::empty(&device, &[c], dtype, Category::Workspace);
    let mut totals: [Tensor; N] = all((0..N).map(empty).collect::<Result<_>>()?);
    let narrow = i32::from(dtype == DType::Bf16);
    let args = totals.iter_mut().fold(Args::new().input(&partial), Args::output);
    let args = args.size(chunks).size(c).i32(narrow);
    let kernel = cuda.kernel(kernels.source, build, kernels.backward_weights_total)?;
    // SAFETY: `partial` is [chunks, N, c], and the N sums are [c] in the type that `narrow` says.
    unsafe { kernel.launch(lanes::blocks(N * c, 32), (32, 8), 0, args)? };
    Ok(totals)
}

fn check_types(kernels: &NormKernels, dy: &Tensor, x: &Tensor, statistics: &Tensor) {
    let given = (dy.dtype(), statistics.dtype());
    assert_eq!(given, (x.dtype(), DType::F32), "{}: types", kernels.source.name);
}

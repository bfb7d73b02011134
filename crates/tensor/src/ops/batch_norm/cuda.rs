//! Batch normalisation on a GPU.

use super::{NormEpilogue, PartialStats};
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast;
use crate::ops::lanes::{self, ColumnSumLaunch, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("batch_norm.cu", include_str!("../batch_norm.cu"), Build::FLOATS);

/// Each chunk's mean and sum of squared distances from it.
pub(super) fn moments(cuda: &Cuda, x: &Tensor) -> Result<PartialStats> {
    let (rows, c) = (x.rows(), x.width());
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let mut numbers = Tensor::empty(&x.device(), &[chunks, 2, c], DType::F32, Category::Workspace)?;
    let args = Args::new().input(x).output(&mut numbers).size(rows).size(c).size(chunk);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "batch_norm_moments")?;
    // SAFETY: x is [rows, c], and each of the chunks has its 2 c numbers.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(PartialStats { numbers, chunk })
}

/// Each chunk's sums of dy and of dy (x - mean).
pub(super) fn gradient_sums(cuda: &Cuda, dy: &Tensor, x: &Tensor, mean: &Tensor) -> Result<PartialStats> {
    let (rows, c) = (x.rows(), x.width());
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let mut numbers = Tensor::empty(&x.device(), &[chunks, 2, c], DType::F32, Category::Workspace)?;
    let args = Args::new().input(dy).input(x).input(mean).output(&mut numbers);
    let args = args.size(rows).size(c).size(chunk);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "batch_norm_gradient_sums")?;
    // SAFETY: dy and x are [rows, c], mean is [c], and each of the chunks has its 2 c numbers.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(PartialStats { numbers, chunk })
}

/// Normalises by given statistics: `spread` is one over the standard deviation, or the variance to which `eps` is
/// still to be added.
pub(super) fn normalise(
    cuda: &Cuda,
    x: &Tensor,
    [scale, shift]: [&Tensor; 2],
    [mean, spread]: [&Tensor; 2],
    eps: Option<f32>,
    epilogue: NormEpilogue<'_>,
) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    let ColumnSumLaunch { grid, block, chunk, .. } = lanes::columns(rows, c, x.dtype());
    let ([scale, shift], wide) = cast::weights(x.dtype(), [scale, shift])?;
    let mut y = x.empty_like(Category::Transient)?;
    let args = Args::new().input(x).input(&scale).input(&shift).i32(wide.into());
    let args = args.input(mean).input(spread).optional_input(epilogue.plus).i32(epilogue.relu.into());
    let args = args.output(&mut y).size(rows).size(c).size(chunk);
    let (name, args) = match eps {
        None => ("batch_norm_forward", args),
        Some(eps) => ("batch_norm_evaluate", args.f32(eps)),
    };
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), name)?;
    // SAFETY: x, y and what is added are [rows, c], all else [c], scale and shift in the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(y)
}

/// dx = a dy + b (x - mean) + d; line: a, b and d as f32 `[3, c]`.
pub(super) fn input_gradient(
    cuda: &Cuda,
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    line: &Tensor,
) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    let ColumnSumLaunch { grid, block, chunk, .. } = lanes::columns(rows, c, x.dtype());
    let mut dx = x.empty_like(Category::Transient)?;
    let args = Args::new().input(dy).input(x).input(mean).input(line).output(&mut dx);
    let args = args.size(rows).size(c).size(chunk);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "batch_norm_backward_input")?;
    // SAFETY: dy, x and dx are [rows, c], mean is [c], `line` [3, c].
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(dx)
}

/// Mean and one over the standard deviation of each channel.
pub(super) fn statistics(cuda: &Cuda, x: &Tensor, eps: f32) -> Result<[Tensor; 2]> {
    let (rows, c, device, build) = (x.rows(), x.width(), x.device(), Build::of(x.dtype()));
    let PartialStats { numbers: partial, chunk } = moments(cuda, x)?;
    let chunks = rows.div_ceil(chunk);
    let mut mean = Tensor::empty(&device, &[c], DType::F32, Category::Transient)?;
    let mut rstd = Tensor::empty(&device, &[c], DType::F32, Category::Transient)?;
    let args = Args::new().input(&partial).output(&mut mean).output(&mut rstd);
    let args = args.size(rows).size(c).size(chunk).size(chunks).f32(eps);
    let kernel = cuda.kernel(&SOURCE, build, "batch_norm_statistics")?;
    // SAFETY: `partial` is [chunks, 2, c], the statistics are [c].
    unsafe { kernel.launch(lanes::blocks(c, 8), THREADS, 0, args)? };
    Ok([mean, rstd])
}

pub(super) fn backward(
    cuda: &Cuda,
    [dy, x]: [&Tensor; 2],
    scale: &Tensor,
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor)> {
    let sums = gradient_sums(cuda, dy, x, mean)?;
    let (line, dscale, dshift) = line(cuda, &sums.numbers, x, scale, rstd)?;
    Ok((input_gradient(cuda, dy, x, mean, &line)?, dscale, dshift))
}

/// Behind ReLU, whose output is made again of x, and written to y where there is one.
pub(super) fn backward_gated(
    cuda: &Cuda,
    dy: &Tensor,
    x: &Tensor,
    [scale, shift]: [&Tensor; 2],
    [mean, rstd]: [&Tensor; 2],
    y: Option<&mut Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, c, build) = (x.rows(), x.width(), Build::of(x.dtype()));
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let ([read_scale, read_shift], wide) = cast::weights(x.dtype(), [scale, shift])?;
    let read = |name: &'static str| {
        let args = Args::new().input(dy).input(x).input(&read_scale).input(&read_shift).i32(wide.into());
        Ok::<_, crate::Error>((cuda.kernel(&SOURCE, build, name)?, args.input(mean).input(rstd)))
    };
    let mut numbers = Tensor::empty(&x.device(), &[chunks, 2, c], DType::F32, Category::Workspace)?;
    let (kernel, args) = read("batch_norm_gated_sums")?;
    let args = args.output(&mut numbers).size(rows).size(c).size(chunk);
    // SAFETY: dy and x are [rows, c], each of the chunks has its 2 c numbers, all else is [c], scale and shift in
    // the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    let (line, dscale, dshift) = line(cuda, &numbers, x, scale, rstd)?;
    let mut dx = x.empty_like(Category::Transient)?;
    let (kernel, args) = read("batch_norm_gated_input")?;
    let args = args.input(&line).output(&mut dx).optional_output(y).size(rows).size(c).size(chunk);
    // SAFETY: as above; dx and y are [rows, c], `line` is [3, c].
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok((dx, dscale, dshift))
}

/// Behind a sum and ReLU, of which y is the output; and what of dy, or of dy + more, passes it.
pub(super) fn backward_masked(
    cuda: &Cuda,
    mut dy: Tensor,
    more: Option<Tensor>,
    x: &Tensor,
    y: &Tensor,
    scale: &Tensor,
    [mean, rstd]: [&Tensor; 2],
) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
    let (rows, c, build) = (x.rows(), x.width(), Build::of(x.dtype()));
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let mut numbers = Tensor::empty(&x.device(), &[chunks, 2, c], DType::F32, Category::Workspace)?;
    let mut other = if dy.is_unique() { None } else { Some(dy.empty_like(Category::Transient)?) };
    let from = dy.cuda_buffer().address();
    let kernel = cuda.kernel(&SOURCE, build, "batch_norm_masked_sums")?;
    let args = Args::new().pointer(from).optional_input(more.as_ref()).input(x).input(mean).input(y);
    let args = args.output(other.as_mut().unwrap_or(&mut dy)).output(&mut numbers);
    // SAFETY: dy, `more`, x, y and what passes are [rows, c], mean is [c], and each of the chunks has its 2 c
    // numbers; the kernel lets what passes be dy, and `dy` lives until it is queued.
    unsafe { kernel.launch(grid, block, 0, args.size(rows).size(c).size(chunk))? };
    drop(more);
    let passed = other.unwrap_or(dy);
    let (line, dscale, dshift) = line(cuda, &numbers, x, scale, rstd)?;
    Ok((input_gradient(cuda, &passed, x, mean, &line)?, dscale, dshift, passed))
}

/// The line of [`input_gradient`], and the gradients of scale and shift, from sums over chunks.
pub(super) fn line(
    cuda: &Cuda,
    numbers: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, c, device, chunks) = (x.rows(), x.width(), x.device(), numbers.shape()[0]);
    let mut line = Tensor::empty(&device, &[3, c], DType::F32, Category::Workspace)?;
    let mut dscale = Tensor::empty(&device, &[c], scale.dtype(), Category::Workspace)?;
    let mut dshift = dscale.empty_like(Category::Workspace)?;
    let narrow = i32::from(scale.dtype() == DType::Bf16);
    let ([scale], wide) = cast::weights(x.dtype(), [scale])?;
    let args = Args::new().input(numbers).input(&scale).i32(wide.into()).input(rstd).output(&mut line);
    let args = args.output(&mut dscale).output(&mut dshift).size(rows).size(c).size(chunks).i32(narrow);
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "batch_norm_backward_weights")?;
    // SAFETY: the numbers are [chunks, 2, c], `line` is [3, c], all else [c] in the types that `wide` and `narrow`
    // say.
    unsafe { kernel.launch(lanes::blocks(c, 8), THREADS, 0, args)? };
    Ok((line, dscale, dshift))
}

pub(super) fn fold(
    cuda: &Cuda,
    [mean, rstd]: [&Tensor; 2],
    [unbias, eps, momentum]: [f32; 3],
    [running_mean, running_variance]: [&mut Tensor; 2],
) -> Result<()> {
    let c = mean.len();
    let args = Args::new().input(mean).input(rstd).output(running_mean).output(running_variance);
    let args = args.size(c).f32(unbias).f32(eps).f32(momentum);
    let kernel = cuda.kernel(&SOURCE, Build::F32, "batch_norm_fold")?;
    // SAFETY: all four are f32 [c].
    unsafe { kernel.launch(lanes::blocks(c, THREADS as usize), THREADS, 0, args) }
}

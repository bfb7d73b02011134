//! Normalisation by the root mean square on a card.

use crate::cuda::lanes::{self, Columns};
use crate::cuda::{Args, Build, Cuda, Source};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source =
    lanes::source("rms_norm.cu", include_str!("../rms_norm.cu"), Build::FLOATS);

pub(super) fn forward(cuda: &Cuda, x: &Tensor, scale: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    let ([scale], wide) = lanes::weights(x.dtype(), [scale])?;
    let mut y = x.empty_like(Category::Activations)?;
    let mut statistics = Tensor::empty(&x.device(), &[rows], DType::F32, Category::Activations)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "rms_norm_forward")?;
    let args = Args::new().input(x).input(&scale).i32(wide.into());
    let args = args.output(&mut y).output(&mut statistics).size(rows).size(c).f32(eps);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: x and y are [rows, c], the statistics [rows], scale [c] in the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok((y, statistics))
}

pub(super) fn backward_input(
    cuda: &Cuda,
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    statistics: &Tensor,
) -> Result<Tensor> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!((dy.dtype(), statistics.dtype()), (x.dtype(), DType::F32), "rms_norm: types");
    let ([scale], wide) = lanes::weights(x.dtype(), [scale])?;
    let mut dx = x.empty_like(Category::Activations)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "rms_norm_backward_input")?;
    let args = Args::new().input(dy).input(x).input(&scale).i32(wide.into()).input(statistics);
    let args = args.output(&mut dx).size(rows).size(c);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: dy, x and dx are [rows, c], the statistics [rows], scale [c] in the type that `wide` says.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok(dx)
}

pub(super) fn backward_remaking(
    cuda: &Cuda,
    dy: &Tensor,
    x: &Tensor,
    scale: &Tensor,
    statistics: &Tensor,
    plus: Option<Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (rows, c) = (x.rows(), x.width());
    assert_eq!((dy.dtype(), statistics.dtype()), (x.dtype(), DType::F32), "rms_norm: types");
    let ([scale], wide) = lanes::weights(x.dtype(), [scale])?;
    let mut dx = lanes::Added::new(x, plus)?;
    let mut y = x.empty_like(Category::Activations)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "rms_norm_backward_remaking")?;
    let args = Args::new().input(dy).input(x).input(&scale).i32(wide.into()).input(statistics);
    let args = args.pointer(dx.from).output(&mut dx.sum).output(&mut y).size(rows).size(c);
    let (grid, block) = lanes::rows(rows, c, x.dtype());
    // SAFETY: dy, x, what is added, dx and y are [rows, c], the statistics [rows], scale [c] in the type that
    // `wide` says; the kernel lets dx be what is added.
    unsafe { kernel.launch(grid, block, 0, args)? };
    Ok((dx.sum, y))
}

pub(super) fn backward_weights(
    cuda: &Cuda,
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let (rows, c, device) = (x.rows(), x.width(), x.device());
    assert_eq!((dy.dtype(), statistics.dtype()), (x.dtype(), DType::F32), "rms_norm: types");
    let build = Build::of(x.dtype());
    let Columns { grid, block, piece, pieces } = lanes::columns(rows, c, x.dtype());
    let mut partial = Tensor::empty(&device, &[pieces, c], DType::F32, Category::Workspace)?;
    let args = Args::new().input(dy).input(x).input(statistics).output(&mut partial);
    let args = args.size(rows).size(c).size(piece);
    // SAFETY: dy and x are [rows, c], the statistics [rows], and each piece has its c numbers in `partial`.
    unsafe { cuda.kernel(&SOURCE, build, "rms_norm_backward_weights")?.launch(grid, block, 0, args)? };

    let mut dscale = Tensor::empty(&device, &[c], dtype, Category::Workspace)?;
    let narrow = i32::from(dtype == DType::Bf16);
    let args = Args::new().input(&partial).output(&mut dscale).size(pieces).size(c).i32(narrow);
    let kernel = cuda.kernel(&SOURCE, build, "rms_norm_backward_weights_total")?;
    // SAFETY: `partial` is [pieces, c] and the sum [c] in the type that `narrow` says.
    unsafe { kernel.launch(lanes::blocks(c, 32), (32, 8), 0, args)? };
    Ok(dscale)
}

//! Sums on a GPU: partial sums by geometry, then their sum in a fixed order.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::lanes::{self, ColumnSumLaunch, THREADS};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("reduce.cu", include_str!("../reduce.cu"), Build::FLOATS);

/// Elements that a block takes of a norm or a dot product.
const SPAN: usize = 16384;

pub(super) fn sum_rows(cuda: &Cuda, x: &Tensor, category: Category) -> Result<Tensor> {
    let (rows, c, build) = (x.rows(), x.width(), Build::of(x.dtype()));
    let ColumnSumLaunch { grid, block, chunk, chunks } = lanes::columns(rows, c, x.dtype());
    let mut partial = Tensor::empty(&x.device(), &[chunks, c], DType::F32, Category::Workspace)?;
    let mut y = Tensor::empty(&x.device(), &[c], x.dtype(), category)?;
    let args = Args::new().input(x).output(&mut partial).size(rows).size(c).size(chunk);
    // SAFETY: x is [rows, c], and each of the chunks has its row of c numbers in `partial`.
    unsafe { cuda.kernel(&SOURCE, build, "reduce_sum_rows")?.launch(grid, block, 0, args)? };
    let narrow = i32::from(y.dtype() == DType::Bf16);
    let args = Args::new().input(&partial).output(&mut y).size(chunks).size(c).size(0).size(c).i32(narrow);
    let kernel = cuda.kernel(&SOURCE, build, "reduce_total")?;
    // SAFETY: `partial` is [chunks, c] and y [c], of the type that `narrow` says.
    unsafe { kernel.launch(lanes::blocks(c, 32), (32, 8), 0, args)? };
    Ok(y)
}

pub(super) fn squared_norm(cuda: &Cuda, x: &Tensor) -> Result<f64> {
    total(cuda, x, "reduce_squared_norm", Args::new().input(x))
}

pub(super) fn dot(cuda: &Cuda, a: &Tensor, b: &Tensor) -> Result<f64> {
    let name = b.dtype().by_float("reduce_dot_f32", "reduce_dot_bf16");
    total(cuda, a, name, Args::new().input(a).input(b))
}

/// Runs a kernel that leaves a double per [`SPAN`] of x, and brings the sum of these back. `operands` are x, and
/// what the kernel takes beside it, of the same length.
fn total<'a>(cuda: &Cuda, x: &'a Tensor, name: &'static str, operands: Args<'a>) -> Result<f64> {
    let (n, build) = (x.len(), Build::of(x.dtype()));
    let blocks = lanes::blocks(n, SPAN);
    // The sum stands before the partial sums.
    let partial = lanes::doubles(&x.device(), blocks as usize + 1)?;
    let sum = partial.cuda_buffer().address();
    let partials = sum + 8;
    let args = operands.pointer(partials).size(n);
    // SAFETY: the operands have n elements, and `partials` has a double per block.
    unsafe { cuda.kernel(&SOURCE, build, name)?.launch(blocks, THREADS, 0, args)? };
    let args = Args::new().pointer(partials).pointer(sum).size(blocks as usize);
    // SAFETY: `partials` are as many doubles as there were blocks, and `sum` is one before them.
    unsafe { cuda.kernel(&SOURCE, build, "reduce_total_f64")?.launch(1, 1024, 0, args)? };
    let [sum] = partial.cuda_buffer().words()?;
    Ok(f64::from_bits(sum))
}

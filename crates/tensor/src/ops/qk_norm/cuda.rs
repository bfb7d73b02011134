//! Norms and rotations of heads on a GPU.

use super::QkNormArgs;
use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::ops::attention::AttentionDims;
use crate::ops::position::Position;
use crate::ops::{cast, columns, lanes, reduce};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("qk_norm.cu", include_str!("../qk_norm.cu"), Build::FLOATS);

/// Warps of a block.
const WARPS: usize = 8;
/// The largest head that the kernels take, as attention does.
const MOST: usize = 256;

/// The arguments behind the tensors: table, position, and sizes.
fn sizes<'a>(
    args: Args<'a>,
    norm: &QkNormArgs<'a>,
    scales: &'a [Tensor; 2],
    wide: bool,
    first: Option<&'a Position>,
    z: &AttentionDims,
) -> Args<'a> {
    let args = args.input(&scales[0]).input(&scales[1]).i32(wide.into()).optional_input(norm.table);
    let args = args.optional_input(first.map(Position::on_gpu)).size(z.batch * z.t).i32(z.t as i32);
    args.i32(z.heads as i32).i32(z.kv_heads as i32).i32(z.d as i32)
}

fn check_head(z: &AttentionDims) -> Result<()> {
    if z.d > MOST {
        let what = format!(
            "a norm of queries and keys on a GPU takes heads of at most {MOST} columns, got {}: set \
             device.kind = \"cpu\"",
            z.d
        );
        return Err(Error::Unsupported { what });
    }
    Ok(())
}

pub(super) fn forward(
    cuda: &Cuda,
    qkv: &Tensor,
    norm: &QkNormArgs<'_>,
    first: Option<&Position>,
    z: &AttentionDims,
    y: &mut Tensor,
    rstd: &mut Tensor,
) -> Result<()> {
    check_head(z)?;
    let (scales, wide) = cast::weights(qkv.dtype(), norm.scales)?;
    let args = sizes(Args::new().input(qkv).output(y).output(rstd), norm, &scales, wide, first, z);
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "qk_norm_forward")?;
    let heads = z.batch * z.t * (z.heads + 2 * z.kv_heads);
    // SAFETY: qkv and y are [rows, heads + 2 kv_heads, d], each head with a warp, rstd [rows, heads + kv_heads],
    // the scales [d] in the type that `wide` says; the table has a row of d for every position.
    unsafe { kernel.launch(lanes::blocks(heads, WARPS), (32, WARPS as u32), 0, args.f32(norm.eps)) }
}

/// dx is dy before; gives the scales' gradients.
pub(super) fn backward(
    cuda: &Cuda,
    dx: &mut Tensor,
    qkv: &Tensor,
    rstd: &Tensor,
    norm: &QkNormArgs<'_>,
    z: &AttentionDims,
    dtype: DType,
) -> Result<[Tensor; 2]> {
    check_head(z)?;
    let (scales, wide) = cast::weights(qkv.dtype(), norm.scales)?;
    let rows = z.batch * z.t;
    // Enough warps to fill a GPU, and few enough that their sums are short.
    let chunk = rows.div_ceil(4096).max(1);
    let warps = rows.div_ceil(chunk);
    let mut partial = Tensor::empty(&qkv.device(), &[warps, 2 * z.d], DType::F32, Category::Workspace)?;
    let args = Args::new().output(dx).input(qkv).input(rstd).output(&mut partial);
    let args = sizes(args, norm, &scales, wide, None, z).size(chunk);
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "qk_norm_backward")?;
    // SAFETY: as above; every chunk of rows has a warp with its 2 d numbers in `partial`.
    unsafe { kernel.launch(lanes::blocks(warps, WARPS), (32, WARPS as u32), 0, args)? };
    let total = reduce::sum_rows(&partial, Category::Workspace)?;
    let of = |at: std::ops::Range<usize>| {
        let part = columns::take(&total, at, Category::Workspace)?;
        cast::cast(&part, dtype, Category::Workspace)
    };
    Ok([of(0..z.d)?, of(z.d..2 * z.d)?])
}

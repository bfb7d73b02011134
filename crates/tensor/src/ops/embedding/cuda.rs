//! Tables on a GPU. Where the host panics at an id beyond the table, a GPU gives a row of NaN and no gradient:
//! it cannot stop, and the loss shows it.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::cast;
use crate::ops::lanes;
use crate::ops::position::Position;
use crate::tensor::Tensor;

use super::TableRows;

pub(crate) static SOURCE: KernelSource =
    lanes::source("embedding.cu", include_str!("../embedding.cu"), Build::FLOATS);

/// A block has a warp for each of 8 rows.
const BLOCK: (u32, u32) = (32, 8);
const ROWS: usize = 8;

/// Grid over rows and over groups of columns.
fn tiles(rows: usize, c: usize, dtype: DType) -> (u32, u32) {
    (lanes::blocks(rows, ROWS), lanes::blocks(c, 32 * lanes::width(c, dtype)))
}

pub(super) fn forward(
    cuda: &Cuda,
    ids: &Tensor,
    table: &Tensor,
    rows: TableRows,
    y: &mut Tensor,
) -> Result<()> {
    assert_eq!(ids.dtype(), DType::U32, "embedding: ids");
    let (n, vocab, c) = (ids.len(), table.rows(), table.width());
    let kernel = cuda.kernel(&SOURCE, Build::of(table.dtype()), "embedding_forward")?;
    let missing = if rows == TableRows::All { f32::NAN } else { 0.0 };
    let args = Args::new().input(ids).input(table).output(y);
    let args = args.size(n).size(c).size(vocab).u32(rows.first()).f32(missing);
    // SAFETY: n ids, a table [vocab, c], and y [n, c] of its type.
    unsafe { kernel.launch(lanes::blocks(n, ROWS), BLOCK, 0, args) }
}

pub(super) fn backward(
    cuda: &Cuda,
    ids: &Tensor,
    dy: &Tensor,
    vocab: usize,
    rows: TableRows,
) -> Result<Tensor> {
    assert_eq!(ids.dtype(), DType::U32, "embedding: ids");
    let (n, c, device, build) = (ids.len(), dy.width(), dy.device(), Build::of(dy.dtype()));
    let scratch = |len| Tensor::empty(&device, &[len], DType::U32, Category::Workspace);
    let (mut counts, mut loose, mut order) = (scratch(vocab + 1)?, scratch(n)?, scratch(n)?);
    counts.fill_zero()?;
    let kernel = |name| cuda.kernel(&SOURCE, build, name);
    let (places, first) = (lanes::blocks(n, 256), rows.first());

    let args = Args::new().input(ids).output(&mut counts).size(n).size(vocab).u32(first);
    // SAFETY: n ids, and a count for each id of the vocabulary; others are left out.
    unsafe { kernel("embedding_count")?.launch(places, 256, 0, args)? };
    let args = Args::new().output(&mut counts).size(vocab);
    // SAFETY: vocab + 1 counts, and a block of 32 warps.
    unsafe { kernel("embedding_scan")?.launch(1, 1024, 0, args)? };
    let args = Args::new().input(ids).output(&mut counts).output(&mut loose).size(n).size(vocab).u32(first);
    // SAFETY: the counts are starts within `loose`, which has room for all n.
    unsafe { kernel("embedding_scatter")?.launch(places, 256, 0, args)? };
    let args = Args::new().input(ids).input(&counts).input(&loose).output(&mut order);
    let args = args.size(n).size(vocab).u32(first);
    // SAFETY: the counts are ends within `loose` and `order`, which have room for all n.
    unsafe { kernel("embedding_rank")?.launch(places, 256, 0, args)? };

    let mut table = Tensor::empty(&device, &[vocab, c], dy.dtype(), Category::Workspace)?;
    let args = Args::new().input(dy).input(&counts).input(&order).output(&mut table);
    let args = args.size(vocab).size(c).i32(0);
    // SAFETY: dy is [n, c], the table [vocab, c] of its type, and `order` has rows of dy, which end as counted.
    unsafe { kernel("embedding_backward")?.launch(tiles(vocab, c, dy.dtype()), BLOCK, 0, args)? };
    Ok(table)
}

pub(super) fn add_positions(
    cuda: &Cuda,
    mut x: Tensor,
    table: &Tensor,
    t: usize,
    first: usize,
    behind: Option<&Position>,
) -> Result<Tensor> {
    let (n, c) = (x.rows(), x.width());
    let ([table], wide) = cast::weights(x.dtype(), [table])?;
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "embedding_add_positions")?;
    let mut other = if x.is_unique() { None } else { Some(x.empty_like(Category::Transient)?) };
    let from = x.cuda_buffer().address();
    let y = other.as_mut().unwrap_or(&mut x);
    let args = Args::new().pointer(from).input(&table).i32(wide.into()).output(y);
    let args = args.size(n).size(t).size(c).size(first).optional_input(behind.map(Position::on_gpu));
    // SAFETY: x and y are [n, c] of one type, and may be one; the table has at least first + t rows behind
    // the position, in the type that `wide` says.
    unsafe { kernel.launch(lanes::blocks(n, ROWS), BLOCK, 0, args)? };
    Ok(other.unwrap_or(x))
}

pub(super) fn positions_slice(
    cuda: &Cuda,
    positions: &Tensor,
    slice: &mut Tensor,
    all: usize,
    first: usize,
) -> Result<()> {
    let (n, t) = (slice.len(), slice.width());
    let kernel = cuda.kernel(&SOURCE, Build::of(DType::F32), "embedding_positions_slice")?;
    let args = Args::new().input(positions).output(slice).size(n).size(t).size(all).size(first);
    // SAFETY: n ids of rows of t, each from a row of `all` that has t from `first` on.
    unsafe { kernel.launch(lanes::blocks(n, 256), 256, 0, args) }
}

pub(super) fn positions_backward(
    cuda: &Cuda,
    dy: &Tensor,
    table: &mut Tensor,
    t: usize,
    first: usize,
) -> Result<()> {
    let (n, c, context) = (dy.rows(), dy.width(), table.rows());
    let kernel = cuda.kernel(&SOURCE, Build::of(dy.dtype()), "embedding_positions_backward")?;
    let args = Args::new().input(dy).output(table).size(n).size(t).size(c).size(context).size(first);
    // SAFETY: dy is [n, c] and the table [context, c], of one type.
    unsafe { kernel.launch(tiles(context, c, dy.dtype()), BLOCK, 0, args) }
}

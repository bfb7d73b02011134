//! A row times a matrix on a card.

use crate::cuda::{Args, Build, Cuda, Source};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source = lanes::source("matvec.cu", include_str!("../matvec.cu"), Build::FLOATS);

/// Rows of a piece of a matrix that is stored by inputs: few, so that even a small matrix fills a card. A thread of
/// a block (32, 8) reads four of them, all under way at once.
const PIECE: usize = 32;

pub(super) fn matvec(
    cuda: &Cuda,
    x: &Tensor,
    w: Operand<'_>,
    bias: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let (k, n) = w.extents();
    let kernel = |name| cuda.kernel(&SOURCE, Build::of(x.dtype()), name);
    if w.transposed {
        let args = Args::new().input(x).input(w.tensor).optional_input(bias).output(y).size(k).size(n);
        // SAFETY: x is [k], w [n, k], the bias and y [n], of one type; each row has a warp.
        return unsafe { kernel("matvec_by_outputs")?.launch(lanes::blocks(n, 8), (32, 8), 0, args) };
    }
    let pieces = k.div_ceil(PIECE);
    let mut partial = Tensor::empty(&x.device(), &[pieces, n], DType::F32, Category::Workspace)?;
    let grid = (lanes::blocks(n, 32 * lanes::width(n, x.dtype())), pieces as u32);
    let args = Args::new().input(x).input(w.tensor).output(&mut partial).size(k).size(n).size(PIECE);
    // SAFETY: x is [k], w [k, n], and each piece has its row of n numbers in `partial`.
    unsafe { kernel("matvec_by_inputs")?.launch(grid, (32, 8), 0, args)? };
    let args = Args::new().input(&partial).optional_input(bias).output(y).size(pieces).size(n);
    // SAFETY: `partial` is [pieces, n]; the bias and y are [n], of x's type.
    unsafe { kernel("matvec_total")?.launch(lanes::blocks(n, 32), (32, 8), 0, args) }
}

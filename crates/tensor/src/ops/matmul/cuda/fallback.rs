//! What follows a product, by kernels of ours, where cuBLASLt cannot do it on the way out.

use super::{GpuMatmul, MatmulEpilogue, SOURCE};
use crate::cuda::{Args, Build, Cuda, Kernel};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

const THREADS: u32 = 256;

pub(super) fn run(
    cuda: &Cuda,
    product: &GpuMatmul<'_>,
    epilogue: MatmulEpilogue<'_>,
    c: &mut Tensor,
) -> Result<()> {
    let (elements, width) = (c.len(), product.n);
    let kernel = |name| cuda.kernel(&SOURCE, Build::of(c.dtype()), name);
    let grid = u32::try_from(elements.div_ceil(THREADS as usize))
        .unwrap_or(u32::MAX)
        .min(cuda.gpu().multiprocessors * 16);
    match epilogue {
        MatmulEpilogue::None => Ok(()),
        MatmulEpilogue::Bias(bias) => {
            let kernel = kernel("add_bias")?;
            let args = Args::new().output(c).input(bias).size(elements).size(width);
            // SAFETY: `add_bias(c, bias, elements, width)`; c: [.., width], bias: [width], checked before.
            unsafe { kernel.launch(grid, THREADS, 0, args) }
        }
        MatmulEpilogue::Gelu { bias, pre } => {
            let kernel = kernel("bias_gelu")?;
            let args = Args::new().output(c).optional_input(bias).output(pre).size(elements).size(width);
            // SAFETY: `bias_gelu(c, bias, pre, elements, width)`; pre has c's length, checked before.
            unsafe { kernel.launch(grid, THREADS, 0, args) }
        }
        MatmulEpilogue::GeluBackward { pre } => {
            let kernel = kernel("gelu_backward")?;
            let args = Args::new().output(c).input(pre).size(elements);
            // SAFETY: `gelu_backward(c, pre, elements)`; pre has c's length, checked before.
            unsafe { kernel.launch(grid, THREADS, 0, args) }
        }
        // Sums over k: of a stored [m, k] they go along rows, of one stored [k, m] along columns.
        MatmulEpilogue::SumsOfA(out) => sums(cuda, product.a, !product.ta, out),
        MatmulEpilogue::SumsOfB(out) => sums(cuda, product.b, product.tb, out),
    }
}

fn sums(cuda: &Cuda, x: &Tensor, along_rows: bool, out: &mut Tensor) -> Result<()> {
    let kernel = |name| -> Result<Kernel> { cuda.kernel(&SOURCE, Build::of(x.dtype()), name) };
    let (rows, width) = (x.rows(), x.width());
    let same = out.dtype() == x.dtype();
    assert!(same || out.dtype() == DType::F32, "sums of {:?} in {:?}", x.dtype(), out.dtype());
    let (narrow, wide) = if same { (Some(out), None) } else { (None, Some(out)) };
    let args = Args::new().input(x).optional_output(narrow).optional_output(wide);
    if along_rows {
        let args = args.size(width);
        // SAFETY: `row_sums(x, sums, wide_sums, width)`, a block for each row; one of the outputs is not null.
        unsafe { kernel("row_sums")?.launch(rows as u32, THREADS, 0, args) }
    } else {
        let args = args.size(rows).size(width);
        // SAFETY: `column_sums(x, sums, wide_sums, rows, width)`, a block for each 32 columns; as before.
        unsafe { kernel("column_sums")?.launch(width.div_ceil(32) as u32, THREADS, 0, args) }
    }
}

//! What follows a product, by kernels of ours, where cuBLASLt cannot do it on the way out.

use super::{GpuMatmul, MatmulEpilogue, SOURCE};
use crate::cuda::{Args, Build, Cuda};
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
    }
}

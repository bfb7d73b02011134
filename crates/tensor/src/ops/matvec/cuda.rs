//! A row times a matrix on a GPU.

use super::{InputNorm, MatvecEpilogue};
use crate::cuda::{Args, Build, Cuda, Kernel, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::ops::activation::cuda::{FORMULAS, number};
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[
        KernelInclude::LANES,
        KernelInclude::COPIES,
        KernelInclude::CLUSTER,
        FORMULAS,
        AROUND,
        BY_INPUTS,
    ],
    ..lanes::source("matvec.cu", include_str!("../matvec.cu"), Build::FLOATS)
};

const AROUND: KernelInclude = KernelInclude { name: "around.cuh", text: include_str!("around.cuh") };
const BY_INPUTS: KernelInclude = KernelInclude { name: "by_inputs.cuh", text: include_str!("by_inputs.cuh") };

/// Threads that stand beside each other over a row of a matrix that is stored by inputs.
const ACROSS: usize = 8;
/// The most blocks that add their sums up.
const CLUSTER: usize = 8;
/// A matrix is cut into as many blocks as it can be up to this: two for each processor of a large GPU, which
/// leaves room for those of the next product to begin.
const BLOCKS: usize = 264;
/// Rows of a chunk, where blocks cannot read each other's memory: few, so that even a small matrix fills a
/// GPU. A thread of a block (32, 8) reads four of them, all under way at once.
const CHUNK: usize = 32;

/// Whether the norm of x can be fused into the product's kernel.
pub(super) fn takes_norm(cuda: &Cuda, norm: &InputNorm<'_>, x: &Tensor, w: Operand<'_>) -> bool {
    let like_x = |weight: &Tensor| weight.dtype() == x.dtype();
    !w.transposed && cuda.overlaps_kernels() && like_x(norm.scale) && norm.shift.is_none_or(like_x)
}

pub(super) fn matvec(
    cuda: &Cuda,
    x: &Tensor,
    norm: Option<InputNorm<'_>>,
    w: Operand<'_>,
    after: MatvecEpilogue<'_>,
    y: &mut Tensor,
) -> Result<()> {
    let (k, n) = w.extents();
    if w.transposed {
        let args = after_as_argument(Args::new().input(x).input(w.tensor).output(y).size(k).size(n), after);
        // SAFETY: x is [k], w [n, k], what is added and y [n], of one type; each row has a warp, which waits
        // before it reads x.
        return unsafe {
            kernel(cuda, x, "matvec_by_outputs")?.launch_early(lanes::blocks(n, 8), (32, 8), 1, args)
        };
    }
    match cuda.overlaps_kernels() {
        true => by_inputs(cuda, x, norm, w.tensor, after, y),
        false => by_chunks(cuda, x, w.tensor, after, y),
    }
}

/// w: [k, n], its rows over the blocks of a cluster.
fn by_inputs(
    cuda: &Cuda,
    x: &Tensor,
    norm: Option<InputNorm<'_>>,
    w: &Tensor,
    after: MatvecEpilogue<'_>,
    y: &mut Tensor,
) -> Result<()> {
    let (k, n) = (w.rows(), w.width());
    let strips = n.div_ceil(ACROSS * lanes::width(n, x.dtype()));
    let cluster = cluster(strips);
    let chunk = k.div_ceil(cluster);
    let args = norm_as_argument(Args::new().input(x), norm);
    let args = after_as_argument(args.input(w).output(y).size(k).size(n).size(chunk), after);
    let kernel = kernel(cuda, x, "matvec_by_inputs")?;
    // SAFETY: x and the norm's weights are [k], w [k, n], what is added and y [n], of one type; every column
    // and every row have a block, which waits before it reads x.
    unsafe { kernel.launch_early((strips as u32, cluster as u32), 256, cluster as u32, args) }
}

/// Over how many blocks the rows of so many strips of columns are cut.
fn cluster(strips: usize) -> usize {
    let mut cluster = CLUSTER;
    while cluster > 1 && strips * cluster > BLOCKS {
        cluster /= 2;
    }
    cluster
}

/// The same in two kernels, on any GPU.
fn by_chunks(cuda: &Cuda, x: &Tensor, w: &Tensor, after: MatvecEpilogue<'_>, y: &mut Tensor) -> Result<()> {
    let (k, n) = (w.rows(), w.width());
    let chunks = k.div_ceil(CHUNK);
    let mut partial = Tensor::empty(&x.device(), &[chunks, n], DType::F32, Category::Workspace)?;
    let grid = (lanes::blocks(n, 32 * lanes::width(n, x.dtype())), chunks as u32);
    let args = Args::new().input(x).input(w).output(&mut partial).size(k).size(n).size(CHUNK);
    // SAFETY: x is [k], w [k, n], and each chunk has its row of n numbers in `partial`.
    unsafe { kernel(cuda, x, "matvec_pieces")?.launch(grid, (32, 8), 0, args)? };
    let args = after_as_argument(Args::new().input(&partial).output(y).size(chunks).size(n), after);
    // SAFETY: `partial` is [chunks, n]; what is added and y are [n], of x's type.
    unsafe { kernel(cuda, x, "matvec_total")?.launch(lanes::blocks(n, 32), (32, 8), 0, args) }
}

fn kernel(cuda: &Cuda, x: &Tensor, name: &'static str) -> Result<Kernel> {
    cuda.kernel(&SOURCE, Build::of(x.dtype()), name)
}

/// The kernels' struct `Before`.
fn norm_as_argument<'a>(args: Args<'a>, norm: Option<InputNorm<'a>>) -> Args<'a> {
    let Some(InputNorm { centred, scale, shift, eps }) = norm else { return args.words(&[0; 3]) };
    let numbers = u64::from(eps.to_bits()) | u64::from(centred) << 32;
    args.words(&[address(Some(scale)), address(shift), numbers])
}

/// The kernels' struct `After`.
fn after_as_argument<'a>(args: Args<'a>, after: MatvecEpilogue<'a>) -> Args<'a> {
    let kind = after.activation.map_or(-1, |kind| i64::from(number(kind)));
    args.words(&[address(after.bias), address(after.plus), kind as u64])
}

fn address(tensor: Option<&Tensor>) -> u64 {
    tensor.map_or(0, |tensor| tensor.cuda_buffer().address())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::testing::{assert_close, devices, tensor, values, wide};

    #[test]
    fn small_matrices_are_cut_over_more_blocks() {
        assert_eq!([1, 32, 49, 50, 96, 99, 128, 198, 199, 5000].map(cluster), [8, 8, 4, 4, 2, 2, 2, 1, 1, 1]);
    }

    /// What serves older GPUs, on one that has better.
    #[test]
    fn both_kernels_of_a_matrix_by_inputs_agree() {
        for [device, ..] in devices() {
            let Device::Cuda(cuda) = device else { continue };
            let (k, n) = (2500, 777);
            let (x, w) = (values(1, k, 1.0), values(2, k * n, 1.0));
            let (x, w) = (tensor(device, DType::F32, &[1, k], &x), tensor(device, DType::F32, &[k, n], &w));
            let make = |run: &dyn Fn(&mut Tensor) -> Result<()>| {
                let mut y = Tensor::empty(device, &[1, n], DType::F32, Category::Transient).unwrap();
                run(&mut y).unwrap();
                y.to_f32()
            };
            let chunks = make(&|y| by_chunks(cuda, &x, &w, MatvecEpilogue::default(), y));
            if cuda.overlaps_kernels() {
                let clusters = make(&|y| by_inputs(cuda, &x, None, &w, MatvecEpilogue::default(), y));
                assert_close(&clusters, &wide(&chunks), 1e-4);
            }
        }
    }
}

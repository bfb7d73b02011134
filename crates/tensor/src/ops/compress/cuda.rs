//! Compressing and expanding on a GPU.

use crate::cuda::stream::Stream;
use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::Result;
use crate::mask::{Mask, MaskStorage};
use crate::ops::lanes::{self, THREADS, TILE};
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::KEPT],
    ..lanes::source("compress.cu", include_str!("../compress.cu"), Build::FLOATS)
};

/// A file of its own, so that a profile says what expanding takes.
pub(crate) static EXPAND: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::KEPT],
    ..lanes::source("expand.cu", include_str!("../expand.cu"), Build::FLOATS)
};

/// Elements of one size are moved by one kernel.
fn build(dtype: DType) -> Build {
    match dtype {
        DType::F32 | DType::U32 => Build::F32,
        DType::Bf16 | DType::U16 => Build::BF16,
        DType::U8 => panic!("bytes under a mask"),
    }
}

/// A mask as the kernels' struct lies in memory, in 8-byte words.
pub(crate) fn words(mask: &Mask) -> [u64; 5] {
    let address = |tensor: &Tensor| tensor.cuda_buffer().address();
    let [words, ranks, indices] = match mask.form() {
        MaskStorage::Bits { words, ranks } => [address(words), address(ranks), 0],
        MaskStorage::Indices(indices) => [0, 0, address(indices)],
    };
    [words, ranks, indices, mask.len() as u64, mask.kept() as u64]
}

/// How many blocks walk over a mask.
pub(crate) fn blocks(mask: &Mask) -> u32 {
    match mask.form() {
        MaskStorage::Bits { .. } => lanes::blocks(mask.len(), TILE),
        MaskStorage::Indices(_) => lanes::blocks(mask.kept(), TILE),
    }
}

fn mask_argument(mask: &Mask) -> Args<'_> {
    let halves: Vec<u32> = words(mask).iter().flat_map(|word| [*word as u32, (word >> 32) as u32]).collect();
    Args::new().fields(&halves)
}

pub(super) fn compress(cuda: &Cuda, dense: &Tensor, mask: &Mask, kept: &mut Tensor) -> Result<()> {
    let name = match mask.form() {
        MaskStorage::Bits { .. } => "compress_bits",
        MaskStorage::Indices(_) => "compress_places",
    };
    let kernel = cuda.kernel(&SOURCE, build(dense.dtype()), name)?;
    let args = mask_argument(mask).input(dense).output(kept);
    // SAFETY: the caller has compared the lengths with the mask's, and made `kept` of the type of `dense`.
    unsafe { kernel.launch(blocks(mask), THREADS, 0, args) }
}

pub(super) fn compress_add(cuda: &Cuda, dense: &Tensor, mask: &Mask, kept: &mut Tensor) -> Result<()> {
    let [f32, bf16] = match mask.form() {
        MaskStorage::Bits { .. } => ["compress_bits_add_f32", "compress_bits_add_bf16"],
        MaskStorage::Indices(_) => ["compress_places_add_f32", "compress_places_add_bf16"],
    };
    let name = kept.dtype().by_float(f32, bf16);
    let kernel = cuda.kernel(&SOURCE, Build::of(dense.dtype()), name)?;
    let args = mask_argument(mask).input(dense).output(kept);
    // SAFETY: the caller has compared the lengths with the mask's; the kernel is for these two types.
    unsafe { kernel.launch(blocks(mask), THREADS, 0, args) }
}

/// Puts whatever the compute stream is given next behind what was expanded, also a kernel that begins early
/// and reads weights before it waits for the work before it
/// ([`Kernel::launch_early`](crate::cuda::Kernel::launch_early)).
pub(super) fn fence(cuda: &Cuda) -> Result<()> {
    let kernel = cuda.kernel(&EXPAND, Build::F32, "expand_fence")?;
    // SAFETY: it takes nothing and does nothing.
    unsafe { kernel.launch(1, 32, 0, Args::new()) }
}

/// Expands on a stream, which the caller has put in order with the others that use the tensors.
pub(super) fn expand(
    cuda: &Cuda,
    stream: &Stream,
    kept: &Tensor,
    mask: &Mask,
    dense: &mut Tensor,
) -> Result<()> {
    let name = match mask.form() {
        MaskStorage::Bits { .. } => "expand_bits",
        MaskStorage::Indices(_) => {
            dense.cuda_buffer_mut().fill_on(stream, 0)?;
            "expand_places"
        }
    };
    let kernel = cuda.kernel(&EXPAND, build(kept.dtype()), name)?;
    let args = mask_argument(mask).input(kept).output(dense);
    // SAFETY: the caller has compared the lengths with the mask's; both have one type.
    unsafe { kernel.launch_on(stream, blocks(mask), THREADS, 0, args) }
}

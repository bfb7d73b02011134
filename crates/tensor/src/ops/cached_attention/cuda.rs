//! Attention with a cache on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelInclude, KernelSource};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::ops::attention::AttentionDims;
use crate::ops::lanes;
use crate::ops::position::Position;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource = KernelSource {
    includes: &[KernelInclude::LANES, KernelInclude::COPIES, KernelInclude::CLUSTER],
    ..lanes::source("cached_attention.cu", include_str!("../cached_attention.cu"), Build::FLOATS)
};

/// Blocks that share the keys of one head, where there is one position: few heads would leave most of a GPU idle.
const CLUSTER: u32 = 8;
/// The largest head that the kernel takes, as the attention of training does.
const MOST: usize = 256;

pub(super) fn append(
    cuda: &Cuda,
    qkv: &Tensor,
    cache: &mut Tensor,
    first: &Position,
    z: &AttentionDims,
) -> Result<()> {
    let (context, n) = (cache.shape()[2], z.t * 2 * z.kv_heads * z.d);
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "cached_attention_append")?;
    let args = Args::new().input(qkv).output(cache).size(n).input(first.on_gpu()).size(context);
    let args = args.i32(z.heads as i32).i32(z.kv_heads as i32).i32(z.d as i32);
    // SAFETY: a thread for each of the n keys' and values' elements of qkv [t, columns]; positions up to
    // first + t are in the cache [2, kv_heads, context, d], as was checked.
    unsafe { kernel.launch(lanes::blocks(n, 256), 256, 0, args) }
}

pub(super) fn forward(
    cuda: &Cuda,
    qkv: &Tensor,
    cache: &mut Tensor,
    first: &Position,
    z: &AttentionDims,
) -> Result<Tensor> {
    if z.d > MOST {
        let what = format!(
            "attention on a GPU takes heads of at most {MOST} columns, got {}: set device.kind = \"cpu\"",
            z.d
        );
        return Err(Error::Unsupported { what });
    }
    let mut y = Tensor::empty(&qkv.device(), &[1, z.t, z.c], qkv.dtype(), Category::Transient)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "cached_attention_forward")?;
    let context = cache.shape()[2];
    let args = Args::new().input(qkv).output(cache).output(&mut y).input(first.on_gpu()).size(context);
    let args = args
        .i32(z.heads as i32)
        .i32(z.kv_heads as i32)
        .i32(z.d as i32)
        .i32(threads_of_a_key(z.d, qkv.dtype()));
    let cluster = if z.t == 1 && cuda.overlaps_kernels() { CLUSTER } else { 1 };
    // SAFETY: a block for each head of each of the t positions of qkv and y, which waits before it reads;
    // keys and values of positions before `first` are in the cache, and there is room for t more, as was
    // checked.
    unsafe { kernel.launch_early((lanes::blocks(z.t * z.heads, 1), cluster), 256, cluster, args)? };
    Ok(y)
}

/// Threads that read one key: a pack each, as far as a warp goes.
fn threads_of_a_key(d: usize, dtype: DType) -> i32 {
    (d / lanes::width(d, dtype)).next_power_of_two().min(32) as i32
}

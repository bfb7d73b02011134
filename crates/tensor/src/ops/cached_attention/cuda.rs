//! Attention with a cache on a card.

use crate::cuda::{Args, Build, Cuda, Source};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::ops::attention::Sizes;
use crate::ops::lanes;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source =
    lanes::source("cached_attention.cu", include_str!("../cached_attention.cu"), Build::FLOATS);

/// The largest head that the kernel takes, as the attention of training does.
const MOST: usize = 256;

pub(super) fn append(cuda: &Cuda, qkv: &Tensor, cache: &mut Tensor, first: usize, z: &Sizes) -> Result<()> {
    let (context, n) = (cache.shape()[2], z.t * 2 * z.kv_heads * z.d);
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "cached_attention_append")?;
    let args = Args::new().input(qkv).output(cache).size(n).size(first).size(context);
    let args = args.i32(z.heads as i32).i32(z.kv_heads as i32).i32(z.d as i32);
    // SAFETY: a thread for each of the n keys' and values' elements of qkv [t, columns]; positions up to first + t are in
    // the cache [2, kv_heads, context, d], as was checked.
    unsafe { kernel.launch(lanes::blocks(n, 256), 256, 0, args) }
}

pub(super) fn forward(cuda: &Cuda, qkv: &Tensor, cache: &Tensor, first: usize, z: &Sizes) -> Result<Tensor> {
    if z.d > MOST {
        let what = format!(
            "attention on a card takes heads of at most {MOST} columns, got {}: set device.kind = \"cpu\"",
            z.d
        );
        return Err(Error::Unsupported { what });
    }
    let mut y = Tensor::empty(&qkv.device(), &[1, z.t, z.c], qkv.dtype(), Category::Transient)?;
    let kernel = cuda.kernel(&SOURCE, Build::of(qkv.dtype()), "cached_attention_forward")?;
    let args = Args::new().input(qkv).input(cache).output(&mut y).size(first).size(cache.shape()[2]);
    let args = args.i32(z.heads as i32).i32(z.kv_heads as i32).i32(z.d as i32);
    // SAFETY: a block for each head of each of the t positions of qkv and y; keys and values of positions before
    // first + t are in the cache, as was checked.
    unsafe { kernel.launch(lanes::blocks(z.t * z.heads, 1), 256, 0, args)? };
    Ok(y)
}

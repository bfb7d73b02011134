//! Attention with a cache on the host: one task has one position and one head of keys and values, with all
//! heads of queries that share it.

use crate::cpu::Cpu;
use crate::cpu::lanes::{max, sum, sum2};
use crate::cpu::math::exp;
use crate::cpu::scratch::{DisjointSlice, ScratchPool};
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::attention::AttentionDims;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

pub(super) fn append(qkv: &Tensor, cache: &mut Tensor, first: usize, z: &AttentionDims) {
    let context = cache.shape()[2];
    with_float!(qkv.dtype(), T => {
        let (qkv, cache) = (qkv.slice::<T>(), cache.slice_mut::<T>());
        for row in 0..z.t {
            // Keys and values of all heads stand side by side, in the order of the cache's first two dimensions.
            let new = &qkv[row * z.width() + z.c..(row + 1) * z.width()];
            for (head, new) in new.chunks_exact(z.d).enumerate() {
                cache[(head * context + first + row) * z.d..][..z.d].copy_from_slice(new);
            }
        }
    });
}

pub(super) fn forward(
    cpu: &Cpu,
    qkv: &Tensor,
    cache: &Tensor,
    first: usize,
    z: &AttentionDims,
) -> Result<Tensor> {
    let (device, context) = (qkv.device(), cache.shape()[2]);
    let mut y = Tensor::empty(&device, &[1, z.t, z.c], qkv.dtype(), Category::Transient)?;
    let (group, tasks) = (z.group(), z.t * z.kv_heads);
    let alloc = |len: usize| Tensor::empty(&device, &[len], DType::F32, Category::Workspace);
    let scratch = ScratchPool::new(cpu, tasks, || Ok((alloc(group * (first + z.t))?, alloc(group * z.d)?)))?;
    with_float!(qkv.dtype(), T => {
        let (qkv, cache) = (qkv.slice::<T>(), cache.slice::<T>());
        let y = DisjointSlice::new(y.slice_mut::<T>());
        cpu.for_each(tasks, |task| scratch.lend(|(scores, sums)| {
            let (row, head) = (task / z.kv_heads, task % z.kv_heads);
            let columns = head * group * z.d..(head + 1) * group * z.d;
            let query = &qkv[row * z.width()..][columns.clone()];
            let keys = first + row + 1;
            let kept = |kv: usize| &cache[(kv * z.kv_heads + head) * context * z.d..][..keys * z.d];
            // SAFETY: a task has the columns of its heads in its row to itself.
            let y = unsafe { y.range_mut(row * z.c + columns.start..row * z.c + columns.end) };
            let (scores, sums) = (scores.slice_mut::<f32>(), sums.slice_mut::<f32>());
            attend(cpu.isa(), query, kept(0), kept(1), z.d, z.scale, &mut scores[..group * keys], sums, y);
        }));
    });
    Ok(y)
}

simd! {
    /// y = softmax(query keys' scale) values, for each of the queries. query and y: [queries, d], keys and values:
    /// [keys, d], scores: [queries, keys], sums: [queries, d].
    fn attend[T: Float](
        query: &[T],
        keys: &[T],
        values: &[T],
        d: usize,
        scale: f32,
        scores: &mut [f32],
        sums: &mut [f32],
        y: &mut [T],
    ) {
        let count = keys.len() / d;
        for (j, key) in keys.chunks_exact(d).enumerate() {
            for (g, query) in query.chunks_exact(d).enumerate() {
                scores[g * count + j] = sum2(query, key, |q, k| q * k) * scale;
            }
        }
        sums.fill(0.0);
        for scores in scores.chunks_exact_mut(count) {
            let top = max(scores);
            scores.iter_mut().for_each(|s| *s = exp(*s - top));
            let total = sum(scores, |p| p);
            scores.iter_mut().for_each(|p| *p /= total);
        }
        for (j, value) in values.chunks_exact(d).enumerate() {
            for (g, sums) in sums.chunks_exact_mut(d).enumerate() {
                let p = scores[g * count + j];
                sums.iter_mut().zip(value).for_each(|(sum, v)| *sum += p * v.to_f32());
            }
        }
        y.iter_mut().zip(sums).for_each(|(y, sum)| *y = T::from_f32(*sum));
    }
}

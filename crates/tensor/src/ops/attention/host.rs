//! Attention on the host: one task owns one head of one sequence; backwards, one head of keys and values with
//! all heads of queries that share it, one after the other.
//!
//! Forward, a block of queries meets the keys block by block and keeps a running maximum and sum; backward, the
//! probabilities are formed again from the logsumexp. Queries before a block of keys are left out of its products.

use super::AttentionDims;
use super::scores::{KEYS, QUERIES, dot, gradients, scaled, softmax};
use crate::cpu::Cpu;
use crate::cpu::gemm::{GemmWorkspace, MatrixMut, MatrixRef, serial};
use crate::cpu::math::ln;
use crate::cpu::scratch::{DisjointSlice, ScratchPool};
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

pub(super) fn forward(
    cpu: &Cpu,
    qkv: &Tensor,
    positions: Option<&Tensor>,
    z: &AttentionDims,
) -> Result<(Tensor, Tensor)> {
    let starts = DocumentStarts::new(positions, z);
    let device = qkv.device();
    let mut y = Tensor::empty(&device, &[z.batch, z.t, z.c], qkv.dtype(), Category::Transient)?;
    let mut logsumexp = Tensor::empty(&device, &[z.batch, z.heads, z.t], DType::F32, Category::Transient)?;
    with_float!(qkv.dtype(), T => {
        let qkv = qkv.slice::<T>();
        let space = || AttentionScratch::new(&device, T::DTYPE, &[QUERIES * z.d, 2 * QUERIES], 1);
        let scratch = ScratchPool::new(cpu, z.tasks(), space)?;
        let packing = packing::<T>(cpu, z.tasks(), z);
        let y = DisjointSlice::new(y.slice_mut::<T>());
        let logsumexp = DisjointSlice::new(logsumexp.slice_mut::<f32>());
        cpu.for_each(z.tasks(), |task| scratch.lend(|space| {
            // SAFETY: a task has the rows of one head of one sequence to itself.
            let logsumexp = unsafe { logsumexp.range_mut(task * z.t..(task + 1) * z.t) };
            forward_head::<T>(cpu, &packing, z, z.head(qkv, task), starts.of(task, z), space, logsumexp, |row, values, factor| {
                let at = z.row(task, row);
                // SAFETY: as above: no other task has this head's columns in this row.
                let y = unsafe { y.range_mut(at..at + z.d) };
                scaled(cpu.isa(), values, factor, y);
            });
        }));
    });
    Ok((y, logsumexp))
}

pub(super) fn backward(
    cpu: &Cpu,
    dy: &Tensor,
    qkv: &Tensor,
    y: &Tensor,
    logsumexp: &Tensor,
    positions: Option<&Tensor>,
    z: &AttentionDims,
) -> Result<Tensor> {
    let device = qkv.device();
    let starts = DocumentStarts::new(positions, z);
    let mut dqkv = qkv.empty_like(Category::Transient)?;
    with_float!(qkv.dtype(), T => {
        let (qkv, dy, y) = (qkv.slice::<T>(), dy.slice::<T>(), y.slice::<T>());
        let logsumexp = logsumexp.slice::<f32>();
        let space = || AttentionScratch::new(&device, T::DTYPE, &[3 * z.t * z.d, z.t], 2);
        let tasks = z.batch * z.kv_heads;
        let scratch = ScratchPool::new(cpu, tasks, space)?;
        let packing = packing::<T>(cpu, tasks, z);
        let dqkv = DisjointSlice::new(dqkv.slice_mut::<T>());
        let write = |sums: &[f32], task: usize, which: usize| {
            for (row, sum) in sums[which * z.t * z.d..(which + 1) * z.t * z.d].chunks_exact(z.d).enumerate() {
                let at = z.qkv_rows(task, row)[which];
                // SAFETY: a task has its heads of one sequence, their columns in every row, to itself.
                let dqkv = unsafe { dqkv.range_mut(at..at + z.d) };
                scaled(cpu.isa(), sum, 1.0, dqkv);
            }
        };
        cpu.for_each(tasks, |task| scratch.lend(|space| {
            let heads = task * z.group()..(task + 1) * z.group();
            for query in heads.clone() {
                let head = z.head(qkv, query);
                let at = z.row(query, 0);
                let logsumexp = &logsumexp[query * z.t..(query + 1) * z.t];
                // What is summed over the group starts with its first head.
                let fresh = if query == heads.start { 3 } else { 1 };
                space.sums[0].slice_mut::<f32>()[..fresh * z.t * z.d].fill(0.0);
                let starts = starts.of(query, z);
                backward_head::<T>(cpu, &packing, z, head, &dy[at..], &y[at..], logsumexp, starts, space);
                write(space.sums[0].slice::<f32>(), query, 0);
            }
            [1, 2].into_iter().for_each(|which| write(space.sums[0].slice::<f32>(), heads.start, which));
        }));
    });
    Ok(dqkv)
}

/// Where the document of each token begins in its sequence; empty where a sequence is one document.
struct DocumentStarts(Vec<u32>);

impl DocumentStarts {
    fn new(positions: Option<&Tensor>, z: &AttentionDims) -> DocumentStarts {
        let start = |(i, position): (usize, &u32)| ((i % z.t) as u32).saturating_sub(*position);
        DocumentStarts(
            positions
                .map(|positions| positions.slice::<u32>().iter().enumerate().map(start).collect())
                .unwrap_or_default(),
        )
    }

    /// Those of the sequence of a task.
    fn of(&self, task: usize, z: &AttentionDims) -> &[u32] {
        if self.0.is_empty() { &[] } else { &self.0[task / z.heads * z.t..][..z.t] }
    }
}

/// A task's scratch space: running sums, blocks of scores in f32, blocks of probabilities in the tensor's type.
#[derive(Debug)]
struct AttentionScratch {
    sums: Vec<Tensor>,
    scores: Vec<Tensor>,
    probabilities: Vec<Tensor>,
}

impl AttentionScratch {
    fn new(device: &Device, dtype: DType, sums: &[usize], blocks: usize) -> Result<AttentionScratch> {
        let empty = |len: usize, dtype| Tensor::empty(device, &[len], dtype, Category::Workspace);
        let block = |dtype| (0..blocks).map(|_| empty(QUERIES * KEYS, dtype)).collect::<Result<Vec<_>>>();
        Ok(AttentionScratch {
            sums: sums.iter().map(|&len| empty(len, DType::F32)).collect::<Result<Vec<_>>>()?,
            scores: block(DType::F32)?,
            probabilities: block(dtype)?,
        })
    }
}

/// Leave for the products of one head.
fn packing<T: Float>(cpu: &Cpu, tasks: usize, z: &AttentionDims) -> GemmWorkspace {
    let (queries, keys) = (QUERIES.min(z.t), KEYS.min(z.t));
    let products = [(queries, keys, z.d), (queries, z.d, keys), (keys, z.d, queries)];
    GemmWorkspace::new::<T>(cpu, tasks, &products)
}

/// Rows that start `first` rows into a strided slice.
fn rows<T>(data: &[T], stride: usize, first: usize) -> MatrixRef<'_, T> {
    MatrixRef { data: &data[first * stride..], row_stride: stride, col_stride: 1 }
}

/// The same for writing.
fn rows_mut<T>(data: &mut [T], stride: usize, first: usize) -> MatrixMut<'_, T> {
    MatrixMut { data: &mut data[first * stride..], row_stride: stride }
}

/// The transpose.
fn transposed<T>(m: MatrixRef<'_, T>) -> MatrixRef<'_, T> {
    MatrixRef { data: m.data, row_stride: m.col_stride, col_stride: m.row_stride }
}

fn forward_head<T: Float>(
    cpu: &Cpu,
    packing: &GemmWorkspace,
    z: &AttentionDims,
    [q, k, v]: [&[T]; 3],
    starts: &[u32],
    space: &mut AttentionScratch,
    logsumexp: &mut [f32],
    write: impl Fn(usize, &[f32], f32),
) {
    let (isa, stride, d) = (cpu.isa(), z.width(), z.d);
    let [sums, running] = &mut space.sums[..] else { unreachable!("two sums forward") };
    let (out, running) = (sums.slice_mut::<f32>(), running.slice_mut::<f32>());
    let (maxima, totals) = running.split_at_mut(QUERIES);
    let scores = space.scores[0].slice_mut::<f32>();
    let p = space.probabilities[0].slice_mut::<T>();
    for i in (0..z.t).step_by(QUERIES) {
        let m = QUERIES.min(z.t - i);
        maxima.fill(f32::NEG_INFINITY);
        totals.fill(0.0);
        out.fill(0.0);
        // Documents follow each other: no query of the block sees a key before those of its first.
        let first = starts.get(i).map_or(0, |start| *start as usize / KEYS * KEYS);
        for j in (first..i + m).step_by(KEYS) {
            // The first query of the block that sees any of these keys.
            let skip = j.saturating_sub(i);
            let (m, n) = (m - skip, KEYS.min(i + m - j));
            let (q, k, v) = (rows(q, stride, i + skip), rows(k, stride, j), rows(v, stride, j));
            serial(packing, [m, n, d], q, transposed(k), rows_mut(scores, KEYS, 0), false);
            let running = [&mut maxima[skip..skip + m], &mut totals[skip..skip + m]];
            let starts = if starts.is_empty() { starts } else { &starts[i + skip..] };
            softmax(isa, scores, p, i + skip - j, n, starts, j, z.scale, running, &mut out[skip * d..], d);
            serial(packing, [m, d, n], rows(p, KEYS, 0), v, rows_mut(out, d, skip), true);
        }
        for r in 0..m {
            write(i + r, &out[r * d..(r + 1) * d], 1.0 / totals[r]);
            logsumexp[i + r] = (f64::from(maxima[r]) + ln(f64::from(totals[r]))) as f32;
        }
    }
}

/// Adds dq, dk and dv to `space.sums[0]`: [3, t, d].
fn backward_head<T: Float>(
    cpu: &Cpu,
    packing: &GemmWorkspace,
    z: &AttentionDims,
    [q, k, v]: [&[T]; 3],
    dy: &[T],
    y: &[T],
    logsumexp: &[f32],
    starts: &[u32],
    space: &mut AttentionScratch,
) {
    let (isa, stride, d) = (cpu.isa(), z.width(), z.d);
    let [sums, inner] = &mut space.sums[..] else { unreachable!("two sums backward") };
    let (sums, inner) = (sums.slice_mut::<f32>(), inner.slice_mut::<f32>());
    let [s, dp] = &mut space.scores[..] else { unreachable!("two blocks of scores backward") };
    let (s, dp) = (s.slice_mut::<f32>(), dp.slice_mut::<f32>());
    let [p, ds] = &mut space.probabilities[..] else { unreachable!("two blocks of probabilities backward") };
    let (p, ds) = (p.slice_mut::<T>(), ds.slice_mut::<T>());
    let (dq, dkv) = sums.split_at_mut(z.t * d);
    let (dk, dv) = dkv.split_at_mut(z.t * d);
    for (r, inner) in inner.iter_mut().enumerate() {
        *inner = dot(isa, &dy[r * z.c..][..d], &y[r * z.c..][..d]);
    }
    for j in (0..z.t).step_by(KEYS) {
        let n = KEYS.min(z.t - j);
        for i in (j..z.t).step_by(QUERIES) {
            if starts.get(i).is_some_and(|start| *start as usize >= j + n) {
                break; // this query and all behind it are of later documents
            }
            let m = QUERIES.min(z.t - i);
            let (q, dy) = (rows(q, stride, i), rows(dy, z.c, i));
            let (k, v) = (rows(k, stride, j), rows(v, stride, j));
            serial(packing, [m, n, d], q, transposed(k), rows_mut(s, KEYS, 0), false);
            serial(packing, [m, n, d], dy, transposed(v), rows_mut(dp, KEYS, 0), false);
            let (logsumexp, inner) = (&logsumexp[i..i + m], &inner[i..i + m]);
            let starts = if starts.is_empty() { starts } else { &starts[i..] };
            gradients(isa, s, dp, p, ds, i - j, n, starts, j, z.scale, logsumexp, inner);
            serial(packing, [n, d, m], transposed(rows(p, KEYS, 0)), dy, rows_mut(dv, d, j), true);
            serial(packing, [n, d, m], transposed(rows(ds, KEYS, 0)), q, rows_mut(dk, d, j), true);
            serial(packing, [m, d, n], rows(ds, KEYS, 0), k, rows_mut(dq, d, i), true);
        }
    }
}

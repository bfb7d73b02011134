//! Causal multi-head attention that never holds a sequence x sequence matrix (Dao et al. 2022).
//!
//! ```text
//! s = q k' / sqrt(d) where key <= query,   p = softmax(s),   y = p v
//! dv = p' dy,   dp = dy v',   ds = p (dp - rowsum(dy y)) / sqrt(d),   dq = ds k,   dk = ds' q
//! ```
//! qkv: [batch, seq, 3 c], queries, keys and values side by side, each [heads, d] within c = heads d;
//! y: [batch, seq, c]; logsumexp of the scores of each query: f32 [batch, heads, seq].
//!
//! One task owns one head of one sequence. Forward, a block of queries meets the keys block by block and
//! keeps a running maximum and sum; backward, the probabilities are formed again from the logsumexp. Queries
//! before a block of keys are left out of its products. Probabilities enter products in the tensor's own type,
//! sums are f32.

pub(crate) mod cuda;

use crate::cpu::Cpu;
use crate::cpu::gemm::{Matrix, MatrixMut, serial};
use crate::cpu::math::exp;
use crate::cpu::scratch::{Disjoint, Scratch};
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// Queries in a block: many, because each product packs its keys anew.
const QUERIES: usize = 256;
/// Keys in a block: few, because half of the block on the diagonal is not needed. Divides `QUERIES`.
const KEYS: usize = 64;

/// The attention's output and the logsumexp that [`backward`] needs.
pub fn forward(qkv: &Tensor, heads: usize) -> Result<(Tensor, Tensor)> {
    let z = Sizes::new(qkv, heads);
    let device = qkv.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => return cuda::forward(card, qkv, &z),
    };
    let mut y = Tensor::empty(&device, &[z.batch, z.t, z.c], qkv.dtype(), Category::Activations)?;
    let mut logsumexp = Tensor::empty(&device, &[z.batch, heads, z.t], DType::F32, Category::Activations)?;
    with_float!(qkv.dtype(), T => {
        let qkv = qkv.slice::<T>();
        let space = || Space::new(&device, T::DTYPE, &[QUERIES * z.d, 2 * QUERIES], 1);
        let scratch = Scratch::new(cpu, z.tasks(), space)?;
        let y = Disjoint::new(y.slice_mut::<T>());
        let logsumexp = Disjoint::new(logsumexp.slice_mut::<f32>());
        cpu.for_each(z.tasks(), |task| scratch.lend(|space| {
            // SAFETY: a task has the rows of one head of one sequence to itself.
            let logsumexp = unsafe { logsumexp.piece(task * z.t..(task + 1) * z.t) };
            forward_head::<T>(cpu, &z, z.head(qkv, task), space, logsumexp, |row, values, factor| {
                let at = z.row(task, row);
                // SAFETY: as above: no other task has this head's columns in this row.
                let y = unsafe { y.piece(at..at + z.d) };
                scaled(cpu.isa(), values, factor, y);
            });
        }));
    });
    Ok((y, logsumexp))
}

/// The gradient of `qkv`, from what [`forward`] took and gave.
pub fn backward(dy: &Tensor, qkv: &Tensor, y: &Tensor, logsumexp: &Tensor, heads: usize) -> Result<Tensor> {
    let z = Sizes::new(qkv, heads);
    assert_eq!(dy.shape(), [z.batch, z.t, z.c], "the gradient of attention's output");
    assert_eq!(y.shape(), dy.shape(), "attention's output");
    assert_eq!(logsumexp.shape(), [z.batch, heads, z.t], "attention's logsumexp");
    assert!(dy.dtype() == qkv.dtype() && y.dtype() == qkv.dtype(), "attention's tensors have one type");
    let device = qkv.device();
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(card) => return cuda::backward(card, dy, qkv, y, logsumexp, &z),
    };
    let mut dqkv = qkv.empty_like(Category::Activations)?;
    with_float!(qkv.dtype(), T => {
        let (qkv, dy, y) = (qkv.slice::<T>(), dy.slice::<T>(), y.slice::<T>());
        let logsumexp = logsumexp.slice::<f32>();
        let space = || Space::new(&device, T::DTYPE, &[3 * z.t * z.d, z.t], 2);
        let scratch = Scratch::new(cpu, z.tasks(), space)?;
        let dqkv = Disjoint::new(dqkv.slice_mut::<T>());
        cpu.for_each(z.tasks(), |task| scratch.lend(|space| {
            let head = z.head(qkv, task);
            let at = z.row(task, 0);
            let logsumexp = &logsumexp[task * z.t..(task + 1) * z.t];
            backward_head::<T>(cpu, &z, head, &dy[at..], &y[at..], logsumexp, space);
            let sums = space.sums[0].slice::<f32>();
            for part in 0..3 {
                for (row, sum) in sums[part * z.t * z.d..(part + 1) * z.t * z.d].chunks_exact(z.d).enumerate() {
                    let at = z.qkv_row(task, row) + part * z.c;
                    // SAFETY: a task has one head of one sequence, its columns in every row, to itself.
                    let dqkv = unsafe { dqkv.piece(at..at + z.d) };
                    scaled(cpu.isa(), sum, 1.0, dqkv);
                }
            }
        }));
    });
    Ok(dqkv)
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    t: usize,
    c: usize,
    heads: usize,
    d: usize,
    scale: f32,
}

impl Sizes {
    fn new(qkv: &Tensor, heads: usize) -> Sizes {
        let &[batch, t, width] = qkv.shape() else {
            panic!("qkv is [batch, seq, 3 c], got {:?}", qkv.shape())
        };
        assert!(heads > 0 && width % (3 * heads) == 0, "{width} columns are not 3 x {heads} heads");
        let d = width / 3 / heads;
        Sizes { batch, t, c: width / 3, heads, d, scale: 1.0 / (d as f32).sqrt() }
    }

    fn tasks(&self) -> usize {
        self.batch * self.heads
    }

    /// Where a task's columns begin in row `row` of its sequence, in a tensor [batch, seq, c].
    fn row(&self, task: usize, row: usize) -> usize {
        ((task / self.heads) * self.t + row) * self.c + task % self.heads * self.d
    }

    /// The same for the queries in [batch, seq, 3 c]; keys are c further on, values 2 c.
    fn qkv_row(&self, task: usize, row: usize) -> usize {
        ((task / self.heads) * self.t + row) * 3 * self.c + task % self.heads * self.d
    }

    /// The queries, keys and values of a task, rows 3 c apart.
    fn head<'a, T>(&self, qkv: &'a [T], task: usize) -> [&'a [T]; 3] {
        let at = self.qkv_row(task, 0);
        [&qkv[at..], &qkv[at + self.c..], &qkv[at + 2 * self.c..]]
    }
}

/// A task's scratch space: running sums, blocks of scores in f32, blocks of probabilities in the tensor's type.
#[derive(Debug)]
struct Space {
    sums: Vec<Tensor>,
    scores: Vec<Tensor>,
    probabilities: Vec<Tensor>,
}

impl Space {
    fn new(device: &Device, dtype: DType, sums: &[usize], blocks: usize) -> Result<Space> {
        let empty = |len: usize, dtype| Tensor::empty(device, &[len], dtype, Category::Workspace);
        let block = |dtype| (0..blocks).map(|_| empty(QUERIES * KEYS, dtype)).collect::<Result<Vec<_>>>();
        Ok(Space {
            sums: sums.iter().map(|&len| empty(len, DType::F32)).collect::<Result<Vec<_>>>()?,
            scores: block(DType::F32)?,
            probabilities: block(dtype)?,
        })
    }
}

/// Rows that start `first` rows into a strided slice.
fn rows<T>(data: &[T], stride: usize, first: usize) -> Matrix<'_, T> {
    Matrix { data: &data[first * stride..], row_stride: stride, col_stride: 1 }
}

/// The same for writing.
fn rows_mut<T>(data: &mut [T], stride: usize, first: usize) -> MatrixMut<'_, T> {
    MatrixMut { data: &mut data[first * stride..], row_stride: stride }
}

/// The transpose.
fn turned<T>(m: Matrix<'_, T>) -> Matrix<'_, T> {
    Matrix { data: m.data, row_stride: m.col_stride, col_stride: m.row_stride }
}

fn forward_head<T: Float>(
    cpu: &Cpu,
    z: &Sizes,
    [q, k, v]: [&[T]; 3],
    space: &mut Space,
    logsumexp: &mut [f32],
    write: impl Fn(usize, &[f32], f32),
) {
    let (isa, stride, d) = (cpu.isa(), 3 * z.c, z.d);
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
        for j in (0..i + m).step_by(KEYS) {
            // The first query of the block that sees any of these keys.
            let skip = j.saturating_sub(i);
            let (m, n) = (m - skip, KEYS.min(i + m - j));
            let (q, k, v) = (rows(q, stride, i + skip), rows(k, stride, j), rows(v, stride, j));
            serial(isa, m, n, d, q, turned(k), rows_mut(scores, KEYS, 0), false);
            let running = [&mut maxima[skip..skip + m], &mut totals[skip..skip + m]];
            softmax(isa, scores, p, i + skip - j, n, z.scale, running, &mut out[skip * d..], d);
            serial(isa, m, d, n, rows(p, KEYS, 0), v, rows_mut(out, d, skip), true);
        }
        for r in 0..m {
            write(i + r, &out[r * d..(r + 1) * d], 1.0 / totals[r]);
            logsumexp[i + r] = maxima[r] + totals[r].ln();
        }
    }
}

/// Leaves dq, dk and dv in `space.sums[0]`: [3, t, d].
fn backward_head<T: Float>(
    cpu: &Cpu,
    z: &Sizes,
    [q, k, v]: [&[T]; 3],
    dy: &[T],
    y: &[T],
    logsumexp: &[f32],
    space: &mut Space,
) {
    let (isa, stride, d) = (cpu.isa(), 3 * z.c, z.d);
    let [sums, inner] = &mut space.sums[..] else { unreachable!("two sums backward") };
    let (sums, inner) = (sums.slice_mut::<f32>(), inner.slice_mut::<f32>());
    let [s, dp] = &mut space.scores[..] else { unreachable!("two blocks of scores backward") };
    let (s, dp) = (s.slice_mut::<f32>(), dp.slice_mut::<f32>());
    let [p, ds] = &mut space.probabilities[..] else { unreachable!("two blocks of probabilities backward") };
    let (p, ds) = (p.slice_mut::<T>(), ds.slice_mut::<T>());
    sums.fill(0.0);
    let (dq, dkv) = sums.split_at_mut(z.t * d);
    let (dk, dv) = dkv.split_at_mut(z.t * d);
    for (r, inner) in inner.iter_mut().enumerate() {
        *inner = dot(isa, &dy[r * z.c..][..d], &y[r * z.c..][..d]);
    }
    for j in (0..z.t).step_by(KEYS) {
        let n = KEYS.min(z.t - j);
        for i in (j..z.t).step_by(QUERIES) {
            let m = QUERIES.min(z.t - i);
            let (q, dy) = (rows(q, stride, i), rows(dy, z.c, i));
            let (k, v) = (rows(k, stride, j), rows(v, stride, j));
            serial(isa, m, n, d, q, turned(k), rows_mut(s, KEYS, 0), false);
            serial(isa, m, n, d, dy, turned(v), rows_mut(dp, KEYS, 0), false);
            let (logsumexp, inner) = (&logsumexp[i..i + m], &inner[i..i + m]);
            gradients(isa, s, dp, p, ds, i - j, n, z.scale, logsumexp, inner);
            serial(isa, n, d, m, turned(rows(p, KEYS, 0)), dy, rows_mut(dv, d, j), true);
            serial(isa, n, d, m, turned(rows(ds, KEYS, 0)), q, rows_mut(dk, d, j), true);
            serial(isa, m, d, n, rows(ds, KEYS, 0), k, rows_mut(dq, d, i), true);
        }
    }
}

/// Sums over this many lanes at once; the order of additions is the same for every instruction set.
const LANES: usize = 16;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = join(lanes[l], lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// How many keys of a block the query sees that is `r` rows below the first, which is `ahead` of the first key.
#[inline(always)]
fn seen(ahead: usize, r: usize, keys: usize) -> u32 {
    (ahead + r + 1).min(keys) as u32
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

simd! {
    /// y = x factor.
    fn scaled[T: Float](x: &[f32], factor: f32, y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(x * factor);
        }
    }

    /// sum of a b.
    fn dot[T: Float](a: &[T], b: &[T]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
        let rest = a16.remainder().iter().zip(b16.remainder());
        let rest: f32 = rest.map(|(a, b)| a.to_f32() * b.to_f32()).sum();
        for (a, b) in a16.zip(b16) {
            for l in 0..LANES {
                lanes[l] += a[l].to_f32() * b[l].to_f32();
            }
        }
        fold(lanes, |a, b| a + b) + rest
    }

    /// The weights e^(s - maximum) of a block of scores, and the running sums brought to the new maxima.
    ///
    /// Rows are `KEYS` apart and always worked on whole, so that the compiler knows their length; what lies past
    /// the keys that a query sees does not count.
    fn softmax[T: Float](
        scores: &mut [f32],
        p: &mut [T],
        ahead: usize,
        keys: usize,
        scale: f32,
        running: [&mut [f32]; 2],
        out: &mut [f32],
        d: usize,
    ) {
        let [maxima, totals] = running;
        let mut shrink = [0.0f32; QUERIES];
        let shrink = &mut shrink[..maxima.len()];
        for (r, (row, maximum)) in scores.chunks_exact_mut(KEYS).zip(&mut *maxima).enumerate() {
            let seen = seen(ahead, r, keys);
            for k in 0..KEYS {
                row[k] = if (k as u32) < seen { row[k] * scale } else { f32::NEG_INFINITY };
            }
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for row in row.chunks_exact(LANES) {
                for l in 0..LANES {
                    lanes[l] = larger(lanes[l], row[l]);
                }
            }
            let old = *maximum;
            *maximum = larger(old, fold(lanes, larger));
            shrink[r] = old - *maximum;
        }
        for (shrink, total) in shrink.iter_mut().zip(&mut *totals) {
            *shrink = exp(*shrink);
            *total *= *shrink;
        }
        let rows = scores.chunks_exact(KEYS).zip(p.chunks_exact_mut(KEYS));
        for (r, (row, p)) in rows.take(maxima.len()).enumerate() {
            let mut lanes = [0.0f32; LANES];
            for (row, p) in row.chunks_exact(LANES).zip(p.chunks_exact_mut(LANES)) {
                for l in 0..LANES {
                    let e = exp(row[l] - maxima[r]);
                    p[l] = T::from_f32(e);
                    lanes[l] += e;
                }
            }
            totals[r] += fold(lanes, |a, b| a + b);
            if shrink[r] != 1.0 {
                out[r * d..(r + 1) * d].iter_mut().for_each(|x| *x *= shrink[r]);
            }
        }
    }

    /// The probabilities of a block of scores and the gradients of these. Rows as in `softmax`.
    fn gradients[T: Float](
        scores: &[f32],
        dp: &[f32],
        p: &mut [T],
        ds: &mut [T],
        ahead: usize,
        keys: usize,
        scale: f32,
        logsumexp: &[f32],
        inner: &[f32],
    ) {
        let sources = scores.chunks_exact(KEYS).zip(dp.chunks_exact(KEYS));
        let results = p.chunks_exact_mut(KEYS).zip(ds.chunks_exact_mut(KEYS));
        for (r, ((s, dp), (p, ds))) in sources.zip(results).take(inner.len()).enumerate() {
            let seen = seen(ahead, r, keys);
            for k in 0..KEYS {
                let e = exp(s[k] * scale - logsumexp[r]);
                let visible = (k as u32) < seen;
                p[k] = T::from_f32(if visible { e } else { 0.0 });
                ds[k] = T::from_f32(if visible { e * (dp[k] - inner[r]) * scale } else { 0.0 });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{assert_close, check, devices, dot, gradient, tensor, values, wide};

    /// `(y, logsumexp)` with the whole matrix of scores.
    fn plain_forward(qkv: &[f64], z: &Sizes) -> (Vec<f64>, Vec<f64>) {
        let (mut y, mut logsumexp) = (vec![0.0; z.batch * z.t * z.c], vec![0.0; z.tasks() * z.t]);
        for task in 0..z.tasks() {
            for i in 0..z.t {
                let p = plain_scores(qkv, z, task, i);
                let total = p.iter().map(|s| s.exp()).sum::<f64>().ln();
                logsumexp[task * z.t + i] = total;
                for (j, s) in p.iter().enumerate() {
                    for l in 0..z.d {
                        y[z.row(task, i) + l] += (s - total).exp() * qkv[z.qkv_row(task, j) + 2 * z.c + l];
                    }
                }
            }
        }
        (y, logsumexp)
    }

    /// A query's scores of the keys it sees.
    fn plain_scores(qkv: &[f64], z: &Sizes, task: usize, i: usize) -> Vec<f64> {
        let at = |j: usize, part: usize| &qkv[z.qkv_row(task, j) + part * z.c..][..z.d];
        (0..=i).map(|j| dot(at(i, 0), at(j, 1)) / (z.d as f64).sqrt()).collect()
    }

    fn plain_backward(dy: &[f64], qkv: &[f64], z: &Sizes) -> Vec<f64> {
        let mut dqkv = vec![0.0; qkv.len()];
        for task in 0..z.tasks() {
            let at = |j: usize, part: usize| z.qkv_row(task, j) + part * z.c;
            for i in 0..z.t {
                let dy = &dy[z.row(task, i)..][..z.d];
                let scores = plain_scores(qkv, z, task, i);
                let total = scores.iter().map(|s| s.exp()).sum::<f64>();
                let p: Vec<f64> = scores.iter().map(|s| s.exp() / total).collect();
                let dp: Vec<f64> = (0..=i).map(|j| dot(dy, &qkv[at(j, 2)..][..z.d])).collect();
                let inner = dot(&p, &dp);
                for j in 0..=i {
                    let ds = p[j] * (dp[j] - inner) / (z.d as f64).sqrt();
                    for l in 0..z.d {
                        dqkv[at(i, 0) + l] += ds * qkv[at(j, 1) + l];
                        dqkv[at(j, 1) + l] += ds * qkv[at(i, 0) + l];
                        dqkv[at(j, 2) + l] += p[j] * dy[l];
                    }
                }
            }
        }
        dqkv
    }

    fn sizes(batch: usize, t: usize, heads: usize, d: usize) -> Sizes {
        Sizes { batch, t, c: heads * d, heads, d, scale: 1.0 / (d as f32).sqrt() }
    }

    /// Both passes against the plain loops, everywhere. The gradient in bf16 may be off by 2^-6 of its largest
    /// element: y, the probabilities and ds are rounded on the way to it.
    fn compare(z: &Sizes, seed: u64) {
        let shape = [z.batch, z.t, 3 * z.c];
        let qkv = values(seed, shape.iter().product(), 1.5);
        let dy = values(seed + 1, qkv.len() / 3, 1.0);
        let (y, logsumexp) = plain_forward(&wide(&qkv), z);
        let dqkv = plain_backward(&wide(&dy), &wide(&qkv), z);
        let run = |device: &Device, dtype| {
            let qkv = tensor(device, dtype, &shape, &qkv);
            let dy = tensor(device, dtype, &[z.batch, z.t, z.c], &dy);
            let (y, logsumexp) = forward(&qkv, z.heads).unwrap();
            let dqkv = backward(&dy, &qkv, &y, &logsumexp, z.heads).unwrap();
            [y, logsumexp, dqkv]
        };
        check(&[y, logsumexp], |device, dtype| run(device, dtype)[..2].to_vec());
        for (dtype, tolerance) in [(DType::F32, 5e-5), (DType::Bf16, 1.0 / 64.0)] {
            for threads in devices() {
                let [one, two, three] = threads.each_ref().map(|device| run(device, dtype)[2].clone());
                assert!(
                    one.host_bytes() == two.host_bytes() && one.host_bytes() == three.host_bytes(),
                    "bits on more threads"
                );
                assert_close(&one.to_f32(), &dqkv, tolerance);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn both_passes_agree_with_plain_loops(
            (batch, t, heads, d) in (1usize..4, 1usize..90, 1usize..4, 1usize..40),
            seed in 0u64..1000,
        ) {
            compare(&sizes(batch, t, heads, d), seed);
        }
    }

    #[test]
    fn sequences_longer_than_a_block_agree_with_plain_loops() {
        for (t, d) in [(KEYS + 1, 8), (QUERIES, 16), (2 * KEYS + QUERIES + 3, 64)] {
            compare(&sizes(1, t, 2, d), 3);
        }
    }

    /// A card has kernels of their own for the first five; 256 is the largest that it takes.
    #[test]
    fn usual_head_sizes_agree_with_plain_loops() {
        for d in [32, 64, 80, 96, 128, 160, 256] {
            compare(&sizes(2, 150, 2, d), 5);
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let device = Device::cpu(1).unwrap();
        let qkv = tensor(&device, DType::F32, &[1, 70, 24], &values(1, 70 * 24, 60.0));
        let (y, logsumexp) = forward(&qkv, 2).unwrap();
        let dqkv = backward(&y, &qkv, &y, &logsumexp, 2).unwrap();
        assert!(y.to_f32().iter().chain(&dqkv.to_f32()).all(|x| x.is_finite()));
    }

    #[test]
    fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
        let z = sizes(1, 4, 2, 3);
        let (qkv, dy) = (wide(&values(1, 72, 1.0)), wide(&values(2, 24, 1.0)));
        let dqkv: Vec<f32> = plain_backward(&dy, &qkv, &z).into_iter().map(|x| x as f32).collect();
        assert_close(&dqkv, &gradient(&qkv, |qkv| dot(&plain_forward(qkv, &z).0, &dy)), 1e-6);
    }
}

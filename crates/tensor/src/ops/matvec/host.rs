//! A row times a matrix on the host: stretches of the matrix over the threads, each read once from end to end.
//!
//! One stream of reads does not reach the memory's bandwidth: the processor fetches ahead only within a page
//! and only so much for each. So a task reads its stretch in [`STREAMS`] places at once, each of which goes
//! on without a gap, and asks for what it will need [`AHEAD`] bytes later. (On two cores of a Xeon: one
//! stream 20.7 GB/s, sixteen with such prefetches 33.9.)

use crate::cpu::Cpu;
use crate::cpu::lanes::sum2;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::simd;
use crate::tensor::Tensor;
use crate::with_float;

/// Bytes of a task's stretch: long enough for its streams to get under way, and short enough for many threads.
const STRETCH: usize = 1 << 19;
/// Places of a stretch that are read at once.
const STREAMS: usize = 8;
/// How many bytes ahead of a stream are asked for.
const AHEAD: usize = 1024;
/// Elements that are read of a stream before the next one.
const UNROLL: usize = 32;
/// Partial sums of one output that run beside each other.
const LANES: usize = 16;
/// The most tasks that leave partial sums of all outputs: each has to be added up.
const MOST_SUMMANDS: usize = 64;
/// Outputs of a task that adds them up.
const AT_ONCE: usize = 1024;

pub(super) fn matvec(
    cpu: &Cpu,
    x: &Tensor,
    w: Operand<'_>,
    bias: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let mut wide = None;
    if x.dtype() != DType::F32 {
        let mut copy = Tensor::empty(&x.device(), &[x.width()], DType::F32, Category::Workspace)?;
        with_float!(x.dtype(), T => widen(cpu.isa(), x.slice::<T>(), copy.slice_mut::<f32>()));
        wide = Some(copy);
    }
    let x = wide.as_ref().unwrap_or(x).slice::<f32>();
    with_float!(y.dtype(), T => {
        let bias = bias.map(|bias| bias.slice::<T>());
        match w.transposed {
            true => by_outputs::<T>(cpu, x, w.tensor.slice(), bias, y.slice_mut()),
            false => by_inputs::<T>(cpu, x, w.tensor, bias, y.slice_mut())?,
        }
    });
    Ok(())
}

/// Rows of so many elements that a task reads: whole streams, as far as the matrix has them.
fn task_rows<T>(length: usize, least: usize) -> usize {
    (STRETCH / (length * size_of::<T>())).max(least).max(1).next_multiple_of(STREAMS)
}

/// w: [n, k]. A task has complete rows, and so complete sums.
fn by_outputs<T: Float>(cpu: &Cpu, x: &[f32], w: &[T], bias: Option<&[T]>, y: &mut [T]) {
    let k = x.len();
    cpu.for_chunks(y, task_rows::<T>(k, 1), |at, y| {
        let w = &w[at.start * k..at.end * k];
        dots(cpu.isa(), x, w, bias.map(|bias| &bias[at.clone()]), y);
    });
}

/// w: [k, n]. A task has some rows, and a partial sum of every output.
fn by_inputs<T: Float>(cpu: &Cpu, x: &[f32], w: &Tensor, bias: Option<&[T]>, y: &mut [T]) -> Result<()> {
    let (k, n) = (x.len(), y.len());
    let rows = task_rows::<T>(n, k.div_ceil(MOST_SUMMANDS));
    let tasks = k.div_ceil(rows);
    let mut partial_sums = Tensor::empty(&w.device(), &[tasks, n], DType::F32, Category::Workspace)?;
    let w = w.slice::<T>();
    cpu.for_chunks(partial_sums.slice_mut::<f32>(), n, |at, sums| {
        let task = at.start / n;
        let rows = task * rows..k.min((task + 1) * rows);
        sums.fill(0.0);
        add_rows(cpu.isa(), &x[rows.clone()], &w[rows.start * n..rows.end * n], sums);
    });
    let partial_sums = partial_sums.slice::<f32>();
    cpu.for_chunks(y, AT_ONCE, |at, y| {
        add_up(cpu.isa(), partial_sums, n, at.start, bias.map(|bias| &bias[at.clone()]), y);
    });
    Ok(())
}

/// Prefetches what lies ahead of a block's elements. Only a hint: any address is allowed.
#[inline(always)]
fn fetch_ahead<T>(block: &[T; UNROLL]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<[T; UNROLL]>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().cast::<i8>().wrapping_add(AHEAD + line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = block;
}

/// sums + w x, lane by lane.
#[inline(always)]
fn with_products<T: Float>(sums: [f32; LANES], w: &[T; UNROLL], x: &[f32; UNROLL]) -> [f32; LANES] {
    fetch_ahead(w);
    let mut next = [0f32; LANES];
    for l in 0..LANES {
        next[l] = sums[l] + w[l].to_f32() * x[l] + w[LANES + l].to_f32() * x[LANES + l];
    }
    next
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            let upper = lanes[l + half];
            lanes[l] += upper;
        }
        half /= 2;
    }
    lanes[0]
}

/// Rows that lie as far apart as streams do, times x. Each sum has an array of its own: an array of arrays
/// would not stay in registers.
#[inline(always)]
fn abreast<T: Float>(x: &[f32], rows: [&[T]; STREAMS]) -> [f32; STREAMS] {
    let zero = [0f32; LANES];
    let (mut s0, mut s1, mut s2, mut s3) = (zero, zero, zero, zero);
    let (mut s4, mut s5, mut s6, mut s7) = (zero, zero, zero, zero);
    let (blocks, rest) = x.as_chunks::<UNROLL>();
    let [a, b, c, d, e, f, g, h] = rows.map(|row| &row.as_chunks::<UNROLL>().0[..blocks.len()]);
    for (t, x) in blocks.iter().enumerate() {
        s0 = with_products(s0, &a[t], x);
        s1 = with_products(s1, &b[t], x);
        s2 = with_products(s2, &c[t], x);
        s3 = with_products(s3, &d[t], x);
        s4 = with_products(s4, &e[t], x);
        s5 = with_products(s5, &f[t], x);
        s6 = with_products(s6, &g[t], x);
        s7 = with_products(s7, &h[t], x);
    }
    let behind = x.len() - rest.len();
    let sums = [s0, s1, s2, s3, s4, s5, s6, s7].map(fold);
    std::array::from_fn(|s| sums[s] + sum2(&rows[s][behind..], rest, |w, x| w * x))
}

simd! {
    /// y = x as f32.
    fn widen[T: Float](x: &[T], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x.to_f32());
    }

    /// y = w x + bias; w: [y's length, x's length].
    fn dots[T: Float](x: &[f32], w: &[T], bias: Option<&[T]>, y: &mut [T]) {
        let k = x.len();
        let segment = y.len() / STREAMS;
        let mut write =
            |j: usize, sum: f32| y[j] = T::from_f32(sum + bias.map_or(0.0, |bias| bias[j].to_f32()));
        for i in 0..segment {
            let sums = abreast(x, std::array::from_fn(|s| &w[(s * segment + i) * k..][..k]));
            (0..STREAMS).for_each(|s| write(s * segment + i, sums[s]));
        }
        for j in STREAMS * segment..w.len() / k {
            write(j, sum2(&w[j * k..][..k], x, |w, x| w * x));
        }
    }

    /// sums += x w; w: [x's length, sums' length].
    fn add_rows[T: Float](x: &[f32], w: &[T], sums: &mut [f32]) {
        let n = sums.len();
        let segment = x.len() / STREAMS;
        for i in 0..segment {
            let rows: [&[T]; STREAMS] = std::array::from_fn(|s| &w[(s * segment + i) * n..][..n]);
            let factors: [f32; STREAMS] = std::array::from_fn(|s| x[s * segment + i]);
            let (blocks, rest) = sums.as_chunks_mut::<UNROLL>();
            let [a, b, c, d, e, f, g, h] = rows.map(|row| &row.as_chunks::<UNROLL>().0[..blocks.len()]);
            for (t, sums) in blocks.iter_mut().enumerate() {
                let all = [&a[t], &b[t], &c[t], &d[t], &e[t], &f[t], &g[t], &h[t]];
                all.into_iter().for_each(fetch_ahead);
                for l in 0..UNROLL {
                    let one = factors[0] * all[0][l].to_f32() + factors[1] * all[1][l].to_f32();
                    let two = factors[2] * all[2][l].to_f32() + factors[3] * all[3][l].to_f32();
                    let three = factors[4] * all[4][l].to_f32() + factors[5] * all[5][l].to_f32();
                    let four = factors[6] * all[6][l].to_f32() + factors[7] * all[7][l].to_f32();
                    sums[l] += (one + two) + (three + four);
                }
            }
            let behind = n - rest.len();
            for (row, factor) in rows.iter().zip(factors) {
                rest.iter_mut().zip(&row[behind..]).for_each(|(sum, w)| *sum += factor * w.to_f32());
            }
        }
        for p in STREAMS * segment..x.len() {
            sums.iter_mut().zip(&w[p * n..]).for_each(|(sum, w)| *sum += x[p] * w.to_f32());
        }
    }

    /// y = at most [`AT_ONCE`] columns of partial sums [.., n] from `first` on, added up, + bias.
    fn add_up[T: Float](partial_sums: &[f32], n: usize, first: usize, bias: Option<&[T]>, y: &mut [T]) {
        let mut sums = [0f32; AT_ONCE];
        let sums = &mut sums[..y.len()];
        for row in partial_sums.chunks_exact(n) {
            sums.iter_mut().zip(&row[first..]).for_each(|(sum, x)| *sum += x);
        }
        if let Some(bias) = bias {
            sums.iter_mut().zip(bias).for_each(|(sum, b)| *sum += b.to_f32());
        }
        y.iter_mut().zip(sums).for_each(|(y, sum)| *y = T::from_f32(*sum));
    }
}

//! A norm of each head of queries and keys by its root mean square, and the rotation behind it, in one pass
//! over queries, keys and values (Qwen 3).
//!
//! qkv: `[batch, seq, (heads + 2 kv_heads) d]` as [`attention`](super::attention) has it; scales: `[d]`, one for
//! all heads of queries and one for all of keys; values are copied. rstd: f32 [batch seq, heads + kv_heads].
//!
//! With h = x rstd of a head and R the rotation of its position (none without a table):
//!
//! - y = R (h scale)
//! - d = R' dy scale,   dx = rstd (d - h mean(d h)),   dscale = the sum over positions and heads of R' dy h

pub(crate) mod cuda;

use crate::cpu::lanes;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::attention::AttentionDims;
use crate::ops::chunks::{self, writable};
use crate::ops::position::Position;
use crate::ops::{cast, reduce, rotary};
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// What is done to queries and keys: the scales of both, what is added to mean squares, and the rotations of
/// positions.
#[derive(Debug, Clone, Copy)]
pub struct QkNormArgs<'a> {
    /// Of queries and of keys, `[d]` each.
    pub scales: [&'a Tensor; 2],
    /// Added to the mean square.
    pub eps: f32,
    /// See [`rotary::table`].
    pub table: Option<&'a Tensor>,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
}

impl QkNormArgs<'_> {
    fn dims(&self, qkv: &Tensor, first: Option<&Position>) -> AttentionDims {
        let z = AttentionDims::new(qkv, self.heads, self.kv_heads);
        for scale in self.scales {
            assert_eq!(scale.shape(), [z.d], "a scale for each column of a head");
        }
        assert!(z.d.is_multiple_of(2), "heads of {} columns have no pairs", z.d);
        if let Some(table) = self.table {
            rotary::check_table(table, &z, first);
        }
        z
    }

    /// The scale of each head that is normalised.
    fn scale_of<'s>(&self, head: usize, scales: &'s [Tensor; 2]) -> &'s [f32] {
        scales[usize::from(head >= self.heads)].slice::<f32>()
    }
}

/// (y, rstd). The first position is `first`, or the beginning.
pub fn forward(qkv: &Tensor, args: &QkNormArgs<'_>, first: Option<&Position>) -> Result<(Tensor, Tensor)> {
    let z = args.dims(qkv, first);
    let normalised = z.heads + z.kv_heads;
    let mut y = qkv.empty_like(Category::Transient)?;
    let mut rstd =
        Tensor::empty(&qkv.device(), &[z.batch * z.t, normalised], DType::F32, Category::Transient)?;
    match qkv.device() {
        Device::Cpu(cpu) => {
            let scales = [cast::widened(args.scales[0])?, cast::widened(args.scales[1])?];
            let table = args.table.map(|table| table.slice::<f32>());
            let (width, start) = (z.width(), first.map_or(0, Position::at));
            let chunk = chunks::rows(width);
            with_float!(qkv.dtype(), T => {
                let x = qkv.slice::<T>();
                let slices = y.slice_mut::<T>().chunks_mut(chunk * width);
                let slices = slices.zip(rstd.slice_mut::<f32>().chunks_mut(chunk * normalised)).enumerate();
                chunks::each(&cpu, slices, |(i, (y, rstd))| {
                    let rows = y.chunks_exact_mut(width).zip(rstd.chunks_exact_mut(normalised));
                    for (row, (y, rstd)) in (i * chunk..).zip(rows) {
                        let x = &x[row * width..][..width];
                        let angles = table.map(|table| &table[(start + row % z.t) * z.d..][..z.d]);
                        let heads = x.chunks_exact(z.d).zip(y.chunks_exact_mut(z.d)).enumerate();
                        for ((head, (x, y)), rstd) in heads.zip(rstd) {
                            let scale = args.scale_of(head, &scales);
                            *rstd = normalise(cpu.isa(), x, scale, args.eps, angles, y);
                        }
                        let values = normalised * z.d;
                        y[values..].copy_from_slice(&x[values..]);
                    }
                });
            });
        }
        Device::Cuda(cuda) => cuda::forward(&cuda, qkv, args, first, &z, &mut y, &mut rstd)?,
    }
    Ok((y, rstd))
}

/// The gradient of qkv, in the place of `dy` if nobody else holds it, and those of both scales as `dtype`, from
/// what [`forward`] took and gave for sequences from the beginning.
pub fn backward(
    dy: Tensor,
    qkv: &Tensor,
    rstd: &Tensor,
    args: &QkNormArgs<'_>,
    dtype: DType,
) -> Result<(Tensor, [Tensor; 2])> {
    let z = args.dims(qkv, None);
    let normalised = z.heads + z.kv_heads;
    assert_eq!((dy.shape(), dy.dtype()), (qkv.shape(), qkv.dtype()), "the gradient of normalised heads");
    assert_eq!(rstd.shape(), [z.batch * z.t, normalised], "the deviations of heads");
    let mut dx = writable(dy)?;
    let cpu = match qkv.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            let scales = cuda::backward(&cuda, &mut dx, qkv, rstd, args, &z, dtype)?;
            return Ok((dx, scales));
        }
    };
    let scales = [cast::widened(args.scales[0])?, cast::widened(args.scales[1])?];
    let table = args.table.map(|table| table.slice::<f32>());
    let (width, rstd, chunk) = (z.width(), rstd.slice::<f32>(), reduce::partial_rows(qkv.width()));
    let mut partial = reduce::partials(qkv, qkv.rows(), 2 * z.d)?;
    with_float!(qkv.dtype(), T => {
        let x = qkv.slice::<T>();
        let slices = dx.slice_mut::<T>().chunks_mut(chunk * width);
        let slices = slices.zip(partial.slice_mut::<f32>().chunks_mut(2 * z.d)).enumerate();
        chunks::each(&cpu, slices, |(i, (dx, sums))| {
            sums.fill(0.0);
            for (row, dx) in (i * chunk..).zip(dx.chunks_exact_mut(width)) {
                let angles = table.map(|table| &table[row % z.t * z.d..][..z.d]);
                let heads = x[row * width..].chunks_exact(z.d).zip(dx.chunks_exact_mut(z.d)).enumerate();
                for ((head, (x, dx)), rstd) in heads.zip(&rstd[row * normalised..][..normalised]) {
                    let at = usize::from(head >= z.heads) * z.d;
                    let (scale, sums) = (args.scale_of(head, &scales), &mut sums[at..at + z.d]);
                    differentiate(cpu.isa(), x, scale, *rstd, angles, sums, dx);
                }
            }
        });
    });
    let total = |i: usize| reduce::total(&cpu, &partial, i * z.d, z.d, dtype, Category::Workspace);
    Ok((dx, [total(0)?, total(1)?]))
}

/// The largest head whose gradient is turned back on the stack.
const MOST: usize = 512;

simd! {
    /// One head; gives its rstd.
    fn normalise[T: Float](x: &[T], scale: &[f32], eps: f32, angles: Option<&[f32]>, y: &mut [T]) -> f32 {
        let rstd = 1.0 / (lanes::sum(x, |x| x * x) / x.len() as f32 + eps).sqrt();
        let Some(angles) = angles else {
            for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
                *y = T::from_f32(x.to_f32() * rstd * scale);
            }
            return rstd;
        };
        let half = x.len() / 2;
        let ((xa, xb), (sa, sb)) = (x.split_at(half), scale.split_at(half));
        let ((ya, yb), (cosines, sines)) = (y.split_at_mut(half), angles.split_at(half));
        for i in 0..half {
            let (a, b) = (xa[i].to_f32() * rstd * sa[i], xb[i].to_f32() * rstd * sb[i]);
            ya[i] = T::from_f32(a * cosines[i] - b * sines[i]);
            yb[i] = T::from_f32(b * cosines[i] + a * sines[i]);
        }
        rstd
    }

    /// One head: dx from dy in its place, and its term of the scale's gradient.
    fn differentiate[T: Float](
        x: &[T],
        scale: &[f32],
        rstd: f32,
        angles: Option<&[f32]>,
        sums: &mut [f32],
        dx: &mut [T],
    ) {
        let d = x.len();
        assert!(d <= MOST, "a head of {d} columns");
        let mut back = [0f32; MOST];
        let back = &mut back[..d];
        match angles {
            Some(angles) => {
                let half = d / 2;
                let ((da, db), (cosines, sines)) = (dx.split_at(half), angles.split_at(half));
                let (a, b) = back.split_at_mut(half);
                for i in 0..half {
                    let (u, v) = (da[i].to_f32(), db[i].to_f32());
                    a[i] = u * cosines[i] + v * sines[i];
                    b[i] = v * cosines[i] - u * sines[i];
                }
            }
            None => back.iter_mut().zip(&*dx).for_each(|(back, dx)| *back = dx.to_f32()),
        }
        let mean_dh = lanes::sum3(back, x, scale, |d, x, scale| d * scale * x) * rstd / d as f32;
        for ((((dx, back), x), scale), sum) in dx.iter_mut().zip(&*back).zip(x).zip(scale).zip(sums) {
            let h = x.to_f32() * rstd;
            *sum += back * h;
            *dx = T::from_f32(rstd * (back * scale - h * mean_dh));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rotary::tests::{frequencies, plain};
    use crate::testing::{check, dot, gradient, tensor, values, wide};
    use proptest::prelude::*;

    const EPS: f64 = 0.5;

    /// y and rstd by plain loops.
    fn reference(
        x: &[f64],
        scales: [&[f64]; 2],
        sizes @ [_, heads, kv_heads, d]: [usize; 4],
        first: Option<usize>,
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut y, mut all) = (x.to_vec(), Vec::new());
        for y in y.chunks_mut((heads + 2 * kv_heads) * d) {
            for (head, y) in y.chunks_mut(d).take(heads + kv_heads).enumerate() {
                let rstd = 1.0 / (dot(y, y) / d as f64 + EPS).sqrt();
                let scale = scales[usize::from(head >= heads)];
                y.iter_mut().zip(scale).for_each(|(y, scale)| *y *= rstd * scale);
                all.push(rstd);
            }
        }
        (first.map_or(y.clone(), |first| plain(&y, sizes, first, 1.0)), all)
    }

    fn agrees(batch: usize, sizes: [usize; 4], rotated: bool, seed: u64) {
        let [t, heads, kv_heads, d] = sizes;
        let width = (heads + 2 * kv_heads) * d;
        let (x, dy) = (values(seed, batch * t * width, 1.5), values(seed ^ 1, batch * t * width, 1.0));
        let scales = [values(seed ^ 2, d, 1.0), values(seed ^ 3, d, 1.0)];
        let (x64, dy64, scales64) = (wide(&x), wide(&dy), scales.each_ref().map(|scale| wide(scale)));
        let [q64, k64] = scales64.each_ref().map(Vec::as_slice);
        let first = rotated.then_some(0);
        let (y, rstd) = reference(&x64, [q64, k64], sizes, first);
        let (later, _) = reference(&x64[..t * width], [q64, k64], sizes, rotated.then_some(2));
        let loss = |x: &[f64], q: &[f64], k: &[f64]| dot(&reference(x, [q, k], sizes, first).0, &dy64);
        let expected = [
            y,
            rstd,
            later,
            gradient(&x64, |x| loss(x, q64, k64)),
            gradient(q64, |q| loss(&x64, q, k64)),
            gradient(k64, |k| loss(&x64, q64, k)),
        ];
        check(&expected, |device, dtype| {
            let table = rotary::table(device, &frequencies(d), t + 2).unwrap();
            let of = |data: &[f32]| tensor(device, dtype, &[data.len() / t / width, t, width], data);
            let scales = scales.each_ref().map(|scale| tensor(device, dtype, &[d], scale));
            let table = rotated.then_some(&table);
            let args = QkNormArgs { scales: scales.each_ref(), eps: EPS as f32, table, heads, kv_heads };
            let qkv = of(&x);
            let (y, rstd) = forward(&qkv, &args, None).unwrap();
            let mut position = Position::new(device).unwrap();
            position.set(2);
            position.send().unwrap();
            let (later, _) = forward(&of(&x[..t * width]), &args, Some(&position)).unwrap();
            let (dx, [dq, dk]) = backward(of(&dy), &qkv, &rstd, &args, DType::F32).unwrap();
            vec![y, rstd, later, dx, dq, dk]
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]
        #[test]
        fn norms_and_rotations_agree_with_plain_loops(
            (batch, t, kv_heads, group, pairs) in (1usize..3, 1usize..4, 1usize..3, 1usize..3, 1usize..9),
            rotated: bool,
            seed: u64,
        ) {
            agrees(batch, [t, kv_heads * group, kv_heads, 2 * pairs], rotated, seed);
        }
    }

    /// More than one turn of a warp's lanes, and rows of several blocks.
    #[test]
    fn large_heads_agree_with_plain_loops() {
        agrees(1, [1, 2, 1, 128], true, 3);
        agrees(2, [40, 1, 1, 6], true, 4);
    }
}

//! The epilogue: a chunk of finished f32 sums gets its bias and its activation, is rounded and stored.

use crate::cpu::activation::ActivationFn;
use crate::dtype::Float;
use crate::simd;

/// Where a chunk goes: rows of `c` (and of the values before the activation), `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileOutput<O> {
    pub c: *mut O,
    pub c_stride: usize,
    pub pre: Option<(*mut O, usize)>,
}

simd! {
    /// Finishes `rows` x `cols` sums at `sums`, `stride` apart. A bias has `cols` elements.
    pub(super) fn finish[T: Float, O: Float](
        sums: *const f32,
        stride: usize,
        rows: usize,
        cols: usize,
        out: TileOutput<O>,
        accumulate: bool,
        bias: Option<&[T]>,
        activation: Option<ActivationFn>,
    ) {
        for r in 0..rows {
            // SAFETY: the driver hands out chunks that lie in their matrices and that no one else writes.
            let (sums, c, pre) = unsafe {
                (
                    std::slice::from_raw_parts(sums.add(r * stride), cols),
                    std::slice::from_raw_parts_mut(out.c.add(r * out.c_stride), cols),
                    out.pre.map(|(at, stride)| std::slice::from_raw_parts_mut(at.add(r * stride), cols)),
                )
            };
            match (accumulate, bias) {
                (false, None) => sums.iter().zip(&mut *c).for_each(|(x, c)| *c = O::from_f32(*x)),
                (false, Some(bias)) => {
                    for ((x, b), c) in sums.iter().zip(bias).zip(&mut *c) {
                        *c = O::from_f32(*x + b.to_f32());
                    }
                }
                (true, None) => {
                    sums.iter().zip(&mut *c).for_each(|(x, c)| *c = O::from_f32(c.to_f32() + *x));
                }
                (true, Some(bias)) => {
                    for ((x, b), c) in sums.iter().zip(bias).zip(&mut *c) {
                        *c = O::from_f32(c.to_f32() + *x + b.to_f32());
                    }
                }
            }
            if let Some(pre) = pre {
                pre.copy_from_slice(c);
            }
            match activation {
                None => {}
                Some(ActivationFn::Relu) => activate(c, |x| ActivationFn::Relu.apply(x)),
                Some(ActivationFn::Gelu) => activate(c, |x| ActivationFn::Gelu.apply(x)),
                Some(ActivationFn::Silu) => activate(c, |x| ActivationFn::Silu.apply(x)),
                Some(ActivationFn::GeluErf) => activate(c, |x| ActivationFn::GeluErf.apply(x)),
                Some(ActivationFn::Tanh) => activate(c, |x| ActivationFn::Tanh.apply(x)),
            }
        }
    }
}

/// The activation is a constant of each call, so that the loop has no branch in it.
#[inline(always)]
fn activate<O: Float>(row: &mut [O], f: impl Fn(f32) -> f32) {
    row.iter_mut().for_each(|x| *x = O::from_f32(f(x.to_f32())));
}

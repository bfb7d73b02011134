//! The epilogue: a chunk of finished f32 sums gets its bias, is rounded and stored.

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
        sums: *mut f32,
        stride: usize,
        rows: usize,
        cols: usize,
        out: TileOutput<O>,
        accumulate: bool,
        bias: Option<&[T]>,
    ) {
        for r in 0..rows {
            // SAFETY: the driver hands out chunks that lie in their matrices and that no one else writes.
            let (sums, c, pre) = unsafe {
                (
                    std::slice::from_raw_parts_mut(sums.add(r * stride), cols),
                    std::slice::from_raw_parts_mut(out.c.add(r * out.c_stride), cols),
                    out.pre.map(|(at, stride)| std::slice::from_raw_parts_mut(at.add(r * stride), cols)),
                )
            };
            if accumulate {
                sums.iter_mut().zip(&*c).for_each(|(x, c)| *x += c.to_f32());
            }
            if let Some(bias) = bias {
                sums.iter_mut().zip(bias).for_each(|(x, b)| *x += b.to_f32());
            }
            c.iter_mut().zip(sums).for_each(|(c, x)| *c = O::from_f32(*x));
            if let Some(pre) = pre {
                pre.copy_from_slice(c);
            }
        }
    }
}

//! Transposition of blocks of sixteen by sixteen numbers: how images become the lanes of vectors, and back.

use std::arch::x86_64::*;

use crate::cpu::gemm::Lanes;
use crate::cpu::isa::Avx512;

/// Numbers of a vector.
pub(super) const LANES: usize = 16;

/// Rows of x as lanes: `y[j y_stride + i] = x[i x_stride + j]` for each of `columns` columns j and of at most
/// [`LANES`] rows i. The lanes that have no row are zero.
pub(super) fn to_lanes(
    proof: Avx512,
    (x, x_stride): (&[f32], usize),
    [rows, columns]: [usize; 2],
    (y, y_stride): (&mut [f32], usize),
) {
    assert!(rows <= LANES, "{rows} rows in a vector");
    transpose(proof, (x, x_stride), [rows, columns], (y, y_stride), true);
}

/// Lanes as rows of y: the same for any number of rows of x, each with at most [`LANES`] columns that count.
pub(super) fn from_lanes(
    proof: Avx512,
    (x, x_stride): (&[f32], usize),
    [rows, columns]: [usize; 2],
    (y, y_stride): (&mut [f32], usize),
) {
    transpose(proof, (x, x_stride), [rows, columns], (y, y_stride), false);
}

/// Writes full vectors of y, or no more of them than x has rows.
fn transpose(
    _: Avx512,
    (x, x_stride): (&[f32], usize),
    [rows, columns]: [usize; 2],
    (y, y_stride): (&mut [f32], usize),
    all_lanes: bool,
) {
    if rows * columns == 0 {
        return;
    }
    let written = if all_lanes { LANES } else { rows };
    assert!((rows - 1) * x_stride + columns <= x.len(), "{rows} rows of {columns} numbers");
    assert!((columns - 1) * y_stride + written <= y.len(), "room for {columns} rows of {written} numbers");
    for i in (0..rows).step_by(LANES) {
        for j in (0..columns).step_by(LANES) {
            let (high, wide) = (LANES.min(rows - i), LANES.min(columns - j));
            // SAFETY: the proof is there; the lengths of x and y were checked.
            unsafe {
                let (x, y) = (x.as_ptr().add(i * x_stride + j), y.as_mut_ptr().add(j * y_stride + i));
                block((x, x_stride), [high, wide], (y, y_stride), if all_lanes { LANES } else { high });
            }
        }
    }
}

/// A block of `high` x `wide` numbers, of which each column becomes `width` numbers.
///
/// # Safety
/// The processor has AVX-512, x holds the block, and y has room for it.
#[target_feature(enable = "avx512f")]
unsafe fn block(
    (x, x_stride): (*const f32, usize),
    [high, wide]: [usize; 2],
    (y, y_stride): (*mut f32, usize),
    width: usize,
) {
    // SAFETY: the caller's promise covers every access.
    unsafe {
        let mut r = [_mm512_setzero_ps(); LANES];
        for (i, r) in r.iter_mut().enumerate().take(high) {
            *r = __m512::load_partial(x.add(i * x_stride), wide);
        }
        let t = transposed(r);
        for (j, t) in t.iter().enumerate().take(wide) {
            t.store_partial(y.add(j * y_stride), width);
        }
    }
}

/// Sixteen rows as sixteen columns.
#[target_feature(enable = "avx512f")]
fn transposed(r: [__m512; LANES]) -> [__m512; LANES] {
    let mut pairs = [_mm512_setzero_ps(); LANES];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // Of rows 4 q .. 4 q + 4: column 4 l + k of all four in lane l of the k-th.
    let mut fours = [_mm512_setzero_pd(); LANES];
    for q in 0..4 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| _mm512_castps_pd(pairs[4 * q + i]));
        fours[4 * q] = _mm512_unpacklo_pd(a, c);
        fours[4 * q + 1] = _mm512_unpackhi_pd(a, c);
        fours[4 * q + 2] = _mm512_unpacklo_pd(b, d);
        fours[4 * q + 3] = _mm512_unpackhi_pd(b, d);
    }
    let fours = fours.map(|four| _mm512_castpd_ps(four));
    let mut columns = [_mm512_setzero_ps(); LANES];
    for k in 0..4 {
        // Lanes 0 and 2, and 1 and 3, of rows 0 to 7 and of rows 8 to 15.
        let even_low = _mm512_shuffle_f32x4::<0x88>(fours[k], fours[4 + k]);
        let odd_low = _mm512_shuffle_f32x4::<0xdd>(fours[k], fours[4 + k]);
        let even_high = _mm512_shuffle_f32x4::<0x88>(fours[8 + k], fours[12 + k]);
        let odd_high = _mm512_shuffle_f32x4::<0xdd>(fours[8 + k], fours[12 + k]);
        columns[k] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
        columns[8 + k] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
        columns[4 + k] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
        columns[12 + k] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// Full blocks, partial ones, and several beside and below each other; nothing beside what is asked for
    /// is written.
    #[test]
    fn rows_become_columns_and_lanes_become_rows() {
        for proof in Isa::available().filter_map(Isa::avx512) {
            for (rows, columns) in [(16, 16), (16, 32), (5, 16), (16, 3), (1, 1), (7, 45), (64, 16), (40, 9)]
            {
                let (x_stride, y_stride) = (columns + 2, rows.max(LANES) + 1);
                let x: Vec<f32> = (0..rows * x_stride).map(|i| i as f32).collect();
                for all_lanes in [false, true].into_iter().filter(|all_lanes| !all_lanes || rows <= LANES) {
                    let mut y = vec![-1.0; columns * y_stride];
                    let transpose = if all_lanes { to_lanes } else { from_lanes };
                    transpose(proof, (&x, x_stride), [rows, columns], (&mut y, y_stride));
                    for (j, y) in y.chunks(y_stride).enumerate() {
                        let rest = if all_lanes { LANES - rows } else { 0 };
                        let expected = (0..rows).map(|i| x[i * x_stride + j]).chain(vec![0.0; rest]);
                        let expected: Vec<f32> =
                            expected.chain(vec![-1.0; y_stride]).take(y_stride).collect();
                        assert_eq!(y, expected, "{rows} x {columns}, column {j}");
                    }
                }
            }
        }
    }
}

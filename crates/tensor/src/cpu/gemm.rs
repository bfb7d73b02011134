//! Placeholder until the kernels arrive: the interface, in its plainest form.

use super::Isa;
use crate::dtype::Float;

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    /// Where element (0, 0) stands first.
    pub data: &'a [T],
    /// Elements between one row and the next.
    pub row_stride: usize,
    /// Elements between one column and the next.
    pub col_stride: usize,
}

/// A matrix to write, rows contiguous.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    /// Where element (0, 0) stands first.
    pub data: &'a mut [T],
    /// Elements between one row and the next.
    pub row_stride: usize,
}

/// `c = a b` or `c += a b` on the calling thread; a: [m, k], b: [k, n], c: [m, n]. Sums in f32.
pub fn serial<T: Float, O: Float>(
    _isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    c: MatrixMut<'_, O>,
    accumulate: bool,
) {
    for i in 0..m {
        for j in 0..n {
            let c = &mut c.data[i * c.row_stride + j];
            let mut sum = if accumulate { c.to_f32() } else { 0.0 };
            for l in 0..k {
                sum += a.data[i * a.row_stride + l * a.col_stride].to_f32()
                    * b.data[l * b.row_stride + j * b.col_stride].to_f32();
            }
            *c = O::from_f32(sum);
        }
    }
}

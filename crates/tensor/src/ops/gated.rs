//! Gated units (Shazeer 2020): an activation of one half of each row times the other half. With SiLU it is
//! SwiGLU, the perceptron of the Llama family.
//!
//! x: `[.., 2 n]`, the gate's columns before the other factor's; y: `[.., n]`. With g and u a row's halves:
//!
//! - y = f(g) u
//! - dg = dy u f'(g), du = dy f(g)
//!
//! The activation is SiLU or GELU (in its tanh form), whose slopes follow from g.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::activation::ActivationFn;
use crate::ops::chunks;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// y.
pub fn forward(kind: ActivationFn, x: &Tensor) -> Result<Tensor> {
    let n = columns(kind, x);
    let mut y = halved(x)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            cpu.for_chunks(y.slice_mut::<T>(), chunks::rows(2 * n) * n, |at, y| {
                apply_rows(cpu.isa(), kind, n, &x[2 * at.start..2 * at.end], y)
            });
        }),
        Device::Cuda(cuda) => cuda::forward(&cuda, kind, x, &mut y)?,
    }
    Ok(y)
}

/// dx.
pub fn backward(kind: ActivationFn, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    both(kind, x, dy, None)
}

/// (dx, y): the gradient, and what the forward pass made of x, for a layer behind that did not keep it. y has
/// the bits of [`forward`].
pub fn backward_remaking(kind: ActivationFn, x: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut y = halved(x)?;
    Ok((both(kind, x, dy, Some(&mut y))?, y))
}

fn both(kind: ActivationFn, x: &Tensor, dy: &Tensor, y: Option<&mut Tensor>) -> Result<Tensor> {
    let n = columns(kind, x);
    assert_eq!(
        (dy.rows(), dy.width(), dy.dtype()),
        (x.rows(), n, x.dtype()),
        "a gated unit's gradient {:?}",
        dy.shape()
    );
    let mut dx = x.empty_like(Category::Transient)?;
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let (x, dy, rows) = (x.slice::<T>(), dy.slice::<T>(), chunks::rows(2 * n));
            let dx = dx.slice_mut::<T>().chunks_mut(2 * rows * n).enumerate();
            let at = |i: usize, len: usize| i * rows * n..i * rows * n + len;
            match y {
                Some(y) => {
                    let y = y.slice_mut::<T>().chunks_mut(rows * n);
                    chunks::each(&cpu, dx.zip(y), |((i, dx), y)| {
                        let at = at(i, y.len());
                        let x = &x[2 * at.start..2 * at.end];
                        apply_rows(cpu.isa(), kind, n, x, y);
                        slope_rows(cpu.isa(), kind, n, x, &dy[at], dx);
                    });
                }
                None => chunks::each(&cpu, dx, |(i, dx)| {
                    let at = at(i, dx.len() / 2);
                    slope_rows(cpu.isa(), kind, n, &x[2 * at.start..2 * at.end], &dy[at], dx)
                }),
            }
        }),
        Device::Cuda(cuda) => cuda::backward(&cuda, kind, x, dy, &mut dx, y)?,
    }
    Ok(dx)
}

/// Whether a function gates: the others have no loops here.
fn is_gate(kind: ActivationFn) -> bool {
    matches!(kind, ActivationFn::Silu | ActivationFn::Gelu)
}

/// n.
fn columns(kind: ActivationFn, x: &Tensor) -> usize {
    assert!(is_gate(kind), "no kernel is gated by {kind:?}");
    assert!(x.width().is_multiple_of(2) && x.width() > 0, "two halves side by side, got {:?}", x.shape());
    x.width() / 2
}

/// Memory for y.
fn halved(x: &Tensor) -> Result<Tensor> {
    Tensor::empty(&x.device(), &x.shape_with_width(x.width() / 2), x.dtype(), Category::Transient)
}

simd! {
    fn apply_rows[T: Float](kind: ActivationFn, n: usize, x: &[T], y: &mut [T]) {
        // The choice stands outside the loops, or they would not vectorise.
        match kind {
            ActivationFn::Silu => apply(n, x, y, |g| ActivationFn::Silu.apply(g)),
            _ => apply(n, x, y, |g| ActivationFn::Gelu.apply(g)),
        }
    }

    fn slope_rows[T: Float](kind: ActivationFn, n: usize, x: &[T], dy: &[T], dx: &mut [T]) {
        let of = |kind: ActivationFn, g: f32| (kind.apply(g), kind.slope(g));
        match kind {
            ActivationFn::Silu => slope(n, x, dy, dx, |g| of(ActivationFn::Silu, g)),
            _ => slope(n, x, dy, dx, |g| of(ActivationFn::Gelu, g)),
        }
    }
}

#[inline(always)]
fn apply<T: Float>(n: usize, x: &[T], y: &mut [T], f: impl Fn(f32) -> f32) {
    for (x, y) in x.chunks_exact(2 * n).zip(y.chunks_exact_mut(n)) {
        let (gate, up) = x.split_at(n);
        for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
            *y = T::from_f32(f(g.to_f32()) * u.to_f32());
        }
    }
}

/// `f`: the value and the slope.
#[inline(always)]
fn slope<T: Float>(n: usize, x: &[T], dy: &[T], dx: &mut [T], f: impl Fn(f32) -> (f32, f32)) {
    for ((x, dy), dx) in x.chunks_exact(2 * n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(2 * n)) {
        let ((gate, up), (dgate, dup)) = (x.split_at(n), dx.split_at_mut(n));
        for ((((g, u), dy), dg), du) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let (value, slope) = f(g.to_f32());
            *dg = T::from_f32(dy.to_f32() * u.to_f32() * slope);
            *du = T::from_f32(dy.to_f32() * value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, gradient, tensor, values, wide};
    use proptest::prelude::*;

    fn reference(kind: ActivationFn, n: usize, x: &[f64]) -> Vec<f64> {
        let f = |x: f64| match kind {
            ActivationFn::Silu => x / (1.0 + (-x).exp()),
            _ => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
        };
        x.chunks(2 * n).flat_map(|x| (0..n).map(|j| f(x[j]) * x[n + j]).collect::<Vec<_>>()).collect()
    }

    fn agrees(rows: usize, n: usize, seed: u64) {
        let (x, dy) = (values(seed, rows * 2 * n, 2.0), values(seed ^ 1, rows * n, 1.0));
        let (x64, dy64) = (wide(&x), wide(&dy));
        for kind in [ActivationFn::Silu, ActivationFn::Gelu] {
            let y = reference(kind, n, &x64);
            // Columns do not see each other: their differences can be taken pair by pair.
            let mut dx = vec![0.0; x64.len()];
            for (i, dy) in dy64.iter().enumerate() {
                let gate = i / n * 2 * n + i % n;
                let pair = gradient(&[x64[gate], x64[gate + n]], |x| reference(kind, 1, x)[0] * dy);
                (dx[gate], dx[gate + n]) = (pair[0], pair[1]);
            }
            check(&[y, dx], |device, dtype| {
                let x = tensor(device, dtype, &[1, rows, 2 * n], &x);
                let dy = tensor(device, dtype, &[1, rows, n], &dy);
                let y = forward(kind, &x).unwrap();
                assert_eq!(y.shape(), [1, rows, n]);
                let dx = backward(kind, &x, &dy).unwrap();
                let (again, remade) = backward_remaking(kind, &x, &dy).unwrap();
                assert_eq!(remade.host_bytes(), y.host_bytes());
                assert_eq!(again.host_bytes(), dx.host_bytes());
                vec![y, dx]
            });
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn both_passes_agree_with_the_formula(rows in 1usize..300, n in 1usize..70, seed: u64) {
            agrees(rows, n, seed);
        }
    }

    /// Whole packs of a GPU, over several blocks and several turns of a thread.
    #[test]
    fn wide_rows_agree_with_the_formula() {
        for (rows, n) in [(37, 64), (9, 520), (3, 1536)] {
            agrees(rows, n, 5);
        }
    }

    #[test]
    #[should_panic(expected = "two halves side by side")]
    fn an_odd_row_is_refused() {
        let x = tensor(&Device::cpu(1).unwrap(), crate::DType::F32, &[2, 3], &[0.0; 6]);
        let _ = forward(ActivationFn::Silu, &x);
    }
}

//! Matrix products of tensors, with a bias and an activation on the way out.
//!
//! `a: [m, k]`, `b: [k, n]`, or either of them as the transpose of what is stored, or some columns of it
//! ([`Operand`]).

pub mod cuda;

use crate::cpu::Cpu;
use crate::cpu::gemm::{GemmEpilogue, MatrixMut, MatrixRef, parallel};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::ops::activation::{self, ActivationFn};
use crate::ops::{columns, elementwise};
use crate::tensor::Tensor;
use crate::with_float;

/// `a b + bias`, as a new tensor `[m, n]` of `a`'s type; `bias: [n]`. `matmul(x, w.t(), ..)` multiplies by a
/// transpose.
pub fn matmul<'a>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    bias: Option<&Tensor>,
    category: Category,
) -> Result<Tensor> {
    let (a, b) = (a.into(), b.into());
    let (m, n, _) = extents(a, b, bias);
    let mut c = Tensor::empty(&a.tensor.device(), &[m, n], a.tensor.dtype(), category)?;
    match a.tensor.device() {
        Device::Cpu(cpu) => product(&cpu, a, b, bias, None, &mut c, None),
        Device::Cuda(_) => cuda::GpuMatmul::new(a, b).then(cuda::MatmulEpilogue::bias(bias)).into(&mut c)?,
    }
    Ok(c)
}

/// `a b + bias` into the columns of c from `first` on, as many as the product has; the others stay as they are.
pub fn matmul_into<'a>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    bias: Option<&Tensor>,
    c: &mut Tensor,
    first: usize,
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let (m, n, k) = extents(a, b, bias);
    let (rows, width) = (c.rows(), c.width());
    assert!(rows == m && first + n <= width, "a product of {m} x {n} into {:?} from {first} on", c.shape());
    assert_eq!(c.dtype(), a.tensor.dtype(), "a product into another type");
    match a.tensor.device() {
        Device::Cpu(cpu) => with_float!(a.tensor.dtype(), T => {
            let epilogue =
                GemmEpilogue { bias: bias.map(|bias| bias.slice::<T>()), activation: None, pre: None };
            let c = MatrixMut { data: &mut c.slice_mut::<T>()[first..], row_stride: width };
            parallel(&cpu, [m, n, k], matrix::<T>(a), matrix::<T>(b), c, false, epilogue);
        }),
        Device::Cuda(_) => {
            let product = cuda::GpuMatmul::new(a, b).then(cuda::MatmulEpilogue::bias(bias));
            if !product.into_columns(c, first)? {
                columns::put(c, first, &matmul(a, b, bias, Category::Workspace)?)?;
            }
        }
    }
    Ok(())
}

/// `a b + bias + plus`, as a new tensor of `plus`'s shape. A GPU adds before it rounds; the host rounds the
/// product first, as two operations would.
pub fn matmul_plus<'a>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    bias: Option<&Tensor>,
    plus: &Tensor,
    category: Category,
) -> Result<Tensor> {
    let (a, b) = (a.into(), b.into());
    let (m, n, _) = extents(a, b, bias);
    assert_eq!((plus.rows(), plus.width()), (m, n), "a product of {m} x {n} and {:?}", plus.shape());
    match a.tensor.device() {
        Device::Cpu(_) => {
            let mut c = matmul(a, b, bias, category)?.reshape(plus.shape());
            elementwise::add_into(&mut c, plus)?;
            Ok(c)
        }
        Device::Cuda(_) => {
            let mut c = plus.empty_like(category)?;
            let product = cuda::GpuMatmul::new(a, b).plus(Some(plus));
            product.then(cuda::MatmulEpilogue::bias(bias)).into(&mut c)?;
            Ok(c)
        }
    }
}

/// `c += a b`, where `c: [m, n]` is of `a`'s type or f32, which loses nothing where sums come in chunks.
pub fn matmul_add<'a>(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>, c: &mut Tensor) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let (m, n, k) = extents(a, b, None);
    assert_eq!((c.rows(), c.width()), (m, n), "a product of {m} x {n} added to {:?}", c.shape());
    match a.tensor.device() {
        Device::Cpu(cpu) => with_float!(a.tensor.dtype(), T => {
            let a = matrix::<T>(a);
            let b = matrix::<T>(b);
            match c.dtype() {
                DType::F32 => {
                    let c = MatrixMut { data: c.slice_mut::<f32>(), row_stride: n };
                    parallel(&cpu, [m, n, k], a, b, c, true, GemmEpilogue::none());
                }
                _ => {
                    let c = MatrixMut { data: c.slice_mut::<T>(), row_stride: n };
                    parallel(&cpu, [m, n, k], a, b, c, true, GemmEpilogue::none());
                }
            }
        }),
        Device::Cuda(_) => cuda::GpuMatmul::new(a, b).accumulate(true).into(c)?,
    }
    Ok(())
}

/// As [`matmul`] with an activation: the values before it, and after it, in one pass. Both are activations.
pub fn matmul_activated<'a>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    bias: Option<&Tensor>,
    activation: ActivationFn,
) -> Result<(Tensor, Tensor)> {
    let (a, b) = (a.into(), b.into());
    let (m, n, _) = extents(a, b, bias);
    let mut pre = Tensor::empty(&a.tensor.device(), &[m, n], a.tensor.dtype(), Category::Transient)?;
    let activated = match (a.tensor.device(), activation) {
        (Device::Cpu(cpu), _) => {
            let mut activated = pre.empty_like(Category::Transient)?;
            product(&cpu, a, b, bias, Some(activation), &mut activated, Some(&mut pre));
            activated
        }
        (Device::Cuda(_), ActivationFn::Gelu) => {
            let mut activated = pre.empty_like(Category::Transient)?;
            let gelu = cuda::MatmulEpilogue::Gelu { bias, pre: &mut pre };
            cuda::GpuMatmul::new(a, b).then(gelu).into(&mut activated)?;
            activated
        }
        (Device::Cuda(_), _) => {
            cuda::GpuMatmul::new(a, b).then(cuda::MatmulEpilogue::bias(bias)).into(&mut pre)?;
            activation::forward(activation, &pre)?
        }
    };
    Ok((pre, activated))
}

/// `(m, n, k)`, after checking that the operands fit each other.
fn extents(a: Operand<'_>, b: Operand<'_>, bias: Option<&Tensor>) -> (usize, usize, usize) {
    let ((m, k), (bk, n)) = (a.extents(), b.extents());
    assert_eq!(k, bk, "a product of {m} x {k} and {bk} x {n}");
    assert_eq!(a.tensor.dtype(), b.tensor.dtype(), "matmul of two types");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "a bias of {:?} for {n} columns", bias.shape());
        assert_eq!(a.tensor.dtype(), bias.dtype(), "a bias of another type");
    }
    (m, n, k)
}

fn matrix<T: Float>(x: Operand<'_>) -> MatrixRef<'_, T> {
    MatrixRef::of(&x.tensor.slice::<T>()[x.first..], x.tensor.width(), x.transposed)
}

fn product(
    cpu: &Cpu,
    a: Operand<'_>,
    b: Operand<'_>,
    bias: Option<&Tensor>,
    activation: Option<ActivationFn>,
    c: &mut Tensor,
    pre: Option<&mut Tensor>,
) {
    let (m, n, k) = extents(a, b, bias);
    with_float!(a.tensor.dtype(), T => {
        let epilogue = GemmEpilogue {
            bias: bias.map(|bias| bias.slice::<T>()),
            activation,
            pre: pre.map(|pre| MatrixMut { data: pre.slice_mut::<T>(), row_stride: n }),
        };
        let a = matrix::<T>(a);
        let b = matrix::<T>(b);
        let c = MatrixMut { data: c.slice_mut::<T>(), row_stride: n };
        parallel(cpu, [m, n, k], a, b, c, false, epilogue);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, tensor, values, wide};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        /// In all four layouts of the operands: a product, the same one with a tensor added to it, added in two
        /// chunks of k to an f32 tensor and to one of the operands' type, and before and behind an activation.
        #[test]
        fn products_and_sums_of_products(m in 1usize..70, n in 1usize..70, k in 2usize..90, seed: u64) {
            let (a, b) = (values(seed, m * k, 1.0), values(seed ^ 1, k * n, 1.0));
            let (bias, start) = (values(seed ^ 2, n, 1.0), values(seed ^ 3, m * n, 1.0));
            let [a64, b64] = [&a, &b].map(|x| wide(x));
            let sum = |i: usize, j: usize| (0..k).map(|p| a64[i * k + p] * b64[p * n + j]).sum::<f64>();
            let each = |f: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
                (0..m * n).map(|at| f(at / n, at % n) + sum(at / n, at % n)).collect()
            };
            let product = each(&|_, j| f64::from(bias[j]));
            let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let gelu: Vec<f64> = product.iter().map(|x| 0.5 * x * (1.0 + inner(*x).tanh())).collect();
            let added = each(&|i, j| f64::from(start[i * n + j]));
            let both = each(&|i, j| f64::from(start[i * n + j]) + f64::from(bias[j]));
            let expected = [product.clone(), both, added.clone(), added.clone(), added, product, gelu];
            let transposed = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
                (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect()
            };
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                check(&expected, |device, dtype| {
                    let matrix = |x: &[f32], rows: usize, cols: usize, t: bool| match t {
                        false => tensor(device, dtype, &[rows, cols], x),
                        true => tensor(device, dtype, &[cols, rows], &transposed(x, rows, cols)),
                    };
                    let bias = tensor(device, dtype, &[n], &bias);
                    let (whole_a, whole_b) = (matrix(&a, m, k, ta), matrix(&b, k, n, tb));
                    let (seen_a, seen_b) = (Operand::new(&whole_a, ta), Operand::new(&whole_b, tb));
                    let category = Category::Gradients;
                    let product = matmul(seen_a, seen_b, Some(&bias), category).unwrap();
                    let fresh = tensor(device, dtype, &[m, n], &start);
                    let plus = |bias| matmul_plus(seen_a, seen_b, bias, &fresh, category).unwrap();
                    let (both, plus) = (plus(Some(&bias)), plus(None));
                    assert_eq!(fresh.to_f32(), start, "what is added stays as it is");
                    let mut wide = tensor(device, DType::F32, &[m, n], &start);
                    let mut same = tensor(device, dtype, &[m, n], &start);
                    let cut = k / 2;
                    for at in [0..cut, cut..k] {
                        let columns: Vec<f32> = a.chunks(k).flat_map(|row| &row[at.clone()]).copied().collect();
                        let a = matrix(&columns, m, at.len(), ta);
                        let b = matrix(&b[at.start * n..at.end * n], at.len(), n, tb);
                        matmul_add(Operand::new(&a, ta), Operand::new(&b, tb), &mut wide).unwrap();
                        matmul_add(Operand::new(&a, ta), Operand::new(&b, tb), &mut same).unwrap();
                    }
                    let (pre, y) = matmul_activated(seen_a, seen_b, Some(&bias), ActivationFn::Gelu).unwrap();
                    vec![product, both, plus, wide, same, pre, y]
                });
            }
        }

        /// Factors that are columns of wider tensors, and a result that is.
        #[test]
        fn products_of_columns(
            m in 1usize..40, n in 1usize..40, k in 1usize..40, first in 0usize..20, packs: bool, seed: u64,
        ) {
            // Columns that begin at a GPU's 16 bytes, and such that do not.
            let of = |x: usize| if packs { x.next_multiple_of(8) } else { x };
            let (n, k, first) = (of(n), of(k), of(first));
            let (wide_k, wide_n) = (first + k + of(3), first + n + of(5));
            let (a, b) = (values(seed, m * wide_k, 1.0), values(seed ^ 1, k * wide_n, 1.0));
            let (bias, start) = (values(seed ^ 2, n, 1.0), values(seed ^ 3, m * wide_n, 1.0));
            let [a64, b64] = [&a, &b].map(|x| wide(x));
            let sum = |i: usize, j: usize| -> f64 {
                (0..k).map(|p| a64[i * wide_k + first + p] * b64[p * wide_n + first + j]).sum()
            };
            let product: Vec<f64> = (0..m * n).map(|at| sum(at / n, at % n)).collect();
            let inside: Vec<f64> = (0..m * wide_n)
                .map(|at| match (at % wide_n).checked_sub(first).filter(|j| *j < n) {
                    Some(j) => sum(at / wide_n, j) + f64::from(bias[j]),
                    None => f64::from(start[at]),
                })
                .collect();
            // The transpose of some columns: what a weight's gradient is.
            let turned: Vec<f64> = (0..k * n)
                .map(|at| (0..m).map(|i| a64[i * wide_k + first + at / n] * f64::from(start[i * wide_n + first + at % n])).sum())
                .collect();
            check(&[product, inside, turned], |device, dtype| {
                let a = tensor(device, dtype, &[m, wide_k], &a);
                let b = tensor(device, dtype, &[k, wide_n], &b);
                let bias = tensor(device, dtype, &[n], &bias);
                let mut c = tensor(device, dtype, &[m, wide_n], &start);
                let (left, right) =
                    (Operand::columns(&a, first..first + k), Operand::columns(&b, first..first + n));
                let fresh = Operand::columns(&c, first..first + n);
                let turned = matmul(left.t(), fresh, None, Category::Gradients).unwrap();
                let product = matmul(left, right, None, Category::Gradients).unwrap();
                matmul_into(left, right, Some(&bias), &mut c, first).unwrap();
                vec![product, c, turned]
            });
        }
    }
}

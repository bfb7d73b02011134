//! Matrix products of tensors, with a bias and an activation on the way out.
//!
//! `a: [m, k]`, `b: [k, n]`, or either of them stored transposed; every dimension but the last counts as rows.

use crate::cpu::Cpu;
use crate::cpu::gemm::{Epilogue, Matrix, MatrixMut, parallel};
use crate::cuda::blas;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::activation::{self, Activation};
use crate::tensor::Tensor;
use crate::with_float;

/// `a b + bias`, as a new tensor `[m, n]` of `a`'s type.
///
/// `ta`: `a` is stored `[k, m]`; `tb`: `b` is stored `[n, k]`; `bias: [n]`.
pub fn matmul(
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    bias: Option<&Tensor>,
    category: Category,
) -> Result<Tensor> {
    let (m, n, _) = extents(a, ta, b, tb, bias);
    let mut c = Tensor::empty(&a.device(), &[m, n], a.dtype(), category)?;
    match a.device() {
        Device::Cpu(cpu) => product(&cpu, a, ta, b, tb, bias, None, &mut c, None),
        Device::Cuda(_) => blas::Product::new(a, ta, b, tb).then(blas::Epilogue::bias(bias)).into(&mut c)?,
    }
    Ok(c)
}

/// As [`matmul`] with an activation: the values before it, and after it, in one pass. Both are activations.
pub fn matmul_activated(
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    bias: Option<&Tensor>,
    activation: Activation,
) -> Result<(Tensor, Tensor)> {
    let (m, n, _) = extents(a, ta, b, tb, bias);
    let mut pre = Tensor::empty(&a.device(), &[m, n], a.dtype(), Category::Activations)?;
    let activated = match (a.device(), activation) {
        (Device::Cpu(cpu), _) => {
            let mut activated = pre.empty_like(Category::Activations)?;
            product(&cpu, a, ta, b, tb, bias, Some(activation), &mut activated, Some(&mut pre));
            activated
        }
        (Device::Cuda(_), Activation::Gelu) => {
            let mut activated = pre.empty_like(Category::Activations)?;
            let gelu = blas::Epilogue::Gelu { bias, pre: &mut pre };
            blas::Product::new(a, ta, b, tb).then(gelu).into(&mut activated)?;
            activated
        }
        (Device::Cuda(_), Activation::Relu | Activation::Silu) => {
            blas::Product::new(a, ta, b, tb).then(blas::Epilogue::bias(bias)).into(&mut pre)?;
            activation::forward(activation, &pre)?
        }
    };
    Ok((pre, activated))
}

/// `(m, n, k)`, after checking that the operands fit each other.
fn extents(a: &Tensor, ta: bool, b: &Tensor, tb: bool, bias: Option<&Tensor>) -> (usize, usize, usize) {
    let seen = |t: &Tensor, transposed| match transposed {
        false => (t.rows(), t.width()),
        true => (t.width(), t.rows()),
    };
    let ((m, k), (bk, n)) = (seen(a, ta), seen(b, tb));
    assert_eq!(k, bk, "matmul of {:?} (transposed: {ta}) and {:?} (transposed: {tb})", a.shape(), b.shape());
    assert_eq!(a.dtype(), b.dtype(), "matmul of two types");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), n, "a bias of {:?} for {n} columns", bias.shape());
        assert_eq!(a.dtype(), bias.dtype(), "a bias of another type");
    }
    (m, n, k)
}

fn product(
    cpu: &Cpu,
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
    c: &mut Tensor,
    pre: Option<&mut Tensor>,
) {
    let (m, n, k) = extents(a, ta, b, tb, bias);
    with_float!(a.dtype(), T => {
        let epilogue = Epilogue {
            bias: bias.map(|bias| bias.slice::<T>()),
            activation,
            pre: pre.map(|pre| MatrixMut { data: pre.slice_mut::<T>(), row_stride: n }),
        };
        let a = Matrix::of(a.slice::<T>(), a.width(), ta);
        let b = Matrix::of(b.slice::<T>(), b.width(), tb);
        let c = MatrixMut { data: c.slice_mut::<T>(), row_stride: n };
        parallel(cpu, m, n, k, a, b, c, false, epilogue);
    });
}

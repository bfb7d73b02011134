//! One row times a matrix: what each layer does for one token of a text that is being written.
//!
//! `x: [1, k]`, `w: [k, n]` or the transpose of what is stored ([`Operand`]), `y: [1, n]`.
//!
//! Every weight is used once, so all there is to do is to read them at the speed of memory: nothing is
//! packed, and a matrix is cut so that each task reads one stretch of it from end to end. A weight that is
//! stored by outputs gives each task complete sums; one that is stored by inputs gives it partial sums of all
//! outputs, which are added in the order of the tasks. Tasks are cut by the matrix's size alone, so the bits
//! do not depend on the number of threads. They are not those of a product of several rows, whose sums run in
//! another order.

pub(crate) mod cuda;
mod host;

use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::ops::activation::{self, ActivationFn};
use crate::ops::elementwise::add_into;
use crate::ops::{layer_norm, rms_norm};
use crate::tensor::Tensor;

/// What becomes of the product `x w`: `f(x w + bias) + plus`, each where it is there. On a GPU that costs no
/// pass of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct MatvecEpilogue<'a> {
    /// `[n]`
    pub bias: Option<&'a Tensor>,
    /// f.
    pub activation: Option<ActivationFn>,
    /// n elements, in any shape.
    pub plus: Option<&'a Tensor>,
}

/// A norm that x goes through first: [`layer_norm`] where it is centred, else [`rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct InputNorm<'a> {
    /// Whether the mean is subtracted.
    pub centred: bool,
    /// `[k]`
    pub scale: &'a Tensor,
    /// `[k]`, of a centred one.
    pub shift: Option<&'a Tensor>,
    /// What is added to the variance.
    pub eps: f32,
}

impl InputNorm<'_> {
    /// The norm of x by itself.
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        let InputNorm { centred, scale, shift, eps } = *self;
        if !centred {
            return Ok(rms_norm::forward(x, scale, eps)?.0);
        }
        let shift = match shift {
            Some(shift) => shift.clone(),
            None => Tensor::zeros(&scale.device(), scale.shape(), scale.dtype(), Category::Workspace)?,
        };
        Ok(layer_norm::forward(x, scale, &shift, eps)?.0)
    }
}

/// The product of x after a norm. On a GPU that can, the norm is fused into the product's kernel.
pub fn matvec_of_norm<'a>(
    x: &Tensor,
    norm: InputNorm<'_>,
    w: impl Into<Operand<'a>>,
    after: MatvecEpilogue<'_>,
    category: Category,
) -> Result<Tensor> {
    let w = w.into();
    match x.device() {
        Device::Cuda(gpu) if cuda::takes_norm(&gpu, &norm, x, w) => {
            product(x, Some(norm), w, after, category)
        }
        _ => product(&norm.of(x)?, None, w, after, category),
    }
}

/// `x w` and what comes after it, as a new tensor `[1, n]` of `x`'s type.
pub fn matvec<'a>(
    x: &Tensor,
    w: impl Into<Operand<'a>>,
    after: MatvecEpilogue<'_>,
    category: Category,
) -> Result<Tensor> {
    product(x, None, w.into(), after, category)
}

/// The norm is one that a GPU takes.
fn product(
    x: &Tensor,
    norm: Option<InputNorm<'_>>,
    w: Operand<'_>,
    after: MatvecEpilogue<'_>,
    category: Category,
) -> Result<Tensor> {
    let (k, n) = w.extents();
    assert_eq!((x.rows(), x.width()), (1, k), "a row times a matrix of {k} x {n}");
    assert!(w.is_full(), "a row times some columns of a matrix");
    assert_eq!(x.dtype(), w.tensor.dtype(), "a row and a matrix of two types");
    let fits = |added: &Tensor| added.len() == n && added.dtype() == x.dtype();
    assert!(after.bias.is_none_or(fits) && after.plus.is_none_or(fits), "what is added to {n} columns");
    let mut y = Tensor::empty(&x.device(), &[1, n], x.dtype(), category)?;
    match x.device() {
        Device::Cuda(gpu) => cuda::matvec(&gpu, x, norm, w, after, &mut y)?,
        Device::Cpu(cpu) => {
            host::matvec(&cpu, x, w, after.bias, &mut y)?;
            if let Some(kind) = after.activation {
                y = activation::forward_owned(kind, y)?;
            }
            if let Some(plus) = after.plus {
                add_into(&mut y, &plus.clone().reshape(&[1, n]))?;
            }
        }
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, tensor, values, wide};
    use proptest::prelude::*;

    /// `x w + bias` by plain loops; w: [k, n].
    fn plain(x: &[f64], w: &[f64], bias: &[f64]) -> Vec<f64> {
        let n = bias.len();
        let sum = |j: usize| x.iter().enumerate().map(|(p, x)| x * w[p * n + j]).sum::<f64>();
        (0..n).map(|j| sum(j) + bias[j]).collect()
    }

    fn compare(k: usize, n: usize, seed: u64) {
        let (x, w, bias) = (values(seed, k, 1.0), values(seed ^ 1, k * n, 1.0), values(seed ^ 2, n, 1.0));
        let turned: Vec<f32> = (0..n * k).map(|at| w[at % k * n + at / k]).collect();
        let expected = plain(&wide(&x), &wide(&w), &wide(&bias));
        let without = plain(&wide(&x), &wide(&w), &vec![0.0; n]);
        let plus = values(seed ^ 3, n, 1.0);
        let through: Vec<f64> =
            expected.iter().zip(&plus).map(|(y, plus)| y.max(0.0) + f64::from(*plus)).collect();
        check(&[expected.clone(), expected, without, through.clone(), through], |device, dtype| {
            let (x, bias) = (tensor(device, dtype, &[1, k], &x), tensor(device, dtype, &[n], &bias));
            let (by_inputs, by_outputs) =
                (tensor(device, dtype, &[k, n], &w), tensor(device, dtype, &[n, k], &turned));
            let plus = tensor(device, dtype, &[1, 1, n], &plus);
            let category = Category::Transient;
            let with_bias = MatvecEpilogue { bias: Some(&bias), ..MatvecEpilogue::default() };
            let all = MatvecEpilogue { activation: Some(ActivationFn::Relu), plus: Some(&plus), ..with_bias };
            vec![
                matvec(&x, &by_inputs, with_bias, category).unwrap(),
                matvec(&x, by_outputs.t(), with_bias, category).unwrap(),
                matvec(&x, &by_inputs, MatvecEpilogue::default(), category).unwrap(),
                matvec(&x, &by_inputs, all, category).unwrap(),
                matvec(&x, by_outputs.t(), all, category).unwrap(),
            ]
        });
    }

    /// The norm fused into the product, beside the norm and then the product.
    fn compare_of_norm(k: usize, n: usize) {
        let (x, w) = (values(1, k, 2.0), values(2, k * n, 1.0));
        let (scale, shift) = (values(3, k, 1.0), values(4, k, 1.0));
        let wide_x = wide(&x);
        let mean = wide_x.iter().sum::<f64>() / k as f64;
        let expected = |mean: f64, shift: &dyn Fn(usize) -> f64| {
            let variance = wide_x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / k as f64;
            let normed = wide_x
                .iter()
                .enumerate()
                .map(|(i, x)| (x - mean) / (variance + 1e-3).sqrt() * f64::from(scale[i]) + shift(i));
            plain(&normed.collect::<Vec<_>>(), &wide(&w), &vec![0.0; n])
        };
        let with_shift = expected(mean, &|i| f64::from(shift[i]));
        let (without, rms) = (expected(mean, &|_| 0.0), expected(0.0, &|_| 0.0));
        check(&[with_shift, without, rms], |device, dtype| {
            let row = |data: &[f32]| tensor(device, dtype, &[k], data);
            let (x, w) = (tensor(device, dtype, &[1, k], &x), tensor(device, dtype, &[k, n], &w));
            let (scale, shift, eps) = (row(&scale), row(&shift), 1e-3);
            let plain = InputNorm { centred: true, scale: &scale, shift: None, eps };
            let norms =
                [InputNorm { shift: Some(&shift), ..plain }, plain, InputNorm { centred: false, ..plain }];
            norms
                .map(|norm| {
                    matvec_of_norm(&x, norm, &w, MatvecEpilogue::default(), Category::Transient).unwrap()
                })
                .into()
        });
    }

    #[test]
    fn a_norm_and_a_product_agree_with_plain_loops() {
        for (k, n) in [(64, 40), (37, 21), (1000, 777), (17_000, 24)] {
            compare_of_norm(k, n);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        /// Stored either way, with lengths that fill no vector.
        #[test]
        fn a_row_times_a_matrix_agrees_with_plain_loops(k in 1usize..150, n in 1usize..150, seed: u64) {
            compare(k, n, seed);
        }
    }

    /// Matrices of several tasks, whose last is shorter than the others.
    #[test]
    fn large_matrices_agree_with_plain_loops() {
        compare(1000, 777, 3);
        compare(77, 5000, 4);
        compare(2051, 320, 5);
        // More rows for each block than it holds of x at once.
        compare(17_000, 24, 6);
    }
}

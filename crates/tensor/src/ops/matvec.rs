//! One row times a matrix: what each layer does for one token of a text that is being written.
//!
//! `x: [1, k]`, `w: [k, n]` or the transpose of what is stored ([`Operand`]), `y: [1, n]`.
//!
//! Every weight is used once, so all there is to do is to read them at the speed of memory: nothing is packed, and a
//! matrix is cut so that each task reads one stretch of it from end to end. A weight that is stored by outputs gives
//! each task whole sums; one that is stored by inputs gives it summands of all outputs, which are added in the order
//! of the tasks. Tasks are cut by the matrix's size alone, so the bits do not depend on the number of threads. They are
//! not those of a product of several rows, whose sums run in another order.

pub(crate) mod cuda;
mod host;

use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::operand::Operand;
use crate::tensor::Tensor;

/// `x w + bias`, as a new tensor `[1, n]` of `x`'s type; `bias: [n]`.
pub fn matvec<'a>(
    x: &Tensor,
    w: impl Into<Operand<'a>>,
    bias: Option<&Tensor>,
    category: Category,
) -> Result<Tensor> {
    let w = w.into();
    let (k, n) = w.extents();
    assert_eq!((x.rows(), x.width()), (1, k), "a row times a matrix of {k} x {n}");
    assert_eq!(x.dtype(), w.tensor.dtype(), "a row and a matrix of two types");
    assert!(bias.is_none_or(|bias| bias.len() == n && bias.dtype() == x.dtype()), "a bias of {n} columns");
    let mut y = Tensor::empty(&x.device(), &[1, n], x.dtype(), category)?;
    match x.device() {
        Device::Cpu(cpu) => host::matvec(&cpu, x, w, bias, &mut y)?,
        Device::Cuda(gpu) => cuda::matvec(&gpu, x, w, bias, &mut y)?,
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
        check(&[expected.clone(), expected, without], |device, dtype| {
            let (x, bias) = (tensor(device, dtype, &[1, k], &x), tensor(device, dtype, &[n], &bias));
            let (by_inputs, by_outputs) =
                (tensor(device, dtype, &[k, n], &w), tensor(device, dtype, &[n, k], &turned));
            let category = Category::Transient;
            vec![
                matvec(&x, &by_inputs, Some(&bias), category).unwrap(),
                matvec(&x, by_outputs.t(), Some(&bias), category).unwrap(),
                matvec(&x, &by_inputs, None, category).unwrap(),
            ]
        });
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
    }
}

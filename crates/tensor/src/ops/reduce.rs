//! Sums over many elements. x: `[rows, c]`.
//!
//! Column sums run in f32 over fixed chunks of rows, whose partial sums are added in their order; norms and dot
//! products run in f64, which costs nothing beside the memory they read.

pub(crate) mod cuda;

use crate::cpu::{Cpu, lanes};
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::{self, CHUNK};
use crate::ops::update;
use crate::tensor::Tensor;
use crate::{simd, with_float};

/// The sum of the rows of x `[.., c]`, a `[c]` in its type: the gradient of a bias.
pub fn sum_rows(x: &Tensor, category: Category) -> Result<Tensor> {
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::sum_rows(&cuda, x, category),
    };
    let (rows, c) = (x.rows(), x.width());
    let chunk = partial_rows(c);
    let mut partial = partials(x, rows, c)?;
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        let sums = partial.slice_mut::<f32>().chunks_mut(c.max(1)).enumerate();
        chunks::each(&cpu, sums, |(i, sums)| {
            add_rows(cpu.isa(), x, c, 0, i * chunk..((i + 1) * chunk).min(rows), sums)
        });
    });
    total(&cpu, &partial, 0, c, x.dtype(), category)
}

/// The sum of the squares. On a GPU this waits for all queued work, as the number goes to the host.
pub fn squared_norm(x: &Tensor) -> Result<f64> {
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            Ok(cpu.map_chunks(x.len(), CHUNK, |at| square(cpu.isa(), &x[at])).iter().sum())
        }),
        Device::Cuda(cuda) => cuda::squared_norm(&cuda, x),
    }
}

/// The sum of the squares of all tensors, of either float type and on one device. A GPU takes them all in one
/// launch and is waited for once.
pub fn squared_norm_all(tensors: &[&Tensor]) -> Result<f64> {
    match tensors.first().map(|x| x.device()) {
        Some(Device::Cuda(cuda)) => Ok(update::cuda::squared_norms(&cuda, tensors)?.iter().sum()),
        _ => tensors.iter().map(|x| squared_norm(x)).sum(),
    }
}

/// The sum of the products of elements of the same index; as [`squared_norm`], it waits for a GPU.
pub fn dot(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.shape(), b.shape(), "dot");
    match a.device() {
        Device::Cpu(cpu) => with_float!(a.dtype(), T => with_float!(b.dtype(), U => {
            let (a, b) = (a.slice::<T>(), b.slice::<U>());
            Ok(cpu.map_chunks(a.len(), CHUNK, |at| product(cpu.isa(), &a[at.clone()], &b[at])).iter().sum())
        })),
        Device::Cuda(cuda) => cuda::dot(&cuda, a, b),
    }
}

/// How many rows of width c one partial sum covers: some chunks' worth, as each leaves a row of its own behind.
pub(crate) fn partial_rows(c: usize) -> usize {
    (4 * CHUNK / c.max(1)).max(32)
}

/// Memory for the partial sums of `rows` rows of width c, `width` numbers each: `[chunks, width]`.
pub(crate) fn partials(x: &Tensor, rows: usize, width: usize) -> Result<Tensor> {
    let chunks = rows.div_ceil(partial_rows(x.width()));
    Tensor::empty(&x.device(), &[chunks, width], DType::F32, Category::Workspace)
}

/// The sum of columns `first .. first + c` of partial sums, in their order.
pub(crate) fn total(
    cpu: &Cpu,
    partial: &Tensor,
    first: usize,
    c: usize,
    dtype: DType,
    category: Category,
) -> Result<Tensor> {
    let mut y = Tensor::empty(&partial.device(), &[c], dtype, category)?;
    let (rows, width) = (partial.rows(), partial.width());
    let partial = partial.slice::<f32>();
    with_float!(dtype, T => cpu.for_chunks(y.slice_mut::<T>(), COLUMNS, |at, y| {
        add_rows(cpu.isa(), partial, width, first + at.start, 0..rows, y)
    }));
    Ok(y)
}

/// Columns that are summed at a time: their sums stay in the first-level cache.
pub(crate) const COLUMNS: usize = 512;

simd! {
    /// y = the sum of the given rows of x, from column `first` on, as many columns as y has.
    pub(crate) fn add_rows[T: Float, O: Float, I: RowNumbers](
        x: &[T],
        width: usize,
        first: usize,
        rows: I,
        y: &mut [O],
    ) {
        for (i, y) in y.chunks_mut(COLUMNS).enumerate() {
            let mut sums = [0f32; COLUMNS];
            let sums = &mut sums[..y.len()];
            for row in rows.clone() {
                let start = row * width + first + i * COLUMNS;
                for (sum, x) in sums.iter_mut().zip(&x[start..start + y.len()]) {
                    *sum += x.to_f32();
                }
            }
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = O::from_f32(*sum);
            }
        }
    }

    fn square[T: Float](x: &[T]) -> f64 {
        lanes::sum(x, |x| f64::from(x) * f64::from(x))
    }

    fn product[T: Float, U: Float](a: &[T], b: &[U]) -> f64 {
        lanes::sum2(a, b, |a, b| f64::from(a) * f64::from(b))
    }
}

/// Row numbers that can be run through more than once.
pub(crate) trait RowNumbers: Iterator<Item = usize> + Clone {}
impl<I: Iterator<Item = usize> + Clone> RowNumbers for I {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, devices, tensor, values, wide};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn sums_agree_with_plain_loops(rows in 0usize..700, c in 1usize..1200, seed: u64) {
            let rows = rows.min(300_000 / c);
            let (a, b) = (values(seed, rows * c, 1.0), values(seed ^ 1, rows * c, 1.0));
            let mut columns = vec![0.0; c];
            for (i, &x) in a.iter().enumerate() {
                columns[i % c] += f64::from(x);
            }
            check(&[columns], |device, dtype| {
                vec![sum_rows(&tensor(device, dtype, &[rows, c], &a), Category::Gradients).unwrap()]
            });
            let (a64, b64) = (wide(&a), wide(&b));
            let (square, product) = (crate::testing::dot(&a64, &a64), crate::testing::dot(&a64, &b64));
            for threads in devices() {
                for dtype in [DType::F32, DType::Bf16] {
                    let [one, two, three] = threads.each_ref().map(|device| {
                        let x = tensor(device, dtype, &[rows, c], &a);
                        (squared_norm(&x).unwrap(), dot(&x, &tensor(device, dtype, &[rows, c], &b)).unwrap())
                    });
                    let all = threads.each_ref().map(|device| {
                        let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
                        let (x, y) = (tensor(device, dtype, &[rows, c], &a), tensor(device, other, &[c, rows], &b));
                        squared_norm_all(&[&x, &y, &tensor(device, dtype, &[0], &[]), &x]).unwrap()
                    });
                    let expected = 2.0 * square + crate::testing::dot(&b64, &b64);
                    prop_assert!(all[0] == all[1] && all[0] == all[2]);
                    prop_assert!((all[0] - expected).abs() <= 1e-12 * expected);
                    prop_assert_eq!(one, two);
                    prop_assert_eq!(one, three);
                    prop_assert!((one.0 - square).abs() <= 1e-12 * square);
                    prop_assert!((one.1 - product).abs() <= 1e-12 * square.max(1e-30));
                }
            }
        }
    }

    #[test]
    fn squares_beyond_the_range_of_f32_do_not_overflow() {
        for [device, ..] in devices() {
            let x = tensor(device, DType::F32, &[3], &[1e30, 0.0, 0.0]);
            assert!((squared_norm(&x).unwrap() / 1e60 - 1.0).abs() < 1e-6);
            assert!((squared_norm_all(&[&x, &x]).unwrap() / 2e60 - 1.0).abs() < 1e-6);
        }
        assert_eq!(squared_norm_all(&[]).unwrap(), 0.0);
    }
}

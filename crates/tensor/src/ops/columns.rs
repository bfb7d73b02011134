//! Some columns of a tensor, out of it and back into it: what branches that stand side by side are made of,
//! and cut into.
//!
//! x: `[.., c]`, every dimension but the last counts as rows.

pub(crate) mod cuda;

use std::ops::Range;

use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::pieces;
use crate::tensor::Tensor;
use crate::with_float;

/// A copy of columns `at`: `[.., at.len()]`.
pub fn take(x: &Tensor, at: Range<usize>, category: Category) -> Result<Tensor> {
    let c = x.width();
    assert!(at.start <= at.end && at.end <= c, "columns {at:?} of {:?}", x.shape());
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("a tensor with at least one dimension") = at.len();
    let mut part = Tensor::empty(&x.device(), &shape, x.dtype(), category)?;
    if part.is_empty() {
        return Ok(part);
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let (x, width) = (x.slice::<T>(), at.len());
            cpu.for_pieces(part.slice_mut::<T>(), pieces::rows(width) * width, |range, part| {
                for (row, part) in (range.start / width..).zip(part.chunks_exact_mut(width)) {
                    part.copy_from_slice(&x[row * c + at.start..][..width]);
                }
            });
        }),
        Device::Cuda(cuda) => cuda::copy(&cuda, x, at.start, &mut part, 0, at.len())?,
    }
    Ok(part)
}

/// Overwrites the columns of x from `first` on with those of `part`, which must have as many rows; x must
/// have one owner.
pub fn put(x: &mut Tensor, first: usize, part: &Tensor) -> Result<()> {
    let (c, width) = (x.width(), part.width());
    assert!(first + width <= c, "columns of {:?} into {:?} from {first} on", part.shape(), x.shape());
    assert_eq!(
        (part.rows(), part.dtype()),
        (x.rows(), x.dtype()),
        "columns of other rows or of another type"
    );
    if part.is_empty() {
        return Ok(());
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let part = part.slice::<T>();
            cpu.for_pieces(x.slice_mut::<T>(), pieces::rows(c) * c, |range, x| {
                for (row, x) in (range.start / c..).zip(x.chunks_exact_mut(c)) {
                    x[first..first + width].copy_from_slice(&part[row * width..][..width]);
                }
            });
        }),
        Device::Cuda(cuda) => cuda::copy(&cuda, part, 0, x, first, width)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{devices, tensor, values};

    #[test]
    fn columns_come_out_and_go_back_in() {
        for (rows, c, cut) in [(70, 24, 8), (301, 1000, 333), (5, 3, 3), (1, 64, 0)] {
            let (x, other) = (values(1, rows * c, 1.0), values(2, rows * cut, 1.0));
            let columns = |at: Range<usize>| -> Vec<f32> {
                x.chunks(c).flat_map(|row| row[at.clone()].to_vec()).collect()
            };
            for device in devices().iter().flatten() {
                for dtype in [DType::F32, DType::Bf16] {
                    let whole = tensor(device, dtype, &[1, rows, c], &x);
                    for at in [0..cut, cut..c, c - cut..c] {
                        let part = take(&whole, at.clone(), Category::Workspace).unwrap();
                        assert_eq!(part.shape(), [1, rows, at.len()]);
                        assert_eq!(part.to_f32(), columns(at));
                    }
                    let mut changed = whole.duplicate(Category::Transient).unwrap();
                    put(&mut changed, c - cut, &tensor(device, dtype, &[rows, cut], &other)).unwrap();
                    let expected = x.chunks(c).enumerate();
                    let expected: Vec<f32> = expected
                        .flat_map(|(i, row)| [&row[..c - cut], &other[i * cut..(i + 1) * cut]].concat())
                        .collect();
                    assert_eq!(changed.to_f32(), expected);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "columns 1..3 of [8, 2]")]
    fn columns_that_are_not_there_are_refused() {
        let _ = take(&tensor(&devices()[0][0], DType::F32, &[8, 2], &[0.0; 16]), 1..3, Category::Workspace);
    }
}

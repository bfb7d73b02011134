//! Slices of a tensor's columns, out of it and back into it: what concatenated branches are made of, and
//! split into.
//!
//! x: `[.., c]`, every dimension but the last counts as rows.

pub(crate) mod cuda;

use std::ops::Range;

use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks;
use crate::tensor::Tensor;
use crate::with_float;

/// A copy of columns `at`: `[.., at.len()]`.
pub fn take(x: &Tensor, at: Range<usize>, category: Category) -> Result<Tensor> {
    let c = x.width();
    assert!(at.start <= at.end && at.end <= c, "columns {at:?} of {:?}", x.shape());
    let mut slice = Tensor::empty(&x.device(), &x.shape_with_width(at.len()), x.dtype(), category)?;
    if slice.is_empty() {
        return Ok(slice);
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let (x, width) = (x.slice::<T>(), at.len());
            cpu.for_chunks(slice.slice_mut::<T>(), chunks::rows(width) * width, |range, slice| {
                for (row, slice) in (range.start / width..).zip(slice.chunks_exact_mut(width)) {
                    slice.copy_from_slice(&x[row * c + at.start..][..width]);
                }
            });
        }),
        Device::Cuda(cuda) => cuda::copy(&cuda, x, at.start, &mut slice, 0, at.len())?,
    }
    Ok(slice)
}

/// Overwrites the columns of x from `first` on with those of `slice`, which must have as many rows; x must
/// have one owner.
pub fn put(x: &mut Tensor, first: usize, slice: &Tensor) -> Result<()> {
    let (c, width) = (x.width(), slice.width());
    assert!(first + width <= c, "columns of {:?} into {:?} from {first} on", slice.shape(), x.shape());
    assert_eq!(
        (slice.rows(), slice.dtype()),
        (x.rows(), x.dtype()),
        "columns of other rows or of another type"
    );
    if slice.is_empty() {
        return Ok(());
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let slice = slice.slice::<T>();
            cpu.for_chunks(x.slice_mut::<T>(), chunks::rows(c) * c, |range, x| {
                for (row, x) in (range.start / c..).zip(x.chunks_exact_mut(c)) {
                    x[first..first + width].copy_from_slice(&slice[row * width..][..width]);
                }
            });
        }),
        Device::Cuda(cuda) => cuda::copy(&cuda, slice, 0, x, first, width)?,
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
                    let full = tensor(device, dtype, &[1, rows, c], &x);
                    for at in [0..cut, cut..c, c - cut..c] {
                        let slice = take(&full, at.clone(), Category::Workspace).unwrap();
                        assert_eq!(slice.shape(), [1, rows, at.len()]);
                        assert_eq!(slice.to_f32(), columns(at));
                    }
                    let mut changed = full.duplicate(Category::Transient).unwrap();
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

//! Some rows of a tensor, out of it and back into it: for work that goes over its rows in chunks.

use std::ops::Range;

use crate::error::Result;
use crate::memory::Category;
use crate::ops::flat;
use crate::tensor::Tensor;

/// A copy of rows `at` of x `[.., c]`: `[rows, c]`.
pub fn take(x: &Tensor, at: Range<usize>, category: Category) -> Result<Tensor> {
    let c = x.width();
    assert!(at.start <= at.end && at.end <= x.rows(), "rows {at:?} of {:?}", x.shape());
    Ok(flat::take(x, at.start * c..at.end * c, category)?.reshape(&[at.len(), c]))
}

/// Overwrites the rows of x from `first` on with those of `slice`, which must be as wide; x must have one owner.
pub fn put(x: &mut Tensor, first: usize, slice: &Tensor) -> Result<()> {
    assert!(
        first + slice.rows() <= x.rows(),
        "rows of {:?} into {:?} from {first} on",
        slice.shape(),
        x.shape()
    );
    assert_eq!((slice.width(), slice.dtype()), (x.width(), x.dtype()), "rows of another width or type");
    flat::put(x, first * slice.width(), slice, 0..slice.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{devices, tensor, values};

    #[test]
    fn rows_come_out_and_go_back_in() {
        let (rows, c) = (70, 1001);
        let (x, other) = (values(1, rows * c, 1.0), values(2, rows * c, 1.0));
        for device in devices().iter().flatten() {
            for dtype in [DType::F32, DType::Bf16] {
                let full = tensor(device, dtype, &[7, 10, c], &x);
                let mut changed = full.duplicate(Category::Transient).unwrap();
                for at in [0..1, 3..3, 5..64, 69..70, 0..70] {
                    let slice = take(&full, at.clone(), Category::Workspace).unwrap();
                    assert_eq!(slice.shape(), [at.len(), c]);
                    assert_eq!(slice.to_f32(), x[at.start * c..at.end * c]);
                }
                let middle = tensor(device, dtype, &[59, c], &other[..59 * c]);
                put(&mut changed, 5, &middle).unwrap();
                let expected = [&x[..5 * c], &other[..59 * c], &x[64 * c..]].concat();
                assert_eq!(changed.to_f32(), expected);
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows 3..9 of [8, 2]")]
    fn rows_that_are_not_there_are_refused() {
        let _ = take(&tensor(&devices()[0][0], DType::F32, &[8, 2], &[0.0; 16]), 3..9, Category::Workspace);
    }
}

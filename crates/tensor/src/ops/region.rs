//! A rectangle of pixels of every image of a batch, out of a tensor and back into it: what neighbours send
//! each other where an image is tiled over ranks.
//!
//! x: [batch, h, w, c]; slice: [batch, rows, columns, c], contiguous, so that it can be a message. Gradients
//! of pixels that several ranks have read are added back, each sum in f32 and rounded once.

pub(crate) mod cuda;

use std::ops::Range;

use super::image;
use crate::device::Device;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// A copy of these rows and columns: [batch, rows, columns, c].
pub fn take(x: &Tensor, rows: Range<usize>, columns: Range<usize>, category: Category) -> Result<Tensor> {
    let [batch, _, _, c] = image::shape(x.shape());
    let shape = [batch, rows.len(), columns.len(), c];
    let mut slice = Tensor::empty(&x.device(), &shape, x.dtype(), category)?;
    let at = Rectangle::new(x, [rows.start, columns.start], &slice);
    if slice.is_empty() {
        return Ok(slice);
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            cpu.for_chunks(slice.slice_mut::<T>(), at.chunk(), |range, slice| {
                for (line, slice) in (range.start / at.run..).zip(slice.chunks_exact_mut(at.run)) {
                    slice.copy_from_slice(&x[at.line(line)..][..at.run]);
                }
            });
        }),
        Device::Cuda(cuda) => cuda::take(&cuda, x, &at, &mut slice)?,
    }
    Ok(slice)
}

/// Overwrites the pixels of x from row and column `first` on with those of `slice`; x must have one owner.
pub fn put(x: &mut Tensor, first: [usize; 2], slice: &Tensor) -> Result<()> {
    merge(x, first, slice, false)
}

/// Adds `slice` to the pixels of x from row and column `first` on; x must have one owner.
pub fn add(x: &mut Tensor, first: [usize; 2], slice: &Tensor) -> Result<()> {
    merge(x, first, slice, true)
}

fn merge(x: &mut Tensor, first: [usize; 2], slice: &Tensor, add: bool) -> Result<()> {
    assert_eq!(slice.dtype(), x.dtype(), "pixels of another type");
    let at = Rectangle::new(x, first, slice);
    if slice.is_empty() {
        return Ok(());
    }
    match x.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), T => {
            let slice = slice.slice::<T>();
            // An image a task: the lines of one lie in it, and in no other's.
            cpu.for_chunks(x.slice_mut::<T>(), at.image, |range, x| {
                let n = range.start / at.image;
                for i in 0..at.rows {
                    let line = n * at.rows + i;
                    let from = &slice[line * at.run..(line + 1) * at.run];
                    let into = &mut x[at.line(line) - range.start..][..at.run];
                    match add {
                        true => into.iter_mut().zip(from).for_each(|(x, d)| *x = T::from_f32(x.to_f32() + d.to_f32())),
                        false => into.copy_from_slice(from),
                    }
                }
            });
        }),
        Device::Cuda(cuda) => cuda::merge(&cuda, x, &at, slice, add)?,
    }
    Ok(())
}

/// Where the pixels of a slice lie in x, in elements. A line is a row of the slice: consecutive in both.
#[derive(Debug, Clone, Copy)]
struct Rectangle {
    /// Samples of the slice.
    batch: usize,
    rows: usize,
    /// Elements of a line.
    run: usize,
    /// Of x: elements of an image, of a row, and before the first line.
    image: usize,
    row: usize,
    first: usize,
    c: usize,
}

impl Rectangle {
    #[track_caller]
    fn new(x: &Tensor, [row, column]: [usize; 2], slice: &Tensor) -> Rectangle {
        let [batch, h, w, c] = image::shape(x.shape());
        let [images, rows, columns, channels] = image::shape(slice.shape());
        let inside = row + rows <= h && column + columns <= w && (images, channels) == (batch, c);
        assert!(inside, "pixels of {:?} from ({row}, {column}) on of {:?}", slice.shape(), x.shape());
        let first = (row * w + column) * c;
        Rectangle { batch, rows, run: columns * c, image: h * w * c, row: w * c, first, c }
    }

    /// Where in x a line begins.
    fn line(&self, line: usize) -> usize {
        line / self.rows * self.image + line % self.rows * self.row + self.first
    }

    /// Elements of a slice that one task copies.
    fn chunk(&self) -> usize {
        super::chunks::rows(self.run) * self.run
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{check, tensor, values, wide};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn rectangles_come_out_go_back_in_and_add_up(
            (batch, h, w, c) in (1usize..4, 1usize..8, 1usize..8, 1usize..40),
            (low, high, left, right) in (0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0),
        ) {
            let range = |a: f64, b: f64, n: usize| {
                let [a, b] = [a, b].map(|fraction| (fraction * (n + 1) as f64) as usize);
                a.min(b)..a.max(b)
            };
            let (rows, columns) = (range(low, high, h), range(left, right, w));
            let shape = [batch, h, w, c];
            let x = values(1, shape.iter().product(), 1.0);
            let slice = [batch, rows.len(), columns.len(), c];
            let other = values(2, slice.iter().product(), 1.0);
            let inside = |index: usize| {
                let (i, j) = (index / c / w % h, index / c % w);
                rows.contains(&i) && columns.contains(&j)
            };
            let indices: Vec<usize> = (0..x.len()).filter(|i| inside(*i)).collect();
            let x64 = wide(&x);
            let (mut overwritten, mut added) = (x64.clone(), x64.clone());
            for (element, other) in indices.iter().zip(&other) {
                overwritten[*element] = f64::from(*other);
                added[*element] += f64::from(*other);
            }
            let expected = [indices.iter().map(|i| x64[*i]).collect(), overwritten, added];
            check(&expected, |device, dtype| {
                let other = tensor(device, dtype, &slice, &other);
                let x = tensor(device, dtype, &shape, &x);
                let taken = take(&x, rows.clone(), columns.clone(), Category::Workspace).unwrap();
                assert_eq!(taken.shape(), slice);
                let [mut into, mut onto] = [0; 2].map(|_| x.duplicate(Category::Transient).unwrap());
                put(&mut into, [rows.start, columns.start], &other).unwrap();
                add(&mut onto, [rows.start, columns.start], &other).unwrap();
                vec![taken, into, onto]
            });
        }
    }

    #[test]
    #[should_panic(expected = "pixels of [1, 2, 2, 1] from (1, 0) on of [1, 2, 2, 1]")]
    fn pixels_that_are_not_there_are_refused() {
        let device = &crate::testing::devices()[0][0];
        let mut x = tensor(device, crate::DType::F32, &[1, 2, 2, 1], &[0.0; 4]);
        let slice = x.duplicate(Category::Workspace).unwrap();
        let _ = put(&mut x, [1, 0], &slice);
    }
}

//! A range of a tensor's elements, as they lie in memory, out of it and into another: for what is split over
//! ranks.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::CHUNK;
use crate::tensor::Tensor;

/// A copy of elements `at` of x, of any shape: `[elements]`.
pub fn take(x: &Tensor, at: Range<usize>, category: Category) -> Result<Tensor> {
    let mut part = Tensor::empty(&x.device(), &[at.len()], x.dtype(), category)?;
    put(&mut part, 0, x, at)?;
    Ok(part)
}

/// Overwrites the elements of `into` from `first` on with elements `at` of `from`, which has its type; `into`
/// must have one owner.
pub fn put(into: &mut Tensor, first: usize, from: &Tensor, at: Range<usize>) -> Result<()> {
    assert!(at.start <= at.end && at.end <= from.len(), "elements {at:?} of {:?}", from.shape());
    assert!(first + at.len() <= into.len(), "elements {at:?} into {:?} from {first} on", into.shape());
    assert_eq!(from.dtype(), into.dtype(), "elements of another type");
    let each = from.dtype().bytes();
    let (start, bytes) = (first * each, at.start * each..at.end * each);
    match from.device() {
        Device::Cpu(cpu) => {
            copy(&cpu, &from.bytes()[bytes.clone()], &mut into.bytes_mut()[start..][..bytes.len()])
        }
        Device::Cuda(_) => {
            into.cuda_buffer_mut().copy_range_from(start, from.cuda_buffer(), bytes.start, bytes.len())?;
        }
    }
    Ok(())
}

fn copy(cpu: &Cpu, from: &[u8], into: &mut [u8]) {
    cpu.for_chunks(into, 4 * CHUNK, |at, into| into.copy_from_slice(&from[at]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::{devices, tensor, values};

    #[test]
    fn elements_come_out_and_go_into_another_shape() {
        let (len, x, y) = (70_070, values(1, 70_070, 1.0), values(2, 70_070, 1.0));
        for device in devices().iter().flatten() {
            for dtype in [DType::F32, DType::Bf16] {
                let from = tensor(device, dtype, &[70, 7, 143], &x);
                for at in [0..1, 3..3, 5..66_000, len - 1..len, 0..len] {
                    let part = take(&from, at.clone(), Category::Workspace).unwrap();
                    assert_eq!(part.shape(), [at.len()]);
                    assert_eq!(part.to_f32(), x[at.clone()]);
                    let mut into = tensor(device, dtype, &[10, 7007], &y);
                    let first = len - at.len();
                    put(&mut into, first, &from, at.clone()).unwrap();
                    assert_eq!(into.to_f32(), [&y[..first], &x[at]].concat());
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "elements 3..9 of [4, 2]")]
    fn elements_that_are_not_there_are_refused() {
        let _ = take(&tensor(&devices()[0][0], DType::F32, &[4, 2], &[0.0; 8]), 3..9, Category::Workspace);
    }
}

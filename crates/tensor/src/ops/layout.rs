//! Moves without arithmetic: between images and rows, and between numbers of channels.
//!
//! Images are channels-last; a flattened image is in PyTorch's order (c, h, w), so that the linear layer after
//! it has the same columns in both. x: [batch, h, w, c]; flat: [batch, c h w].

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::Element;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// Elements on a side of the squares in which a matrix is transposed.
const SQUARE: usize = 16;

/// Elements that one task moves.
const CHUNK: usize = 64 << 10;

/// Images as rows: [batch, h, w, c] to [batch, c h w]. Free where an image is one pixel or has one channel.
pub fn flatten(x: &Tensor) -> Result<Tensor> {
    let &[batch, h, w, c] = x.shape() else { panic!("images are [batch, h, w, c], got {:?}", x.shape()) };
    transpose(x, h * w, c, &[batch, c * h * w])
}

/// Rows as images of `input_shape`: what undoes [`flatten`], and its gradient.
pub fn unflatten(dy: &Tensor, input_shape: &[usize]) -> Result<Tensor> {
    let &[batch, h, w, c] = input_shape else { panic!("images are [batch, h, w, c], got {input_shape:?}") };
    assert_eq!(dy.shape(), [batch, c * h * w], "the gradient of flattened images {input_shape:?}");
    transpose(dy, c, h * w, input_shape)
}

/// Appends channels of zeros: [.., c] to [.., channels].
pub fn pad_channels(x: &Tensor, channels: usize) -> Result<Tensor> {
    assert!(channels >= x.width(), "{} channels cannot be padded to {channels}", x.width());
    resize(x, channels, Category::Transient)
}

/// Keeps the first channels: [.., c] to [.., channels]; the gradient of [`pad_channels`].
pub fn crop_channels(dy: &Tensor, channels: usize) -> Result<Tensor> {
    assert!(channels <= dy.width(), "{} channels cannot be cropped to {channels}", dy.width());
    resize(dy, channels, Category::Transient)
}

/// x with this many channels; those that it lacks are zeros.
pub(super) fn resize(x: &Tensor, channels: usize, category: Category) -> Result<Tensor> {
    let c = x.width();
    if channels == c {
        return Ok(x.clone());
    }
    let device = x.device();
    let mut y = Tensor::empty(&device, &x.shape_with_width(channels), x.dtype(), category)?;
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::resize(gpu, x, &mut y).map(|()| y),
    };
    let kept = c.min(channels);
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        let rows = CHUNK.div_ceil(channels.max(1));
        cpu.for_chunks(y.slice_mut::<T>(), rows * channels.max(1), |range, y| {
            for (y, row) in y.chunks_exact_mut(channels).zip(range.start / channels..) {
                y[..kept].copy_from_slice(&x[row * c..][..kept]);
                y[kept..].fill(bytemuck::Zeroable::zeroed());
            }
        });
    });
    Ok(y)
}

/// Transposes each of the batch's [rows, columns] matrices.
fn transpose(x: &Tensor, rows: usize, columns: usize, shape: &[usize]) -> Result<Tensor> {
    if rows <= 1 || columns <= 1 {
        return Ok(x.clone().reshape(shape));
    }
    let device = x.device();
    let mut y = Tensor::empty(&device, shape, x.dtype(), Category::Transient)?;
    let cpu = match &device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(gpu) => return cuda::transpose(gpu, x, &mut y, rows, columns).map(|()| y),
    };
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        cpu.for_chunks(y.slice_mut::<T>(), rows * columns, |range, y| {
            transpose_one(&x[range], y, rows, columns);
        });
    });
    Ok(y)
}

/// In squares, so that the lines read and written stay in the cache together.
fn transpose_one<T: Element>(x: &[T], y: &mut [T], rows: usize, columns: usize) {
    for i0 in (0..rows).step_by(SQUARE) {
        for j0 in (0..columns).step_by(SQUARE) {
            for j in j0..(j0 + SQUARE).min(columns) {
                for i in i0..(i0 + SQUARE).min(rows) {
                    y[j * rows + i] = x[i * columns + j];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{check, tensor, values, wide};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn moves_agree_with_plain_loops(
            (batch, h, w) in (1usize..4, 1usize..9, 1usize..9),
            (c, more) in (1usize..40, 0usize..20),
        ) {
            let shape = [batch, h, w, c];
            let x = values(1, shape.iter().product(), 1.0);
            let mut flat = vec![0.0; x.len()];
            for (i, &x) in x.iter().enumerate() {
                let (n, pixel, k) = (i / c / (h * w), i / c % (h * w), i % c);
                flat[(n * c + k) * h * w + pixel] = f64::from(x);
            }
            let mut padded = Vec::new();
            for row in x.chunks(c) {
                padded.extend(row.iter().map(|&x| f64::from(x)).chain(std::iter::repeat_n(0.0, more)));
            }
            check(&[flat, wide(&x), padded, wide(&x)], |device, dtype| {
                let x = tensor(device, dtype, &shape, &x);
                let flat = flatten(&x).unwrap();
                let padded = pad_channels(&x, c + more).unwrap();
                assert_eq!((flat.shape(), padded.shape()), (&[batch, c * h * w][..], &[batch, h, w, c + more][..]));
                let back = unflatten(&flat, &shape).unwrap();
                let cropped = crop_channels(&padded, c).unwrap();
                vec![flat, back, padded, cropped]
            });
        }
    }
}

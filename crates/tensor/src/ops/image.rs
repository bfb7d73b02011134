//! What the operations on images share: their shape, and sums over windows that overlap.

use crate::cpu::scratch::ScratchPool;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// `[batch, h, w, c]`, or a panic.
pub(super) fn shape(shape: &[usize]) -> [usize; 4] {
    shape.try_into().unwrap_or_else(|_| panic!("images are [batch, h, w, c], got {shape:?}"))
}

/// A tensor of images of which `add(n, images)` forms a group, the images from `n` on, by adding to zeros, in
/// f32 whatever its type.
pub(super) fn sum(
    device: &Device,
    shape: &[usize],
    dtype: DType,
    group: usize,
    add: impl Fn(usize, &mut [f32]) + Sync + Send,
) -> Result<Tensor> {
    let Device::Cpu(cpu) = device else { crate::device::host_only() };
    let mut y = Tensor::empty(device, shape, dtype, Category::Transient)?;
    let image = shape[1..].iter().product::<usize>().max(1);
    let len = image * group;
    with_float!(dtype, T => {
        let wide = || Tensor::empty(device, &[len], DType::F32, Category::Workspace);
        let tasks = if dtype == DType::F32 { 0 } else { shape[0].div_ceil(group) };
        let scratch = ScratchPool::new(cpu, tasks, wide)?;
        cpu.for_chunks(y.slice_mut::<T>(), len, |range, y| {
            let n = range.start / image;
            if let Ok(images) = bytemuck::try_cast_slice_mut::<T, f32>(y)
                && dtype == DType::F32
            {
                images.fill(0.0);
                add(n, images);
                return;
            }
            scratch.lend(|wide| {
                let images = &mut wide.slice_mut::<f32>()[..y.len()];
                images.fill(0.0);
                add(n, images);
                y.iter_mut().zip(images).for_each(|(y, x)| *y = T::from_f32(*x));
            });
        });
    });
    Ok(y)
}

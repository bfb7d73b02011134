//! Convolution in bf16 by patches: a few rows of output at a time, the windows under them become the rows of a
//! matrix, their columns in the order u, v, c, so that channels-last pixels are copied in runs of kernel x c, and
//! one matrix product does the rest. The patches of a chunk stay in the second-level cache.

use std::ops::Range;

use super::{ConvDims, ConvParams, Padding, collect, image};
use crate::bf16;
use crate::cpu::gemm::{GemmWorkspace, MatrixMut, MatrixRef, serial};
use crate::cpu::scratch::ScratchPool;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Elements of patches that a task lays out at a time, and the fewest pixels: each product packs the weights
/// anew.
const PATCHES: usize = 64 << 10;
const PIXELS: usize = 512;

/// Elements of partial sums of a weight's gradient, all groups of rows together, and the most such groups.
const SUMS: usize = 8 << 20;
const GROUPS: usize = 8;

impl ConvDims {
    /// How many rows of output pixels make a chunk.
    fn chunk(&self) -> usize {
        (PATCHES / (self.ow * self.window())).max(PIXELS.div_ceil(self.ow)).min(self.rows())
    }

    /// Whether a pixel is its own patch.
    fn pointwise(&self) -> bool {
        self.conv == ConvParams { kernel: 1, stride: 1, padding: Padding::NONE }
    }

    /// Which of the kernel's rows fall on the image at output row `i`, and on which of its rows the first of
    /// them does.
    fn clip_rows(&self, i: usize) -> (Range<usize>, usize) {
        self.clip(i, self.h, self.conv.padding.top)
    }

    /// The same of columns.
    fn clip_columns(&self, j: usize) -> (Range<usize>, usize) {
        self.clip(j, self.w, self.conv.padding.left)
    }

    /// The same along a side of `size` pixels with so many zeros before them.
    fn clip(&self, at: usize, size: usize, before: usize) -> (Range<usize>, usize) {
        let start = at * self.conv.stride;
        let low = before.saturating_sub(start).min(self.conv.kernel);
        let high = (size + before).saturating_sub(start).min(self.conv.kernel).max(low);
        (low..high, if low < high { start + low - before } else { 0 })
    }
}

pub(super) fn forward(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&[f32]>,
    z: &ConvDims,
    y: &mut Tensor,
) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let (x, w) = (x.slice::<bf16>(), w.slice::<bf16>());
    let tasks = z.rows().div_ceil(z.chunk());
    let scratch = ScratchPool::new(cpu, tasks, || patch_space(&device, z))?;
    let packing = GemmWorkspace::new::<bf16>(cpu, tasks, &[(z.chunk() * z.ow, z.o, z.window())]);
    cpu.for_chunks(y.slice_mut::<bf16>(), z.chunk() * z.ow * z.o, |range, y| {
        scratch.lend(|patches| {
            let first = range.start / (z.ow * z.o);
            let pixels = y.len() / z.o;
            let patches = gather(x, patches.slice_mut::<bf16>(), first..first + pixels / z.ow, z);
            if let Some(bias) = bias {
                for y in y.chunks_exact_mut(z.o) {
                    y.iter_mut().zip(bias).for_each(|(y, b)| *y = Float::from_f32(*b));
                }
            }
            let patches = MatrixRef { data: patches, row_stride: z.window(), col_stride: 1 };
            let transposed = MatrixRef { data: w, row_stride: 1, col_stride: z.window() };
            let y = MatrixMut { data: y, row_stride: z.o };
            serial(&packing, [pixels, z.o, z.window()], patches, transposed, y, bias.is_some());
        })
    });
    Ok(())
}

pub(super) fn backward_input(dy: &Tensor, w: &Tensor, z: &ConvDims) -> Result<Tensor> {
    let device = dy.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let (dy, w) = (dy.slice::<bf16>(), w.slice::<bf16>());
    let group = PIXELS.div_ceil(z.oh * z.ow).min(z.batch);
    let rows = z.chunk().min(group * z.oh);
    let space = || Tensor::empty(&device, &[rows * z.ow * z.window()], DType::F32, Category::Workspace);
    let scratch = ScratchPool::new(cpu, z.batch.div_ceil(group), space)?;
    let packing = GemmWorkspace::new::<bf16>(cpu, z.batch.div_ceil(group), &[(rows * z.ow, z.window(), z.o)]);
    image::sum(&device, &z.input_shape(), DType::Bf16, group, |n, dx| {
        scratch.lend(|patches| {
            let patches = patches.slice_mut::<f32>();
            let end = dx.len() / (z.h * z.w * z.c) * z.oh;
            for first in (0..end).step_by(rows) {
                let last = (first + rows).min(end);
                let pixels = (last - first) * z.ow;
                let dy = &dy[(n * z.oh + first) * z.ow * z.o..][..pixels * z.o];
                let dy = MatrixRef { data: dy, row_stride: z.o, col_stride: 1 };
                let weight = MatrixRef { data: w, row_stride: z.window(), col_stride: 1 };
                let product = MatrixMut { data: &mut patches[..pixels * z.window()], row_stride: z.window() };
                serial(&packing, [pixels, z.window(), z.o], dy, weight, product, false);
                scatter(patches, dx, first..last, z);
            }
        })
    })
}

pub(super) fn backward_weight(x: &Tensor, dy: &Tensor, z: &ConvDims, dw: &mut Tensor) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let size = z.window() * z.o;
    let rows_per_group = z.rows().div_ceil((SUMS / size).clamp(2, GROUPS));
    let groups = z.rows().div_ceil(rows_per_group);
    let mut sums = Tensor::zeros(&device, &[groups, size], DType::F32, Category::Workspace)?;
    let (x, dy) = (x.slice::<bf16>(), dy.slice::<bf16>());
    let scratch = ScratchPool::new(cpu, groups, || patch_space(&device, z))?;
    let packing = GemmWorkspace::new::<bf16>(cpu, groups, &[(z.window(), z.o, z.chunk() * z.ow)]);
    cpu.for_chunks(sums.slice_mut::<f32>(), size, |range, sum| {
        scratch.lend(|space| {
            let start = range.start / size * rows_per_group;
            let end = (start + rows_per_group).min(z.rows());
            for first in (start..end).step_by(z.chunk()) {
                let last = (first + z.chunk()).min(end);
                let patches = gather(x, space.slice_mut::<bf16>(), first..last, z);
                let patches = MatrixRef { data: patches, row_stride: 1, col_stride: z.window() };
                let dy = &dy[first * z.ow * z.o..last * z.ow * z.o];
                let dy = MatrixRef { data: dy, row_stride: z.o, col_stride: 1 };
                let pixels = (last - first) * z.ow;
                let sum = MatrixMut { data: &mut *sum, row_stride: z.o };
                serial(&packing, [z.window(), z.o, pixels], patches, dy, sum, true);
            }
        })
    });
    collect(cpu, sums.slice(), z.o, z, dw.slice_mut::<bf16>());
    Ok(())
}

fn patch_space(device: &Device, z: &ConvDims) -> Result<Tensor> {
    let len = if z.pointwise() { 0 } else { z.chunk() * z.ow * z.window() };
    Tensor::empty(device, &[len], DType::Bf16, Category::Workspace)
}

/// The patches of these rows of output pixels, one a row; `x` itself where a pixel is its own patch.
fn gather<'a>(x: &'a [bf16], space: &'a mut [bf16], rows: Range<usize>, z: &ConvDims) -> &'a [bf16] {
    let (run, pixel) = (z.conv.kernel * z.c, z.window());
    if z.pointwise() {
        return &x[rows.start * z.ow * z.c..rows.end * z.ow * z.c];
    }
    let space = &mut space[..rows.len() * z.ow * pixel];
    for (row, patches) in rows.zip(space.chunks_exact_mut(z.ow * pixel)) {
        let image = &x[row / z.oh * z.h * z.w * z.c..][..z.h * z.w * z.c];
        let (us, top) = z.clip_rows(row % z.oh);
        for (j, patch) in patches.chunks_exact_mut(pixel).enumerate() {
            let (vs, left) = z.clip_columns(j);
            for (u, patch) in patch.chunks_exact_mut(run).enumerate() {
                if !us.contains(&u) {
                    patch.fill(bf16::ZERO);
                    continue;
                }
                let inside = vs.start * z.c..vs.end * z.c;
                let source = ((top + u - us.start) * z.w + left) * z.c;
                patch[..inside.start].fill(bf16::ZERO);
                patch[inside.clone()].copy_from_slice(&image[source..][..inside.len()]);
                patch[inside.end..].fill(bf16::ZERO);
            }
        }
    }
    space
}

/// Adds the patches of these rows of output pixels to where in the images they were taken from.
fn scatter(patches: &[f32], images: &mut [f32], rows: Range<usize>, z: &ConvDims) {
    let (run, pixel) = (z.conv.kernel * z.c, z.window());
    for (row, patches) in rows.zip(patches.chunks_exact(z.ow * pixel)) {
        let image = &mut images[row / z.oh * z.h * z.w * z.c..][..z.h * z.w * z.c];
        let (us, top) = z.clip_rows(row % z.oh);
        for (j, patch) in patches.chunks_exact(pixel).enumerate() {
            let (vs, left) = z.clip_columns(j);
            for u in us.clone() {
                let inside = &patch[u * run..][vs.start * z.c..vs.end * z.c];
                let target = ((top + u - us.start) * z.w + left) * z.c;
                image[target..][..inside.len()].iter_mut().zip(inside).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}

//! Convolution in f32 without patches: the kernels of [`crate::cpu::correlate`] read windows from the image.
//!
//! Images are framed in zeros first, a few at a time, so that no window needs a condition. The gradient of the
//! input is itself a convolution of dy with turned weights; with stride s its pixels fall into s x s phases,
//! each with the taps that reach it: row I = i + p of the framed input takes, with q = I / s and rho = I mod s,
//! ```text
//! dx[I] = sum over t < T of dy[q - t] w[rho + s t],   T = ceil((kernel - rho) / s)
//! ```

use std::ops::Range;

use super::Sizes;
use crate::cpu::correlate::{Panels, Taps, correlate, correlate_weight};
use crate::cpu::scratch::{Disjoint, Scratch};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Output pixels that make a group of images worth a task.
const PIXELS: usize = 256;

/// Outputs whose weight gradients one task sums.
const SLICE: usize = 64;

/// Elements of partial sums of a weight's gradient, all groups of images together, and the most such groups.
const SUMS: usize = 2 << 20;
const GROUPS: usize = 16;

/// The channels that weights are packed for at a time, so that a panel's part stays in the first-level cache.
const CHANNELS: usize = 16;

/// How an image [rows, columns, c] lies in zeros: `front` of them above and to the left, h x w in all.
#[derive(Debug, Clone, Copy)]
struct Frame {
    rows: usize,
    columns: usize,
    c: usize,
    front: usize,
    h: usize,
    w: usize,
}

impl Frame {
    fn len(&self) -> usize {
        self.h * self.w * self.c
    }

    /// Whether there is no zero to add.
    fn bare(&self) -> bool {
        (self.h, self.w) == (self.rows, self.columns)
    }

    fn space(&self, device: &Device, images: usize) -> Result<Tensor> {
        let len = if self.bare() { 0 } else { images * self.len() };
        Tensor::empty(device, &[len], DType::F32, Category::Workspace)
    }

    /// The images in their frames: in `space`, or where they are if the frame is bare.
    fn put<'a>(&self, x: &'a [f32], images: Range<usize>, space: &'a mut Tensor) -> &'a [f32] {
        let line = self.columns * self.c;
        let x = &x[images.start * self.rows * line..images.end * self.rows * line];
        if self.bare() {
            return x;
        }
        let space = &mut space.slice_mut::<f32>()[..images.len() * self.len()];
        for (x, framed) in x.chunks_exact(self.rows * line).zip(space.chunks_exact_mut(self.len())) {
            for (i, framed) in framed.chunks_exact_mut(self.w * self.c).enumerate() {
                if i < self.front || i >= self.front + self.rows {
                    framed.fill(0.0);
                    continue;
                }
                let (before, rest) = framed.split_at_mut(self.front * self.c);
                let (inside, after) = rest.split_at_mut(line);
                before.fill(0.0);
                inside.copy_from_slice(&x[(i - self.front) * line..][..line]);
                after.fill(0.0);
            }
        }
        space
    }
}

impl Sizes {
    /// How many images a task takes at a time, where each has so many pixels.
    fn group(&self, pixels: usize) -> usize {
        PIXELS.div_ceil(pixels).min(self.batch)
    }

    /// The input in its padding.
    fn frame(&self) -> Frame {
        let (front, both) = (self.conv.padding, 2 * self.conv.padding);
        let (h, w) = (self.h + both, self.w + both);
        Frame { rows: self.h, columns: self.w, c: self.c, front, h, w }
    }

    fn taps(&self, frame: &Frame) -> Taps {
        Taps { runs: self.conv.kernel, run: self.conv.kernel * self.c, stride: frame.w * self.c }
    }

    /// Where the window of each output pixel of a group of images begins in the framed images, and where its
    /// output is.
    fn pixels(&self, device: &Device, frame: &Frame, images: usize) -> Result<Tensor> {
        let (area, s) = (self.oh * self.ow, self.conv.stride);
        let at = |i: usize| {
            let (n, i, j) = (i / area, i % area / self.ow, i % self.ow);
            n * frame.len() + (i * s * frame.w + j * s) * self.c
        };
        table(device, (0..images * area).map(|i| [at(i), i * self.o]))
    }
}

/// Offsets as the kernels take them.
fn table(device: &Device, pairs: impl Iterator<Item = [usize; 2]>) -> Result<Tensor> {
    let narrow = |x: usize| u32::try_from(x).expect("a group of images below 2^32 elements");
    let pairs: Vec<u32> = pairs.flatten().map(narrow).collect();
    Tensor::from_slice(device, &[pairs.len() / 2, 2], &pairs, Category::Workspace)
}

fn pairs(table: &Tensor) -> &[[u32; 2]] {
    bytemuck::cast_slice(table.slice::<u32>())
}

pub(super) fn forward(x: &Tensor, w: &Tensor, bias: Option<&[f32]>, z: &Sizes, y: &mut Tensor) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device;
    let (area, frame) = (z.oh * z.ow, z.frame());
    let group = z.group(area);
    let offsets = z.pixels(&device, &frame, group)?;
    let kernel = z.conv.kernel;
    let steps: Vec<usize> = (0..kernel * kernel).collect();
    let weight = pack(w, z.c, kernel * kernel, z.o, z.window(), &steps)?;
    let scratch = Scratch::new(cpu, z.batch.div_ceil(group), || frame.space(&device, group))?;
    let x = x.slice::<f32>();
    cpu.for_pieces(y.slice_mut::<f32>(), group * area * z.o, |range, y| {
        let first = range.start / (area * z.o);
        let images = y.len() / (area * z.o);
        scratch.lend(|space| {
            let x = frame.put(x, first..first + images, space);
            let pixels = &pairs(&offsets)[..images * area];
            correlate(cpu, z.taps(&frame), pixels, x, &weight, bias, y);
        });
    });
    Ok(())
}

/// The pixels of dx that the same taps reach.
struct Phase {
    taps: Taps,
    /// Of a group of images, one image after the other.
    offsets: Tensor,
    /// Of one image.
    pixels: usize,
    weight: Panels,
}

pub(super) fn backward_input(dy: &Tensor, w: &Tensor, z: &Sizes) -> Result<Tensor> {
    let device = dy.device();
    let Device::Cpu(cpu) = &device;
    let (kernel, s, p) = (z.conv.kernel, z.conv.stride, z.conv.padding);
    let group = z.group(z.h * z.w);
    let front = kernel.div_ceil(s) - 1;
    let side = |out: usize, input: usize| front + out.max((input - 1 + p) / s + 1);
    let (h, w_) = (side(z.oh, z.h), side(z.ow, z.w));
    let frame = Frame { rows: z.oh, columns: z.ow, c: z.o, front, h, w: w_ };
    // The taps of phase rho, in the order in which they lie in dy.
    let taps_of = |rho: usize| (rho..kernel).step_by(s).rev().collect::<Vec<usize>>();
    // The coordinates of phase rho below `size`, and where their windows begin in the frame.
    let places = |rho: usize, size: usize| {
        let taps = taps_of(rho).len();
        let of_phase = (0..size).filter(move |i| (i + p) % s == rho);
        of_phase.map(move |i| (i, (i + p) / s + front + 1 - taps)).collect::<Vec<_>>()
    };
    let mut phases = Vec::new();
    for (down, across) in (0..s * s).map(|phase| (phase / s, phase % s)) {
        let (us, vs) = (taps_of(down), taps_of(across));
        let (rows, columns) = (places(down, z.h), places(across, z.w));
        let steps: Vec<usize> = us.iter().flat_map(|u| vs.iter().map(move |v| u * kernel + v)).collect();
        let mut offsets = Vec::with_capacity(group * rows.len() * columns.len());
        for n in 0..group {
            for (i, row) in &rows {
                for (j, column) in &columns {
                    // Without taps there is nothing to read, and zeros to write.
                    let at = n * frame.len() + (row * frame.w + column) * z.o;
                    let at = if steps.is_empty() { 0 } else { at };
                    offsets.push([at, ((n * z.h + i) * z.w + j) * z.c]);
                }
            }
        }
        phases.push(Phase {
            taps: Taps { runs: us.len(), run: vs.len() * z.o, stride: frame.w * z.o },
            offsets: table(&device, offsets.into_iter())?,
            pixels: rows.len() * columns.len(),
            weight: pack(w, z.o, z.window(), z.c, kernel * kernel, &steps)?,
        });
    }
    let mut dx = Tensor::empty(&device, &z.input_shape(), DType::F32, Category::Activations)?;
    let scratch = Scratch::new(cpu, z.batch.div_ceil(group), || frame.space(&device, group))?;
    let dy = dy.slice::<f32>();
    let image = z.h * z.w * z.c;
    cpu.for_pieces(dx.slice_mut::<f32>(), group * image, |range, dx| {
        let first = range.start / image;
        let images = dx.len() / image;
        scratch.lend(|space| {
            let dy = frame.put(dy, first..first + images, space);
            for phase in &phases {
                let pixels = &pairs(&phase.offsets)[..images * phase.pixels];
                correlate(cpu, phase.taps, pixels, dy, &phase.weight, None, dx);
            }
        });
    });
    Ok(dx)
}

pub(super) fn backward_weight(x: &Tensor, dy: &Tensor, z: &Sizes, dw: &mut Tensor) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device;
    let (area, frame) = (z.oh * z.ow, z.frame());
    let (depth, size) = (z.window(), z.window() * z.o);
    let group = z.group(area);
    let blocks = z.batch.div_ceil(group);
    let share = blocks.div_ceil((SUMS / size).clamp(1, GROUPS));
    let (parts, slices) = (blocks.div_ceil(share), z.o.div_ceil(SLICE));
    let offsets = z.pixels(&device, &frame, group)?;
    let mut sums = Tensor::empty(&device, &[parts, size], DType::F32, Category::Workspace)?;
    let scratch = Scratch::new(cpu, parts * slices, || frame.space(&device, group))?;
    let (x, dy) = (x.slice::<f32>(), dy.slice::<f32>());
    let shared = Disjoint::new(sums.slice_mut::<f32>());
    cpu.for_each(parts * slices, |task| {
        let (part, slice) = (task / slices, task % slices);
        let columns = slice * SLICE..((slice + 1) * SLICE).min(z.o);
        let start = part * size + columns.start * depth;
        // SAFETY: each task has its own part and slice.
        let sums = unsafe { shared.piece(start..start + columns.len() * depth) };
        sums.fill(0.0);
        for block in part * share..((part + 1) * share).min(blocks) {
            let images = block * group..((block + 1) * group).min(z.batch);
            let pixels = &pairs(&offsets)[..images.len() * area];
            let dy = &dy[images.start * area * z.o..images.end * area * z.o];
            scratch.lend(|space| {
                let x = frame.put(x, images, space);
                correlate_weight(cpu, z.taps(&frame), pixels, x, dy, z.o, columns.clone(), sums);
            });
        }
    });
    let sums = sums.slice::<f32>();
    let taps = z.conv.kernel * z.conv.kernel;
    cpu.for_pieces(dw.slice_mut::<f32>(), CHANNELS * z.c * taps, |range, dw| {
        let first = range.start / depth;
        let slice = first / SLICE * SLICE;
        let width = SLICE.min(z.o - slice);
        let count = dw.len() / depth;
        for c0 in (0..z.c).step_by(CHANNELS) {
            for tap in 0..taps {
                for c in c0..(c0 + CHANNELS).min(z.c) {
                    let mut total = [0.0f32; CHANNELS];
                    for part in 0..parts {
                        let at = part * size + slice * depth + (tap * z.c + c) * width + first - slice;
                        total.iter_mut().zip(&sums[at..at + count]).for_each(|(total, x)| *total += x);
                    }
                    for (o, total) in total[..count].iter().enumerate() {
                        dw[(o * z.c + c) * taps + tap] = *total;
                    }
                }
            }
        }
    });
    Ok(())
}

/// Weights as panels [taps, channels, columns]: the one at `steps[tap]` + channel x `channel_stride` +
/// column x `column_stride`.
fn pack(
    w: &Tensor,
    channels: usize,
    channel_stride: usize,
    columns: usize,
    column_stride: usize,
    steps: &[usize],
) -> Result<Panels> {
    let data = w.slice::<f32>();
    Panels::pack(&w.device(), steps.len() * channels, columns, |range, width, panel| {
        for c0 in (0..channels).step_by(CHANNELS) {
            for (tap, step) in steps.iter().enumerate() {
                for c in c0..(c0 + CHANNELS).min(channels) {
                    let row = &mut panel[(tap * channels + c) * width..][..range.len()];
                    for (column, to) in range.clone().zip(row) {
                        *to = data[step + c * channel_stride + column * column_stride];
                    }
                }
            }
        }
    })
}

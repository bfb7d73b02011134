//! Convolution in f32 without patches: the kernels of [`super::correlate`] read windows from the image.
//!
//! Pixels are sorted into classes by which taps of the kernel fall on the image, so that there is no condition
//! and no multiplication by padding in the kernels. A group of images supplies enough pixels of each class.
//!
//! The gradient of the input is itself a convolution, of dy with flipped weights: with stride s, pixel I - p
//! takes dy[(I - u) / s] w[u] for the taps u that are I modulo s. So there are s phases in each direction,
//! each with weights of its own.

use std::ops::Range;

use super::correlate::{Taps, WeightPanels, correlate, correlate_weight};
use super::{CHANNELS, ConvDims, collect};
#[cfg(target_arch = "x86_64")]
use super::{pruned, pruned::NonzeroWeights, scattered};
use crate::cpu::scratch::DisjointSlice;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// Pixels, and images, that make a group worth a task.
const PIXELS: usize = 128;
const IMAGES: usize = 8;

/// Outputs whose weight gradients one task sums.
const SLICE: usize = 64;

/// Elements of partial sums of a weight's gradient, all groups of images together, and the most such groups.
const SUMS: usize = 2 << 20;
const GROUPS: usize = 16;

/// What the pixels of some rows (or columns) have in common: which of their phase's taps fall on the source.
#[derive(Debug, Clone, PartialEq)]
struct TapReach {
    phase: usize,
    taps: Range<usize>,
}

/// The rows of the result with the same reach, each with the row of the source under its first tap.
type ReachLines = (TapReach, Vec<[usize; 2]>);

/// Sorts `size` rows by their reach.
fn classes(size: usize, reach: impl Fn(usize) -> (TapReach, usize)) -> Vec<ReachLines> {
    let mut classes: Vec<ReachLines> = Vec::new();
    for i in 0..size {
        let (reach, first) = reach(i);
        match classes.iter_mut().find(|class| class.0 == reach) {
            Some((_, lines)) => lines.push([i, first]),
            None => classes.push((reach, vec![[i, first]])),
        }
    }
    classes
}

/// Pixels that read the source through the same taps.
#[derive(Debug)]
struct PixelClass {
    taps: Taps,
    /// Which weights: row phase x phases + column phase.
    phase: usize,
    /// Offsets in source and result, of a group of images, one image after the other.
    offsets: Tensor,
    /// How many of an image.
    pixels: usize,
}

impl PixelClass {
    /// The offsets for the first few images of a group.
    fn offsets(&self, images: usize) -> &[[u32; 2]] {
        &bytemuck::cast_slice(self.offsets.slice::<u32>())[..images * self.pixels]
    }
}

/// A convolution from source images to result images.
#[derive(Debug)]
struct ConvMap {
    /// h, w, channels.
    source: [usize; 3],
    result: [usize; 3],
    /// Images in a group.
    group: usize,
    classes: Vec<PixelClass>,
}

impl ConvMap {
    /// `taps(phase)` is how many taps a phase has.
    fn new(
        device: &Device,
        batch: usize,
        source: [usize; 3],
        result: [usize; 3],
        phases: usize,
        taps: impl Fn(usize) -> usize,
        rows: Vec<ReachLines>,
        columns: Vec<ReachLines>,
    ) -> Result<ConvMap> {
        let group = PIXELS.div_ceil(result[0] * result[1]).max(IMAGES).min(batch);
        let mut classes = Vec::new();
        for (down, rows) in &rows {
            for (across, columns) in &columns {
                let c = source[2];
                let runs = down.taps.len();
                let taps = Taps {
                    runs,
                    run: across.taps.len() * c,
                    stride: source[1] * c,
                    weight: (down.taps.start * taps(across.phase) + across.taps.start) * c,
                    weight_stride: taps(across.phase) * c,
                };
                let mut offsets = Vec::with_capacity(2 * group * rows.len() * columns.len());
                let offset = |[h, w, c]: [usize; 3], n, i, j| {
                    let at: usize = ((n * h + i) * w + j) * c;
                    u32::try_from(at).expect("a group of images below 2^32 elements")
                };
                for n in 0..group {
                    for &[i, above] in rows {
                        for &[j, left] in columns {
                            offsets.push(offset(source, n, above, left));
                            offsets.push(offset(result, n, i, j));
                        }
                    }
                }
                let shape = [offsets.len() / 2, 2];
                classes.push(PixelClass {
                    taps,
                    phase: down.phase * phases + across.phase,
                    offsets: Tensor::from_slice(device, &shape, &offsets, Category::Workspace)?,
                    pixels: rows.len() * columns.len(),
                });
            }
        }
        Ok(ConvMap { source, result, group, classes })
    }

    /// From x to y.
    fn forward(device: &Device, z: &ConvDims) -> Result<ConvMap> {
        let (k, s, padding) = (z.conv.kernel, z.conv.stride, z.conv.padding);
        let lines = |size: usize, result: usize, p: usize| {
            classes(result, |i| {
                let low = p.saturating_sub(i * s).min(k);
                let high = (size + p).saturating_sub(i * s).clamp(low, k);
                let first = if low < high { i * s + low - p } else { 0 };
                (TapReach { phase: 0, taps: low..high }, first)
            })
        };
        let (rows, columns) = (lines(z.h, z.oh, padding.top), lines(z.w, z.ow, padding.left));
        ConvMap::new(device, z.batch, [z.h, z.w, z.c], [z.oh, z.ow, z.o], 1, |_| k, rows, columns)
    }

    /// From dy to dx.
    fn backward(device: &Device, z: &ConvDims) -> Result<ConvMap> {
        let (s, padding) = (z.conv.stride, z.conv.padding);
        let lines = |size: usize, result: usize, p: usize| {
            classes(result, |i| {
                let phase = (i + p) % s;
                let taps = phase_taps(z, phase);
                // Tap u reads row (i + p - u) / s of dy, if there is one; the taps are in the order of those rows.
                let on = |u: &&usize| **u <= i + p && (i + p - **u) / s < size;
                let low = taps.iter().take_while(|u| !on(u)).count();
                let count = taps[low..].iter().take_while(on).count();
                let first = if count > 0 { (i + p - taps[low]) / s } else { 0 };
                (TapReach { phase, taps: low..low + count }, first)
            })
        };
        let (rows, columns) = (lines(z.oh, z.h, padding.top), lines(z.ow, z.w, padding.left));
        let taps = |phase| phase_taps(z, phase).len();
        ConvMap::new(device, z.batch, [z.oh, z.ow, z.o], [z.h, z.w, z.c], s, taps, rows, columns)
    }

    /// Elements of a source image and of a result image.
    fn lens(&self) -> [usize; 2] {
        [self.source, self.result].map(|shape| shape.iter().product())
    }

    /// Forms the result, a group of images a task.
    fn run(&self, device: &Device, x: &[f32], weights: &[WeightPanels], bias: Option<&[f32]>, y: &mut [f32]) {
        let Device::Cpu(cpu) = device else { crate::device::host_only() };
        let [source, result] = self.lens();
        cpu.for_chunks(y, self.group * result, |range, y| {
            let first = range.start / result;
            let images = y.len() / result;
            let x = &x[first * source..(first + images) * source];
            for class in &self.classes {
                correlate(cpu, class.taps, class.offsets(images), x, &weights[class.phase], bias, y);
            }
        });
    }
}

/// The taps of a phase of the input's gradient, in the order of the rows of dy that they read.
fn phase_taps(z: &ConvDims, phase: usize) -> Vec<usize> {
    (phase..z.conv.kernel).step_by(z.conv.stride).rev().collect()
}

pub(super) fn forward(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&[f32]>,
    z: &ConvDims,
    y: &mut Tensor,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if let Device::Cpu(cpu) = &x.device()
        && let Some(kept) = NonzeroWeights::of(cpu, w.slice(), z)?
    {
        return pruned::forward(&kept, x, bias, z, y);
    }
    let taps = z.conv.kernel * z.conv.kernel;
    let steps: Vec<usize> = (0..taps).map(|tap| tap * z.c).collect();
    let weight = pack(w, z.c, 1, z.o, z.window(), &steps)?;
    let map = ConvMap::forward(&x.device(), z)?;
    map.run(&x.device(), x.slice(), &[weight], bias, y.slice_mut());
    Ok(())
}

pub(super) fn backward_input(dy: &Tensor, w: &Tensor, z: &ConvDims) -> Result<Tensor> {
    #[cfg(target_arch = "x86_64")]
    if let Device::Cpu(cpu) = &dy.device()
        && let Some(proof) = scattered::serve(cpu, z, dy.slice())
    {
        return scattered::backward_input(proof, dy, w, z);
    }
    let (kernel, s) = (z.conv.kernel, z.conv.stride);
    let mut weights = Vec::new();
    for (down, across) in (0..s * s).map(|phase| (phase / s, phase % s)) {
        let (us, vs) = (phase_taps(z, down), phase_taps(z, across));
        let step = |u, v| (u * kernel + v) * z.c;
        let steps: Vec<usize> = us.iter().flat_map(|u| vs.iter().map(move |v| step(*u, *v))).collect();
        weights.push(pack(w, z.o, z.window(), z.c, 1, &steps)?);
    }
    let mut dx = Tensor::empty(&dy.device(), &z.input_shape(), DType::F32, Category::Transient)?;
    let map = ConvMap::backward(&dy.device(), z)?;
    map.run(&dy.device(), dy.slice(), &weights, None, dx.slice_mut());
    Ok(dx)
}

pub(super) fn backward_weight(x: &Tensor, dy: &Tensor, z: &ConvDims, dw: &mut Tensor) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = scattered::serve(cpu, z, dy.slice()) {
        return scattered::backward_weight(proof, x, dy, z, dw);
    }
    let map = ConvMap::forward(&device, z)?;
    let [source, result] = map.lens();
    let (depth, size) = (z.window(), z.window() * z.o);
    let blocks = z.batch.div_ceil(map.group);
    let blocks_per_group = blocks.div_ceil((SUMS / size).clamp(1, GROUPS));
    let (groups, slices) = (blocks.div_ceil(blocks_per_group), z.o.div_ceil(SLICE));
    let mut sums = Tensor::empty(&device, &[groups, size], DType::F32, Category::Workspace)?;
    let (x, dy) = (x.slice::<f32>(), dy.slice::<f32>());
    let shared = DisjointSlice::new(sums.slice_mut::<f32>());
    cpu.for_each(groups * slices, |task| {
        let (group, slice) = (task / slices, task % slices);
        let columns = slice * SLICE..((slice + 1) * SLICE).min(z.o);
        let start = group * size + columns.start * depth;
        // SAFETY: each task has its own group and slice.
        let sums = unsafe { shared.range_mut(start..start + columns.len() * depth) };
        sums.fill(0.0);
        for block in group * blocks_per_group..((group + 1) * blocks_per_group).min(blocks) {
            let images = block * map.group..((block + 1) * map.group).min(z.batch);
            let x = &x[images.start * source..images.end * source];
            let dy = &dy[images.start * result..images.end * result];
            for class in &map.classes {
                correlate_weight(cpu, class.taps, class.offsets(images.len()), x, dy, columns.clone(), sums);
            }
        }
    });
    collect(cpu, sums.slice(), SLICE, z, dw.slice_mut::<f32>());
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
) -> Result<WeightPanels> {
    let data = w.slice::<f32>();
    WeightPanels::pack(&w.device(), steps.len() * channels, columns, |range, width, panel| {
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

//! The forward pass of a convolution whose weight is mostly zeros, in f32 with AVX-512.
//!
//! Which weights are left differs from one output to the next, so the lanes of a vector cannot be outputs,
//! nor channels. They are sixteen images: these are transposed so that the same pixel of all of them is one
//! vector, and then each weight that is not zero is one multiply-add for each pixel and none for any other.
//! Few channels are taken at a time, so that their planes stay in the first-level cache while all outputs go
//! by.
//!
//! Within, x: [c, h + border, w + border, 16 images], y: [o, oh, ow, 16 images]; windows step by one pixel.

use std::arch::x86_64::__m512;

use super::ConvDims;
use super::transpose::{LANES, from_lanes, to_lanes};
use crate::cpu::Cpu;
use crate::cpu::gemm::Lanes;
use crate::cpu::isa::Avx512;
use crate::cpu::scratch::ScratchPool;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// The largest fraction of weights that are not zero for which this is faster.
const MOST_KEPT: f64 = 0.25;

/// Bytes of x's planes that are worked on at a time.
const AT_HAND: usize = 40 << 10;

/// Rows and columns of a tile of pixels whose sums stay in registers.
const DOWN: usize = 3;
const ACROSS: usize = 8;

/// The weights that are not zero, output by output within each group of channels.
pub(super) struct NonzeroWeights {
    proof: Avx512,
    /// Channels of a group.
    channels: usize,
    /// Where each group's and output's weights begin in the two lists below, and where the last end.
    starts: Tensor,
    /// Where in a group's planes a weight finds the first pixel, in numbers.
    offsets: Tensor,
    values: Tensor,
}

/// Sixteen images with as much border as windows see.
struct PaddedImages<'a> {
    h: usize,
    w: usize,
    z: &'a ConvDims,
}

impl<'a> PaddedImages<'a> {
    fn new(z: &'a ConvDims) -> PaddedImages<'a> {
        let (kernel, [oh, ow]) = (z.conv.kernel, [z.oh, z.ow]);
        PaddedImages { h: oh + kernel - 1, w: ow + kernel - 1, z }
    }

    fn plane(&self) -> usize {
        self.h * self.w * LANES
    }
}

impl NonzeroWeights {
    /// The list of a weight, where these kernels serve the convolution and few enough are left.
    pub(super) fn of(cpu: &Cpu, w: &[f32], z: &ConvDims) -> Result<Option<NonzeroWeights>> {
        let Some(proof) = cpu.isa().avx512() else { return Ok(None) };
        let kept = w.iter().map(|w| u32::from(*w != 0.0)).sum::<u32>() as usize;
        // Fewer images than lanes would be computed for nothing; and of few channels, such as those of pictures,
        // so few products are saved that turning images into lanes and back takes longer.
        if z.c < LANES || z.conv.stride != 1 || z.batch < LANES || kept as f64 > MOST_KEPT * w.len() as f64 {
            return Ok(None);
        }
        let images = PaddedImages::new(z);
        let (kernel, taps) = (z.conv.kernel, z.conv.kernel * z.conv.kernel);
        let channels = (AT_HAND / (4 * images.plane())).clamp(1, z.c);
        let alloc = |len, dtype| Tensor::zeros(&Device::Cpu(cpu.clone()), &[len], dtype, Category::Workspace);
        let lists = z.c.div_ceil(channels) * z.o;
        let (mut starts, mut offsets) = (alloc(lists + 1, DType::U32)?, alloc(kept, DType::U32)?);
        let mut values = alloc(kept, DType::F32)?;
        let (mut next, mut list) = (0, 0);
        for first in (0..z.c).step_by(channels) {
            for o in 0..z.o {
                for c in first..(first + channels).min(z.c) {
                    for tap in 0..taps {
                        let value = w[(o * taps + tap) * z.c + c];
                        if value != 0.0 {
                            let offset = ((c - first) * images.h + tap / kernel) * images.w + tap % kernel;
                            offsets.slice_mut::<u32>()[next] = (offset * LANES) as u32;
                            values.slice_mut::<f32>()[next] = value;
                            next += 1;
                        }
                    }
                }
                list += 1;
                starts.slice_mut::<u32>()[list] = next as u32;
            }
        }
        Ok(Some(NonzeroWeights { proof, channels, starts, offsets, values }))
    }

    /// Places and values of the weights of an output in a group of channels.
    fn list(&self, group: usize, o: usize, z: &ConvDims) -> (&[u32], &[f32]) {
        let starts = &self.starts.slice::<u32>()[group * z.o + o..];
        let at = starts[0] as usize..starts[1] as usize;
        (&self.offsets.slice()[at.clone()], &self.values.slice()[at])
    }
}

/// y = x convolved with the weights that are kept.
pub(super) fn forward(
    kept: &NonzeroWeights,
    x: &Tensor,
    bias: Option<&[f32]>,
    z: &ConvDims,
    y: &mut Tensor,
) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let images = PaddedImages::new(z);
    let alloc = || -> Result<[Tensor; 2]> {
        let alloc = |len| Tensor::zeros(&device, &[len], DType::F32, Category::Workspace);
        Ok([alloc(z.c * images.plane())?, alloc(z.o * z.oh * z.ow * LANES)?])
    };
    let scratch = ScratchPool::new(cpu, z.batch.div_ceil(LANES), alloc)?;
    let (source, result) = (z.h * z.w * z.c, z.oh * z.ow * z.o);
    let x = x.slice::<f32>();
    cpu.for_chunks(y.slice_mut::<f32>(), LANES * result, |range, y| {
        let count = y.len() / result;
        let x = &x[range.start / result * source..][..count * source];
        scratch.lend(|[planes, sums]| {
            let (planes, sums) = (planes.slice_mut::<f32>(), sums.slice_mut::<f32>());
            lay_out(kept.proof, x, planes, &images);
            for (group, planes) in planes.chunks(kept.channels * images.plane()).enumerate() {
                for (o, sums) in sums.chunks_exact_mut(z.oh * z.ow * LANES).enumerate() {
                    let list = kept.list(group, o, z);
                    let begin = (group == 0).then(|| bias.map_or(0.0, |bias| bias[o]));
                    correlate(kept.proof, list, planes, begin, sums, &images);
                }
            }
            bring_back(kept.proof, sums, y, z);
        });
    });
    Ok(())
}

/// Images [n, h, w, c] as planes. The border is never written, and so stays what it was at first: zero.
fn lay_out(proof: Avx512, x: &[f32], planes: &mut [f32], images: &PaddedImages<'_>) {
    let (z, padding) = (images.z, images.z.conv.padding);
    let (source, plane) = (z.h * z.w * z.c, images.plane());
    for i in 0..z.h {
        for j in 0..z.w {
            let to = ((i + padding.top) * images.w + j + padding.left) * LANES;
            let from = &x[(i * z.w + j) * z.c..];
            to_lanes(proof, (from, source), [x.len() / source, z.c], (&mut planes[to..], plane));
        }
    }
}

/// Sums [o, pixels, lanes] as images [n, pixels, o].
fn bring_back(proof: Avx512, sums: &[f32], y: &mut [f32], z: &ConvDims) {
    let pixels = z.oh * z.ow;
    let count = y.len() / (pixels * z.o);
    for pixel in 0..pixels {
        let (from, to) = (&sums[pixel * LANES..], &mut y[pixel * z.o..]);
        from_lanes(proof, (from, pixels * LANES), [z.o, count], (to, pixels * z.o));
    }
}

/// Adds what the weights of a list see of some planes to the sums of an output, which begin at `begin` where
/// that is said.
fn correlate(
    _: Avx512,
    list: (&[u32], &[f32]),
    planes: &[f32],
    begin: Option<f32>,
    sums: &mut [f32],
    images: &PaddedImages<'_>,
) {
    let ConvDims { oh, ow, .. } = *images.z;
    // Every offset lies in a window of the first pixel, so from the last pixel on as many numbers are left
    // behind it.
    let last = ((oh - 1) * images.w + ow) * LANES;
    assert!(list.0.iter().all(|offset| *offset as usize + last <= planes.len()), "windows within the planes");
    assert!(list.0.len() == list.1.len() && sums.len() == oh * ow * LANES, "a sum for each pixel");
    for i in (0..oh).step_by(DOWN) {
        let mut j = 0;
        while j < ow {
            let across = if ow - j >= ACROSS { ACROSS } else { 1 << (ow - j).ilog2() };
            let at = [(i * images.w + j) * LANES, (i * ow + j) * LANES];
            let strides = [images.w * LANES, ow * LANES];
            // SAFETY: the proof is there; the tile lies within the image, and all its windows within the planes.
            unsafe { tile(DOWN.min(oh - i), across, list, planes, begin, sums, at, strides) };
            j += across;
        }
    }
}

/// The kernel of a tile of `down` x `across` pixels.
///
/// # Safety
/// The processor has AVX-512; the tile lies within the sums, and its windows lie within the planes.
#[target_feature(enable = "avx512f")]
unsafe fn tile(
    down: usize,
    across: usize,
    list: (&[u32], &[f32]),
    planes: &[f32],
    begin: Option<f32>,
    sums: &mut [f32],
    at: [usize; 2],
    strides: [usize; 2],
) {
    macro_rules! choose {
        ($(($d:literal, $a:literal))*) => {
            // SAFETY: the caller's promise.
            unsafe {
                match (down, across) {
                    $(($d, $a) => pixels::<$d, $a>(list, planes, begin, sums, at, strides),)*
                    _ => unreachable!("a tile of {down} x {across} pixels"),
                }
            }
        };
    }
    choose!((1, 1)(1, 2)(1, 4)(1, 8)(2, 1)(2, 2)(2, 4)(2, 8)(3, 1)(3, 2)(3, 4)(3, 8))
}

/// # Safety
/// As for [`tile`], of `D` x `A` pixels.
#[inline(always)]
unsafe fn pixels<const D: usize, const A: usize>(
    (offsets, values): (&[u32], &[f32]),
    planes: &[f32],
    begin: Option<f32>,
    sums: &mut [f32],
    [from, to]: [usize; 2],
    [down, rows]: [usize; 2],
) {
    // SAFETY: the caller's promise covers every access.
    unsafe {
        let sums = sums.as_mut_ptr().add(to);
        let mut acc = [[__m512::splat(begin.unwrap_or(0.0)); A]; D];
        if begin.is_none() {
            for d in 0..D {
                for a in 0..A {
                    acc[d][a] = __m512::load(sums.add(d * rows + a * LANES));
                }
            }
        }
        let planes = planes.as_ptr().add(from);
        for (offset, value) in offsets.iter().zip(values) {
            let (at, value) = (planes.add(*offset as usize), __m512::splat(*value));
            for d in 0..D {
                for a in 0..A {
                    acc[d][a] = acc[d][a].add_product(value, __m512::load(at.add(d * down + a * LANES)));
                }
            }
        }
        for d in 0..D {
            for a in 0..A {
                acc[d][a].store(sums.add(d * rows + a * LANES));
            }
        }
    }
}

//! The gradients of a convolution whose dy is mostly zeros, in f32 with AVX-512.
//!
//! Behind a max pool of 2 x 2 at least three of four numbers of dy are zeros, behind a ReLU more, at pixels
//! that differ from channel to channel. Dense kernels multiply by all of them. Here the others are listed,
//! channel by channel, each with the window that it belongs to:
//!
//! ```text
//! dw[o] = sum over the list of o of g x[window]        dx[window] += g w[o]
//! ```
//! A window is `kernel` runs of `kernel` c consecutive numbers, so both are sums of whole vectors. Images
//! must not be padded, so that every window is whole, and runs must fill vectors.
//!
//! x, dx: [batch, h, w, c]; dy: [batch, oh, ow, o]; w and its gradient: [o, kernel, kernel, c].

use std::arch::x86_64::{__m512, _mm512_cmpneq_ps_mask, _mm512_setzero_ps};

use super::ConvDims;
use crate::cpu::gemm::Lanes;
use crate::cpu::isa::Avx512;
use crate::cpu::scratch::ScratchPool;
use crate::cpu::{CHUNK, Cpu};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::ops::padding::Padding;
use crate::tensor::Tensor;

/// Numbers of a vector; also the channels of dy whose lists are made together.
const LANES: usize = 16;

/// Vectors of a run whose sums, or weights, stay in registers.
const HELD: usize = 10;

/// One number of dy in so many, at most, is worth a list.
const FEW: usize = 3;

/// Images that a task sums the weight's gradient over, at least, and the most partial sums.
const IMAGES: usize = 64;
const GROUPS: usize = 16;

/// Bytes of dx that a task has at hand: the first-level cache, with room for the weights of a channel.
const AT_HAND: usize = 32 << 10;

/// The proof that these kernels run, where they serve a convolution and `dy` has few numbers that are not zero.
pub(super) fn serve(cpu: &Cpu, z: &ConvDims, dy: &[f32]) -> Option<Avx512> {
    let proof = cpu.isa().avx512()?;
    let whole = z.conv.padding == Padding::NONE && (z.conv.kernel * z.c).is_multiple_of(LANES);
    (whole && z.o.is_multiple_of(LANES) && FEW * numbers(cpu, dy) < dy.len()).then_some(proof)
}

/// How many numbers are not zero.
fn numbers(cpu: &Cpu, dy: &[f32]) -> usize {
    let count = |x: &[f32]| x.iter().map(|x| u32::from(*x != 0.0)).sum::<u32>() as usize;
    cpu.map_chunks(dy.len(), CHUNK, |at| count(&dy[at])).iter().sum()
}

/// A number of dy: where its window begins, and its bits.
type NonzeroEntry = [u32; 2];

/// The numbers of some images' dy that are not zero, for [`LANES`] channels.
struct NonzeroLists<'a> {
    /// Room for `most` of each channel.
    entries: &'a mut [NonzeroEntry],
    most: usize,
    counts: [usize; LANES],
}

impl<'a> NonzeroLists<'a> {
    /// Room for the lists of so many images.
    fn alloc(device: &Device, images: usize, z: &ConvDims) -> Result<Tensor> {
        let most = images * z.oh * z.ow;
        Tensor::empty(device, &[LANES, most, 2], DType::U32, Category::Workspace)
    }

    fn new(space: &'a mut Tensor) -> NonzeroLists<'a> {
        let most = space.shape()[1];
        NonzeroLists { entries: bytemuck::cast_slice_mut(space.slice_mut::<u32>()), most, counts: [0; LANES] }
    }

    fn of(&self, channel: usize) -> &[NonzeroEntry] {
        &self.entries[channel * self.most..][..self.counts[channel]]
    }

    /// Lists some images, of which `dy` is [images, oh, ow, o], from channel `first` on.
    fn fill(&mut self, proof: Avx512, dy: &[f32], first: usize, z: &ConvDims) {
        self.counts = [0; LANES];
        let images = dy.len() / (z.oh * z.ow * z.o);
        assert!(images * z.oh * z.ow <= self.most, "room for every number");
        let mut pixels = dy.chunks_exact(z.o);
        for n in 0..images {
            for i in 0..z.oh {
                for j in 0..z.ow {
                    let at = ((n * z.h + i * z.conv.stride) * z.w + j * z.conv.stride) * z.c;
                    let pixel = pixels.next().expect("a pixel for each window");
                    let dy: &[f32; LANES] =
                        pixel[first..first + LANES].try_into().expect("that many channels");
                    self.push(proof, at as u32, dy);
                }
            }
        }
    }

    #[inline(always)]
    fn push(&mut self, proof: Avx512, at: u32, dy: &[f32; LANES]) {
        let mut left = not_zero(proof, dy);
        while left != 0 {
            let channel = left.trailing_zeros() as usize;
            left &= left - 1;
            self.entries[channel * self.most + self.counts[channel]] = [at, dy[channel].to_bits()];
            self.counts[channel] += 1;
        }
    }
}

/// A bit for each number that is not zero; a NaN is not.
fn not_zero(_: Avx512, x: &[f32; LANES]) -> u16 {
    /// # Safety
    /// The processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    unsafe fn compare(x: &[f32; LANES]) -> u16 {
        // SAFETY: a vector of numbers is read from as many.
        unsafe { _mm512_cmpneq_ps_mask(<__m512 as Lanes>::load(x.as_ptr()), _mm512_setzero_ps()) }
    }
    // SAFETY: the proof says that the processor has these instructions.
    unsafe { compare(x) }
}

/// The gradient of the weight.
pub(super) fn backward_weight(
    proof: Avx512,
    x: &Tensor,
    dy: &Tensor,
    z: &ConvDims,
    dw: &mut Tensor,
) -> Result<()> {
    let device = x.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let (image, pixels, window) = (z.h * z.w * z.c, z.oh * z.ow * z.o, z.window());
    let images_per_group = z.batch.div_ceil((z.batch / IMAGES).clamp(1, GROUPS));
    let (groups, slices) = (z.batch.div_ceil(images_per_group), z.o / LANES);
    let mut sums = Tensor::zeros(&device, &[groups, z.o, window], DType::F32, Category::Workspace)?;
    let scratch = ScratchPool::new(cpu, groups * slices, || NonzeroLists::alloc(&device, 1, z))?;
    let (x, dy) = (x.slice::<f32>(), dy.slice::<f32>());
    cpu.for_chunks(sums.slice_mut::<f32>(), LANES * window, |range, sums| {
        let (group, slice) = (range.start / window / z.o, range.start / window % z.o);
        scratch.lend(|space| {
            let mut lists = NonzeroLists::new(space);
            for n in group * images_per_group..((group + 1) * images_per_group).min(z.batch) {
                lists.fill(proof, &dy[n * pixels..(n + 1) * pixels], slice, z);
                let x = &x[n * image..(n + 1) * image];
                for (channel, sums) in sums.chunks_exact_mut(window).enumerate() {
                    for_runs(z, |from, to, vectors| {
                        // SAFETY: the processor has the instructions; every window is whole, so that each of
                        // its runs is in x.
                        unsafe { sum_runs(vectors, lists.of(channel), &x[from..], &mut sums[to..]) }
                    });
                }
            }
        });
    });
    let sums = sums.slice::<f32>();
    cpu.for_chunks(dw.slice_mut::<f32>(), window, |range, dw| {
        for (dw, at) in dw.iter_mut().zip(range) {
            *dw = sums.chunks_exact(z.o * window).map(|group| group[at]).sum();
        }
    });
    Ok(())
}

/// The gradient of the input.
pub(super) fn backward_input(proof: Avx512, dy: &Tensor, w: &Tensor, z: &ConvDims) -> Result<Tensor> {
    let device = dy.device();
    let Device::Cpu(cpu) = &device else { crate::device::host_only() };
    let (image, pixels, window) = (z.h * z.w * z.c, z.oh * z.ow * z.o, z.window());
    let group = (AT_HAND / (4 * image)).clamp(1, z.batch);
    let scratch = ScratchPool::new(cpu, z.batch.div_ceil(group), || NonzeroLists::alloc(&device, group, z))?;
    let mut dx = Tensor::empty(&device, &z.input_shape(), DType::F32, Category::Transient)?;
    let (dy, w) = (dy.slice::<f32>(), w.slice::<f32>());
    cpu.for_chunks(dx.slice_mut::<f32>(), group * image, |range, dx| {
        let (first, images) = (range.start / image, dx.len() / image);
        dx.fill(0.0);
        let dy = &dy[first * pixels..(first + images) * pixels];
        scratch.lend(|space| {
            let mut lists = NonzeroLists::new(space);
            for slice in (0..z.o).step_by(LANES) {
                lists.fill(proof, dy, slice, z);
                for channel in 0..LANES {
                    let w = &w[(slice + channel) * window..][..window];
                    for_runs(z, |from, to, vectors| {
                        // SAFETY: as above, of dx.
                        unsafe { add_runs(vectors, lists.of(channel), &w[to..], &mut dx[from..]) }
                    });
                }
            }
        });
    });
    Ok(dx)
}

/// Calls `work(offset in the image from a window's first number on, offset in the window, vectors)` for chunks
/// of every run.
#[inline(always)]
fn for_runs(z: &ConvDims, mut work: impl FnMut(usize, usize, usize)) {
    let run = z.conv.kernel * z.c;
    for u in 0..z.conv.kernel {
        for l in (0..run).step_by(HELD * LANES) {
            work(u * z.w * z.c + l, u * run + l, HELD.min((run - l) / LANES));
        }
    }
}

/// Declares a kernel over `V` vectors for each number of vectors up to [`HELD`].
macro_rules! by_vectors {
    ($(#[$doc:meta])* $name:ident, $of:ident, $from:ty, $to:ty) => {
        $(#[$doc])*
        #[target_feature(enable = "avx512f")]
        unsafe fn $name(vectors: usize, list: &[NonzeroEntry], from: $from, to: $to) {
            // SAFETY: the caller's promise.
            unsafe {
                match vectors {
                    1 => $of::<1>(list, from, to),
                    2 => $of::<2>(list, from, to),
                    3 => $of::<3>(list, from, to),
                    4 => $of::<4>(list, from, to),
                    5 => $of::<5>(list, from, to),
                    6 => $of::<6>(list, from, to),
                    7 => $of::<7>(list, from, to),
                    8 => $of::<8>(list, from, to),
                    9 => $of::<9>(list, from, to),
                    10 => $of::<10>(list, from, to),
                    _ => unreachable!("{vectors} vectors of a run"),
                }
            }
        }
    };
}

by_vectors! {
    /// `sums += g x[at ..]` over a list, `vectors` vectors of them.
    ///
    /// # Safety
    /// The processor has AVX-512, and x holds as many vectors from every entry's offset on.
    sum_runs, sum_vectors, &[f32], &mut [f32]
}

by_vectors! {
    /// `dx[at ..] += g w` over a list, `vectors` vectors of it.
    ///
    /// # Safety
    /// The processor has AVX-512, and dx holds as many vectors from every entry's offset on.
    add_runs, add_vectors, &[f32], &mut [f32]
}

/// # Safety
/// The caller is compiled for AVX-512, and x holds `V` vectors from every entry's offset on.
#[inline(always)]
unsafe fn sum_vectors<const V: usize>(list: &[NonzeroEntry], x: &[f32], sums: &mut [f32]) {
    assert!(sums.len() >= V * LANES);
    // SAFETY: the length of the sums was checked; the caller vouches for x and the instructions.
    unsafe {
        let mut acc = [__m512::splat(0.0); V];
        for v in 0..V {
            acc[v] = __m512::load(sums.as_ptr().add(v * LANES));
        }
        for &[at, bits] in list {
            let (x, g) = (x.as_ptr().add(at as usize), __m512::splat(f32::from_bits(bits)));
            for v in 0..V {
                acc[v] = acc[v].add_product(g, __m512::load(x.add(v * LANES)));
            }
        }
        for v in 0..V {
            acc[v].store(sums.as_mut_ptr().add(v * LANES));
        }
    }
}

/// # Safety
/// The caller is compiled for AVX-512, and dx holds `V` vectors from every entry's offset on.
#[inline(always)]
unsafe fn add_vectors<const V: usize>(list: &[NonzeroEntry], w: &[f32], dx: &mut [f32]) {
    assert!(w.len() >= V * LANES);
    // SAFETY: the length of the weights was checked; the caller vouches for dx and the instructions.
    unsafe {
        let mut acc = [__m512::splat(0.0); V];
        for v in 0..V {
            acc[v] = __m512::load(w.as_ptr().add(v * LANES));
        }
        for &[at, bits] in list {
            let (dx, g) = (dx.as_mut_ptr().add(at as usize), __m512::splat(f32::from_bits(bits)));
            for v in 0..V {
                let to = dx.add(v * LANES);
                __m512::load(to).add_product(g, acc[v]).store(to);
            }
        }
    }
}

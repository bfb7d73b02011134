//! The two f32 kernels of direct convolution. Both hold a tile of sums in registers and read images where they
//! lie: neither copies windows out of them, nor multiplies by the zeros around an image.
//!
//! A window is [`Taps`]: some runs of consecutive numbers, one under the other. Which window belongs to which
//! pixel is a list of offsets, so that borders, strides and groups of images are the caller's matter.

use std::ops::Range;

use crate::cpu::gemm::Lanes;
use crate::cpu::{Cpu, Isa, isa::by_isa};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// A window: `runs` rows of `run` consecutive numbers, and the weights that they meet.
#[derive(Debug, Clone, Copy)]
pub struct Taps {
    /// Rows of the window.
    pub runs: usize,
    /// Numbers in a row: columns of the window x channels.
    pub run: usize,
    /// From a row of the image to the next, in numbers.
    pub stride: usize,
    /// The row of the weight matrix that the first number meets.
    pub weight: usize,
    /// From there to the row that the next run's first number meets.
    pub weight_stride: usize,
}

impl Taps {
    /// Numbers from the window's first to its last.
    fn span(&self) -> usize {
        if self.runs * self.run == 0 { 0 } else { (self.runs - 1) * self.stride + self.run }
    }

    /// The window in chunks, with where each begins in it: so few weights that they stay in the first-level
    /// cache while the pixels go by. A window without taps is one chunk.
    fn segments(self) -> impl Iterator<Item = (usize, Taps)> {
        let chunks = self.run.div_ceil(SEGMENT).max(1);
        let run = self.run.div_ceil(chunks);
        let runs = (SEGMENT / run.max(1)).clamp(1, self.runs.max(1));
        (0..self.runs.max(1)).step_by(runs).flat_map(move |u| {
            (0..chunks).map(move |chunk| {
                let l = chunk * run;
                let taps = Taps {
                    runs: runs.min(self.runs - u),
                    run: run.min(self.run - l),
                    weight: self.weight + u * self.weight_stride + l,
                    ..self
                };
                (u * self.stride + l, taps)
            })
        })
    }

    /// Whether all weights are among `depth` rows.
    fn within(&self, depth: usize) -> bool {
        self.runs * self.run == 0 || self.weight + (self.runs - 1) * self.weight_stride + self.run <= depth
    }
}

/// A matrix [depth, columns] in panels of columns, each [depth, width], zeros where there is no column.
#[derive(Debug)]
pub struct WeightPanels {
    data: Tensor,
    depth: usize,
    columns: usize,
}

impl WeightPanels {
    /// Packs: `fill(columns, panel's width, panel)` sets the columns of one zeroed panel.
    pub fn pack(
        device: &Device,
        depth: usize,
        columns: usize,
        fill: impl Fn(Range<usize>, usize, &mut [f32]) + Sync + Send,
    ) -> Result<WeightPanels> {
        let Device::Cpu(cpu) = device else { crate::device::host_only() };
        let (full, narrow) = widths(cpu.isa());
        let rest = columns % full;
        let padded = columns - rest + if rest > narrow { full } else { rest.next_multiple_of(narrow) };
        let mut data = Tensor::empty(device, &[depth * padded], DType::F32, Category::Workspace)?;
        cpu.for_chunks(data.slice_mut::<f32>(), (depth * full).max(1), |range, panel| {
            let first = range.start / depth.max(1);
            panel.fill(0.0);
            fill(first..(first + full).min(columns), panel.len() / depth, panel);
        });
        Ok(WeightPanels { data, depth, columns })
    }
}

/// Columns of a wide and of a narrow panel: two vectors and one.
fn widths(isa: Isa) -> (usize, usize) {
    match isa {
        Isa::Portable => (8, 4),
        Isa::Avx2(_) => (16, 8),
        Isa::Avx512(_) | Isa::Amx(_) => (32, 16),
    }
}

/// `y[out .. out + columns] = bias + window at x[at] times weight` for each pixel `[at, out]`.
pub(crate) fn correlate(
    cpu: &Cpu,
    taps: Taps,
    pixels: &[[u32; 2]],
    x: &[f32],
    weight: &WeightPanels,
    bias: Option<&[f32]>,
    y: &mut [f32],
) {
    assert!(taps.within(weight.depth), "weights for the whole window");
    assert!(bias.is_none_or(|bias| bias.len() == weight.columns), "a bias for each column");
    let fits = |&[at, out]: &[u32; 2]| {
        at as usize + taps.span() <= x.len() && out as usize + weight.columns <= y.len()
    };
    assert!(pixels.iter().all(fits), "windows within the image, sums within the output");
    let (full, narrow) = widths(cpu.isa());
    let panels = weight.data.slice::<f32>();
    for pixels in pixels.chunks(CHUNK) {
        for first in (0..weight.columns).step_by(full) {
            let cols = full.min(weight.columns - first);
            let width = if cols > narrow { full } else { narrow };
            let mut start = [0.0f32; 32];
            if let Some(bias) = bias {
                start[..cols].copy_from_slice(&bias[first..first + cols]);
            }
            let panel = &panels[first * weight.depth..][..width * weight.depth];
            for (i, (from, taps)) in taps.segments().enumerate() {
                let (x, y, start) = (&x[from..], &mut *y, &start);
                let job = CorrelateArgs { taps, pixels, x, panel, start, y, first, cols, add: i > 0 };
                // SAFETY: offsets were checked above, as was the weights' offset in the panel; an `Isa` is one
                // the machine has.
                unsafe { by_isa!(cpu.isa(), [pixels_portable, pixels_avx2, pixels_avx512], job) };
            }
        }
    }
}

/// `sums[l, columns] += window[l] dy[out, columns]` over all pixels `[at, out]`, whose windows begin at `x[at]`
/// and whose gradients begin at `dy[out]`; `sums` is [weights, columns].
pub(crate) fn correlate_weight(
    cpu: &Cpu,
    taps: Taps,
    pixels: &[[u32; 2]],
    x: &[f32],
    dy: &[f32],
    columns: Range<usize>,
    sums: &mut [f32],
) {
    let stride = columns.len();
    let fits = |&[at, out]: &[u32; 2]| {
        at as usize + taps.span() <= x.len() && out as usize + columns.end <= dy.len()
    };
    assert!(pixels.iter().all(fits), "windows within the image, gradients of each pixel");
    assert!(taps.within(sums.len() / stride), "a sum for each weight");
    if taps.runs * taps.run == 0 {
        return;
    }
    let (full, _) = widths(cpu.isa());
    // Tiles of equal height, as few as the registers allow.
    let tiles = taps.run.div_ceil(most_rows(cpu.isa()));
    let high = taps.run.div_ceil(tiles);
    // Few enough pixels that a panel of dy stays in the first-level cache while the taps go by.
    for pixels in pixels.chunks(PIXELS) {
        for first in (0..stride).step_by(full) {
            let cols = full.min(stride - first);
            for u in 0..taps.runs {
                for l in (0..taps.run).step_by(high) {
                    let rows = high.min(taps.run - l);
                    let weight = taps.weight + u * taps.weight_stride + l;
                    let job = OuterProductArgs {
                        pixels,
                        x: &x[u * taps.stride + l..],
                        dy: &dy[columns.start + first..],
                        sums: &mut sums[weight * stride + first..],
                        stride,
                        cols,
                    };
                    // SAFETY: offsets and sizes were checked above; an `Isa` is one the machine has.
                    unsafe { by_isa!(cpu.isa(), [outer_portable, outer_avx2, outer_avx512], rows, job) };
                }
            }
        }
    }
}

/// Pixels whose windows and sums wait in the second-level cache.
const CHUNK: usize = 512;

/// Rows of weights that wait in the first-level cache.
const SEGMENT: usize = 256;

/// Pixels whose gradients wait in the first-level cache.
const PIXELS: usize = 128;

/// The arguments of the forward kernel.
struct CorrelateArgs<'a> {
    taps: Taps,
    pixels: &'a [[u32; 2]],
    x: &'a [f32],
    panel: &'a [f32],
    start: &'a [f32; 32],
    y: &'a mut [f32],
    first: usize,
    cols: usize,
    /// Whether the sums go on from what is in `y`, not from `start`.
    add: bool,
}

/// The arguments of the weight kernel.
struct OuterProductArgs<'a> {
    pixels: &'a [[u32; 2]],
    x: &'a [f32],
    dy: &'a [f32],
    sums: &'a mut [f32],
    stride: usize,
    cols: usize,
}

/// `R` pixels x `V` vectors of columns.
///
/// # Safety
/// The caller is compiled for `L`; `R` pixels from `i` on exist, and their offsets fit `x` and `y`.
#[inline(always)]
unsafe fn pixels<L: Lanes, const R: usize, const V: usize>(job: &mut CorrelateArgs<'_>, i: usize) {
    // SAFETY: the caller's promise covers every access.
    unsafe {
        let valid = |v: usize| job.cols.saturating_sub(v * L::N).min(L::N);
        let mut out = [std::ptr::null_mut::<f32>(); R];
        let mut sums = [[L::splat(0.0); V]; R];
        for r in 0..R {
            out[r] = job.y.as_mut_ptr().add(job.pixels.get_unchecked(i + r)[1] as usize + job.first);
            for v in 0..V {
                sums[r][v] = match job.add {
                    true => L::load_partial(out[r].add(v * L::N), valid(v)),
                    false => L::load(job.start.as_ptr().add(v * L::N)),
                };
            }
        }
        let mut at = [std::ptr::null::<f32>(); R];
        for r in 0..R {
            at[r] = job.x.as_ptr().add(job.pixels.get_unchecked(i + r)[0] as usize);
        }
        let mut w = job.panel.as_ptr().wrapping_add(job.taps.weight * V * L::N);
        let skip = job.taps.weight_stride.wrapping_sub(job.taps.run).wrapping_mul(V * L::N);
        for _ in 0..job.taps.runs {
            for l in 0..job.taps.run {
                let mut columns = [L::splat(0.0); V];
                for v in 0..V {
                    columns[v] = L::load(w.add(v * L::N));
                }
                for r in 0..R {
                    let x = L::splat(*at[r].add(l));
                    for v in 0..V {
                        sums[r][v] = sums[r][v].add_product(x, columns[v]);
                    }
                }
                w = w.add(V * L::N);
            }
            w = w.wrapping_add(skip);
            for r in 0..R {
                at[r] = at[r].wrapping_add(job.taps.stride);
            }
        }
        for r in 0..R {
            for v in 0..V {
                sums[r][v].store_partial(out[r].add(v * L::N), valid(v));
            }
        }
    }
}

/// `R` consecutive taps x `V` vectors of columns, summed over all pixels.
///
/// # Safety
/// The caller is compiled for `L`; the offsets fit `x` and `dy`, and `sums` holds `R` rows.
#[inline(always)]
unsafe fn outer<L: Lanes, const R: usize, const V: usize, const FULL: bool>(job: &mut OuterProductArgs<'_>) {
    // SAFETY: the caller's promise covers every access.
    unsafe {
        let valid = |v: usize| job.cols.saturating_sub(v * L::N).min(L::N);
        let load = |from: *const f32, v: usize| {
            if FULL { L::load(from.add(v * L::N)) } else { L::load_partial(from.add(v * L::N), valid(v)) }
        };
        let mut sums = [[L::splat(0.0); V]; R];
        for r in 0..R {
            for v in 0..V {
                sums[r][v] = load(job.sums.as_ptr().add(r * job.stride), v);
            }
        }
        for &[at, out] in job.pixels {
            let (at, dy) = (job.x.as_ptr().add(at as usize), job.dy.as_ptr().add(out as usize));
            let mut columns = [L::splat(0.0); V];
            for v in 0..V {
                columns[v] = load(dy, v);
            }
            for r in 0..R {
                let x = L::splat(*at.add(r));
                for v in 0..V {
                    sums[r][v] = sums[r][v].add_product(x, columns[v]);
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                let to = job.sums.as_mut_ptr().add(r * job.stride + v * L::N);
                if FULL { sums[r][v].store(to) } else { sums[r][v].store_partial(to, valid(v)) }
            }
        }
    }
}

/// The most rows of a tile of the weight kernel.
fn most_rows(isa: Isa) -> usize {
    if isa.avx512().is_some() { 12 } else { 4 }
}

/// Both kernels over one vector type, compiled for its instructions.
macro_rules! kernels {
    ($pixels:ident, $outer:ident, $lanes:ty, [$($feature:literal)?], pixels: $most:literal [$($p:literal)*],
     rows: [$($r:literal)*]) => {
        /// # Safety
        /// As for [`pixels`], of all pixels of the job, and the processor has the features that this is
        /// compiled for.
        $(#[target_feature(enable = $feature)])?
        unsafe fn $pixels(mut job: CorrelateArgs<'_>) {
            let wide = job.cols > <$lanes>::N;
            let mut i = 0;
            while i < job.pixels.len() {
                let count = (job.pixels.len() - i).min($most);
                // SAFETY: the caller's promise, and `count` pixels are left.
                unsafe {
                    match (count, wide) {
                        $(($p, true) => pixels::<$lanes, $p, 2>(&mut job, i),
                          ($p, false) => pixels::<$lanes, $p, 1>(&mut job, i),)*
                        _ => unreachable!("a tile of {count} pixels"),
                    }
                }
                i += count;
            }
        }

        /// # Safety
        /// As for [`outer`], of so many rows, and the processor has the features that this is compiled for.
        $(#[target_feature(enable = $feature)])?
        unsafe fn $outer(rows: usize, mut job: OuterProductArgs<'_>) {
            // SAFETY: the caller's promise.
            unsafe {
                match (rows, job.cols > <$lanes>::N, job.cols % <$lanes>::N == 0) {
                    $(($r, true, true) => outer::<$lanes, $r, 2, true>(&mut job),
                      ($r, true, false) => outer::<$lanes, $r, 2, false>(&mut job),
                      ($r, false, true) => outer::<$lanes, $r, 1, true>(&mut job),
                      ($r, false, false) => outer::<$lanes, $r, 1, false>(&mut job),)*
                    _ => unreachable!("a tile of {rows} taps"),
                }
            }
        }
    };
}

kernels! { pixels_portable, outer_portable, [f32; 4], [], pixels: 4 [1 2 3 4], rows: [1 2 3 4] }

#[cfg(target_arch = "x86_64")]
kernels! {
    pixels_avx2, outer_avx2, std::arch::x86_64::__m256, ["avx2,fma"], pixels: 4 [1 2 3 4], rows: [1 2 3 4]
}

#[cfg(target_arch = "x86_64")]
kernels! {
    pixels_avx512, outer_avx512, std::arch::x86_64::__m512, ["avx512f"], pixels: 8 [1 2 3 4 5 6 7 8],
    rows: [1 2 3 4 5 6 7 8 9 10 11 12]
}

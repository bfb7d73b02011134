//! Convolution of channels-last images.
//!
//! ```text
//! y[n, i, j, o] = bias[o] + sum over u, v, c of x[n, i s + u - p, j s + v - p, c] w[o, c, u, v]
//! ```
//! with stride s, padding p and zeros outside the image.
//! x: [batch, h, w, c]; w: [o, c, kernel, kernel]; bias: [o]; y: [batch, oh, ow, o].
//!
//! A few rows of output at a time, the windows under them are laid out as the rows of a matrix ("patches",
//! their columns in the order u, v, c, so that channels-last pixels are copied in runs of kernel x c), and one
//! matrix product does the rest. The patches of a piece stay in the second-level cache.

use super::image;
use crate::cpu::gemm::{Matrix, MatrixMut, serial};
use crate::cpu::scratch::Scratch;
use crate::device::Device;
use crate::dtype::{DType, Element, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;
use crate::with_float;

/// The geometry of a square convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv {
    /// The window's side.
    pub kernel: usize,
    /// Steps of the window, both ways.
    pub stride: usize,
    /// Zeros added on every side.
    pub padding: usize,
}

impl Conv {
    /// How many windows fit along a side of `size` pixels.
    pub fn output_size(&self, size: usize) -> usize {
        let padded = size + 2 * self.padding;
        assert!(padded >= self.kernel, "a window of {} does not fit {size} pixels", self.kernel);
        (padded - self.kernel) / self.stride + 1
    }
}

/// How many elements of patches a task lays out at a time.
const PATCHES: usize = 64 << 10;

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    h: usize,
    w: usize,
    c: usize,
    oh: usize,
    ow: usize,
    o: usize,
    conv: Conv,
}

impl Sizes {
    fn new(input: &[usize], o: usize, conv: Conv) -> Sizes {
        let [batch, h, w, c] = image::shape(input);
        Sizes { batch, h, w, c, oh: conv.output_size(h), ow: conv.output_size(w), o, conv }
    }

    /// Elements under one window.
    fn window(&self) -> usize {
        self.conv.kernel * self.conv.kernel * self.c
    }

    /// Rows of output pixels, all images.
    fn rows(&self) -> usize {
        self.batch * self.oh
    }

    /// How many rows of output pixels make a piece.
    fn piece(&self) -> usize {
        (PATCHES / (self.ow * self.window()).max(1)).clamp(1, self.rows().max(1))
    }

    /// Whether a pixel is its own patch.
    fn pointwise(&self) -> bool {
        self.conv == Conv { kernel: 1, stride: 1, padding: 0 }
    }

    fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.oh, self.ow, self.o]
    }

    /// Which of the kernel's rows (or columns) fall on the image at output row (column) `at`, and on which of
    /// its `size` rows (columns) the first of them does.
    fn clip(&self, at: usize, size: usize) -> (std::ops::Range<usize>, usize) {
        let start = at * self.conv.stride;
        let low = self.conv.padding.saturating_sub(start).min(self.conv.kernel);
        let high = (size + self.conv.padding).saturating_sub(start).min(self.conv.kernel).max(low);
        (low..high, if low < high { start + low - self.conv.padding } else { 0 })
    }
}

/// The convolution of `x` with `w`, plus `bias`.
pub fn forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, conv: Conv) -> Result<Tensor> {
    let z = Sizes::new(x.shape(), w.shape()[0], conv);
    check_weight(w, &z);
    assert_eq!(x.dtype(), w.dtype(), "a convolution's input and weight have one type");
    let device = x.device();
    let Device::Cpu(cpu) = &device;
    let mut y = Tensor::empty(&device, &z.output_shape(), x.dtype(), Category::Activations)?;
    let bias = bias.map(Tensor::to_f32);
    with_float!(x.dtype(), T => {
        let weight = permute_weight::<T>(w, &z)?;
        let (x, weight) = (x.slice::<T>(), weight.slice::<T>());
        let tasks = z.rows().div_ceil(z.piece());
        let scratch = Scratch::new(cpu, tasks, || patch_space(&device, x.len(), &z, T::DTYPE))?;
        cpu.for_pieces(y.slice_mut::<T>(), z.piece() * z.ow * z.o, |range, y| scratch.lend(|patches| {
            let first = range.start / (z.ow * z.o);
            let pixels = y.len() / z.o;
            let patches = gather(x, patches.slice_mut::<T>(), first..first + pixels / z.ow, &z);
            if let Some(bias) = &bias {
                for y in y.chunks_exact_mut(z.o) {
                    y.iter_mut().zip(bias).for_each(|(y, b)| *y = T::from_f32(*b));
                }
            }
            let patches = Matrix { data: patches, row_stride: z.window(), col_stride: 1 };
            let weight = Matrix { data: weight, row_stride: z.o, col_stride: 1 };
            let y = MatrixMut { data: y, row_stride: z.o };
            serial(cpu.isa(), pixels, z.o, z.window(), patches, weight, y, bias.is_some());
        }));
    });
    Ok(y)
}

/// The gradient of `x`, whose shape is `input_shape`.
pub fn backward_input(dy: &Tensor, w: &Tensor, conv: Conv, input_shape: &[usize]) -> Result<Tensor> {
    let z = Sizes::new(input_shape, w.shape()[0], conv);
    check_weight(w, &z);
    assert_eq!(dy.shape(), z.output_shape(), "the gradient of a convolution's output");
    assert_eq!(dy.dtype(), w.dtype(), "a convolution's gradient and weight have one type");
    let device = dy.device();
    let Device::Cpu(cpu) = &device;
    with_float!(dy.dtype(), T => {
        let weight = permute_weight::<T>(w, &z)?;
        let (dy, weight) = (dy.slice::<T>(), weight.slice::<T>());
        let rows = z.piece().min(z.oh);
        let space = || Tensor::empty(&device, &[rows * z.ow * z.window()], DType::F32, Category::Workspace);
        let scratch = Scratch::new(cpu, z.batch, space)?;
        image::sum(&device, input_shape, T::DTYPE, |n, dx| scratch.lend(|patches| {
            let patches = patches.slice_mut::<f32>();
            for first in (0..z.oh).step_by(rows) {
                let last = (first + rows).min(z.oh);
                let pixels = (last - first) * z.ow;
                let dy = &dy[(n * z.oh + first) * z.ow * z.o..][..pixels * z.o];
                let dy = Matrix { data: dy, row_stride: z.o, col_stride: 1 };
                let transposed = Matrix { data: weight, row_stride: 1, col_stride: z.o };
                let product = MatrixMut { data: &mut patches[..pixels * z.window()], row_stride: z.window() };
                serial(cpu.isa(), pixels, z.window(), z.o, dy, transposed, product, false);
                scatter(patches, dx, first..last, &z);
            }
        }))
    })
}

/// The gradient of `w`: [o, c, kernel, kernel].
pub fn backward_weight(x: &Tensor, dy: &Tensor, conv: Conv) -> Result<Tensor> {
    let z = Sizes::new(x.shape(), dy.width(), conv);
    assert_eq!(dy.shape(), z.output_shape(), "the gradient of a convolution's output");
    assert_eq!(x.dtype(), dy.dtype(), "a convolution's input and gradient have one type");
    let device = x.device();
    let Device::Cpu(cpu) = &device;
    let shape = [z.o, z.c, conv.kernel, conv.kernel];
    let mut dw = Tensor::empty(&device, &shape, x.dtype(), Category::Gradients)?;
    let size = z.window() * z.o;
    let share = z.rows().div_ceil(GROUPS).max(1);
    let groups = z.rows().div_ceil(share);
    let mut sums = Tensor::zeros(&device, &[groups, size], DType::F32, Category::Workspace)?;
    with_float!(x.dtype(), T => {
        let (x, dy) = (x.slice::<T>(), dy.slice::<T>());
        let scratch = Scratch::new(cpu, groups, || patch_space(&device, x.len(), &z, T::DTYPE))?;
        cpu.for_pieces(sums.slice_mut::<f32>(), size, |range, sum| scratch.lend(|space| {
            let start = range.start / size * share;
            let end = (start + share).min(z.rows());
            for first in (start..end).step_by(z.piece()) {
                let last = (first + z.piece()).min(end);
                let patches = gather(x, space.slice_mut::<T>(), first..last, &z);
                let patches = Matrix { data: patches, row_stride: 1, col_stride: z.window() };
                let dy = &dy[first * z.ow * z.o..last * z.ow * z.o];
                let dy = Matrix { data: dy, row_stride: z.o, col_stride: 1 };
                let pixels = (last - first) * z.ow;
                let sum = MatrixMut { data: &mut *sum, row_stride: z.o };
                serial(cpu.isa(), z.window(), z.o, pixels, patches, dy, sum, true);
            }
        }));
        let sums = sums.slice::<f32>();
        let area = conv.kernel * conv.kernel;
        cpu.for_pieces(dw.slice_mut::<T>(), z.c * area, |range, dw| {
            let o = range.start / (z.c * area);
            for (i, dw) in dw.iter_mut().enumerate() {
                let at = ((i % area) * z.c + i / area) * z.o + o;
                *dw = T::from_f32((0..groups).map(|g| sums[g * size + at]).sum());
            }
        });
    });
    Ok(dw)
}

/// Into how many partial sums a weight's gradient is cut.
const GROUPS: usize = 8;

fn check_weight(w: &Tensor, z: &Sizes) {
    let expected = [z.o, z.c, z.conv.kernel, z.conv.kernel];
    assert_eq!(w.shape(), expected, "a convolution's weight is [output, input, kernel, kernel]");
}

/// [o, c, u, v] as [u, v, c, o].
fn permute_weight<T: Float>(w: &Tensor, z: &Sizes) -> Result<Tensor> {
    let mut permuted = Tensor::empty(&w.device(), &[z.window(), z.o], T::DTYPE, Category::Workspace)?;
    let area = z.conv.kernel * z.conv.kernel;
    let w = w.slice::<T>();
    for (row, permuted) in permuted.slice_mut::<T>().chunks_exact_mut(z.o.max(1)).enumerate() {
        let (uv, c) = (row / z.c, row % z.c);
        permuted.iter_mut().enumerate().for_each(|(o, p)| *p = w[(o * z.c + c) * area + uv]);
    }
    Ok(permuted)
}

fn patch_space(device: &Device, input: usize, z: &Sizes, dtype: DType) -> Result<Tensor> {
    let len = if z.pointwise() || input == 0 { 0 } else { z.piece() * z.ow * z.window() };
    Tensor::empty(device, &[len], dtype, Category::Workspace)
}

/// The patches of these rows of output pixels, one a row; `x` itself where a pixel is its own patch.
fn gather<'a, T: Float>(x: &'a [T], space: &'a mut [T], rows: std::ops::Range<usize>, z: &Sizes) -> &'a [T] {
    let (run, pixel) = (z.conv.kernel * z.c, z.window());
    if z.pointwise() {
        return &x[rows.start * z.ow * z.c..rows.end * z.ow * z.c];
    }
    let space = &mut space[..rows.len() * z.ow * pixel];
    for (row, patches) in rows.zip(space.chunks_exact_mut(z.ow * pixel)) {
        let image = &x[row / z.oh * z.h * z.w * z.c..][..z.h * z.w * z.c];
        let (us, top) = z.clip(row % z.oh, z.h);
        for (j, patch) in patches.chunks_exact_mut(pixel).enumerate() {
            let (vs, left) = z.clip(j, z.w);
            for (u, patch) in patch.chunks_exact_mut(run).enumerate() {
                if !us.contains(&u) {
                    patch.fill(T::from_f32(0.0));
                    continue;
                }
                let inside = vs.start * z.c..vs.end * z.c;
                let source = ((top + u - us.start) * z.w + left) * z.c;
                patch[..inside.start].fill(T::from_f32(0.0));
                patch[inside.clone()].copy_from_slice(&image[source..][..inside.len()]);
                patch[inside.end..].fill(T::from_f32(0.0));
            }
        }
    }
    space
}

/// Adds the patches of these rows of one image's output pixels to where they were taken from.
fn scatter(patches: &[f32], image: &mut [f32], rows: std::ops::Range<usize>, z: &Sizes) {
    let (run, pixel) = (z.conv.kernel * z.c, z.window());
    for (row, patches) in rows.zip(patches.chunks_exact(z.ow * pixel)) {
        let (us, top) = z.clip(row, z.h);
        for (j, patch) in patches.chunks_exact(pixel).enumerate() {
            let (vs, left) = z.clip(j, z.w);
            for u in us.clone() {
                let inside = &patch[u * run..][vs.start * z.c..vs.end * z.c];
                let target = ((top + u - us.start) * z.w + left) * z.c;
                image[target..][..inside.len()].iter_mut().zip(inside).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{assert_close, check, dot, gradient, tensor, values, wide};

    /// Calls `f(y index, x index, w index)` for every product of the convolution.
    fn products(z: &Sizes, mut f: impl FnMut(usize, usize, usize)) {
        let Conv { kernel, stride, padding } = z.conv;
        for n in 0..z.batch {
            for (i, j, o) in grid(z.oh, z.ow, z.o) {
                for (u, v, c) in grid(kernel, kernel, z.c) {
                    let (row, column) = (i * stride + u, j * stride + v);
                    if row >= padding && row - padding < z.h && column >= padding && column - padding < z.w {
                        let y = ((n * z.oh + i) * z.ow + j) * z.o + o;
                        let x = ((n * z.h + row - padding) * z.w + column - padding) * z.c + c;
                        f(y, x, ((o * z.c + c) * kernel + u) * kernel + v);
                    }
                }
            }
        }
    }

    fn grid(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..a * b * c).map(move |i| (i / c / b, i / c % b, i % c))
    }

    fn plain_forward(x: &[f64], w: &[f64], bias: &[f64], z: &Sizes) -> Vec<f64> {
        let pixels = z.rows() * z.ow;
        let mut out: Vec<f64> = bias.iter().copied().cycle().take(pixels * z.o).collect();
        products(z, |y, xi, wi| out[y] += x[xi] * w[wi]);
        out
    }

    fn plain_backward(dy: &[f64], x: &[f64], w: &[f64], z: &Sizes) -> (Vec<f64>, Vec<f64>) {
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        products(z, |y, xi, wi| {
            dx[xi] += dy[y] * w[wi];
            dw[wi] += dy[y] * x[xi];
        });
        (dx, dw)
    }

    /// All three passes against the plain loops, everywhere.
    fn compare(shape: [usize; 4], o: usize, conv: Conv, seed: u64) {
        let z = Sizes::new(&shape, o, conv);
        let weight = [o, z.c, conv.kernel, conv.kernel];
        let spread = 1.0 / (z.window() as f64).sqrt();
        let x = values(seed, shape.iter().product(), 1.0);
        let w = values(seed + 1, weight.iter().product(), spread);
        let bias = values(seed + 2, o, 1.0);
        let dy = values(seed + 3, z.output_shape().iter().product(), 1.0);
        let (x64, w64) = (wide(&x), wide(&w));
        let y = plain_forward(&x64, &w64, &vec![0.0; o], &z);
        let biased = plain_forward(&x64, &w64, &wide(&bias), &z);
        let (dx, dw) = plain_backward(&wide(&dy), &x64, &w64, &z);
        check(&[y, biased, dx, dw], |device, dtype| {
            let x = tensor(device, dtype, &shape, &x);
            let w = tensor(device, dtype, &weight, &w);
            let bias = tensor(device, dtype, &[o], &bias);
            let dy = tensor(device, dtype, &z.output_shape(), &dy);
            vec![
                forward(&x, &w, None, conv).unwrap(),
                forward(&x, &w, Some(&bias), conv).unwrap(),
                backward_input(&dy, &w, conv, &shape).unwrap(),
                backward_weight(&x, &dy, conv).unwrap(),
            ]
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn all_passes_agree_with_plain_loops(
            (kernel, stride, padding) in (1usize..6, 1usize..4, 0usize..4),
            (batch, h, w) in (1usize..5, 5usize..12, 5usize..12),
            (c, o) in (1usize..20, 1usize..40),
            seed in 0u64..1000,
        ) {
            compare([batch, h, w, c], o, Conv { kernel, stride, padding }, seed);
        }
    }

    #[test]
    fn the_layers_of_known_networks_agree_with_plain_loops() {
        for (shape, o, kernel, stride, padding) in [
            ([2, 28, 28, 1], 32, 5, 1, 0),
            ([2, 12, 12, 32], 64, 5, 1, 0),
            ([2, 32, 32, 3], 16, 3, 1, 1),
            ([1, 16, 16, 16], 32, 3, 2, 1),
            ([3, 7, 7, 4], 8, 3, 2, 1),
            ([2, 8, 8, 24], 48, 1, 1, 0),
            ([2, 8, 8, 24], 20, 1, 2, 0),
            ([2, 2, 2, 64], 96, 3, 1, 1),
        ] {
            compare(shape, o, Conv { kernel, stride, padding }, 7);
        }
    }

    #[test]
    fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
        let z = Sizes::new(&[1, 5, 4, 2], 3, Conv { kernel: 3, stride: 2, padding: 1 });
        let (x, w) = (wide(&values(1, 40, 1.0)), wide(&values(2, 54, 1.0)));
        let dy = wide(&values(3, z.rows() * z.ow * z.o, 1.0));
        let loss = |x: &[f64], w: &[f64]| dot(&plain_forward(x, w, &[0.0; 3], &z), &dy);
        let (dx, dw) = plain_backward(&dy, &x, &w, &z);
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        assert_close(&narrow(dx), &gradient(&x, |x| loss(x, &w)), 1e-6);
        assert_close(&narrow(dw), &gradient(&w, |w| loss(&x, w)), 1e-6);
    }

    #[test]
    fn sizes_follow_the_usual_rule() {
        let size = |kernel, stride, padding, n| Conv { kernel, stride, padding }.output_size(n);
        assert_eq!(
            (size(5, 1, 0, 28), size(3, 2, 1, 7), size(3, 2, 1, 32), size(1, 1, 0, 9)),
            (24, 4, 16, 9)
        );
    }
}

//! Convolution of channels-last images.
//!
//! ```text
//! y[n, i, j, o] = bias[o] + sum over u, v, c of x[n, i s + u - top, j s + v - left, c] w[o, u, v, c]
//! ```
//! with stride s and zeros outside the image; the padding below it and to its right only says how many
//! windows there are. x: [batch, h, w, c]; w: [o, kernel, kernel, c]; bias: `[o]`; y: [batch, oh, ow, o]. Filters lie
//! channels last as images do, so that a window and its filter are equal runs of numbers, in tensor cores too.
//!
//! In f32 the images are read where they lie (`direct`). Where most numbers are zeros, AVX-512 takes the
//! others alone: of a pruned weight in the forward pass (`pruned`), of a dy behind a max pool in the backward
//! passes (`scattered`). In bf16 the windows are copied into the rows of a matrix (`patches`), because the
//! processor's bf16 unit multiplies whole matrices.

mod correlate;
mod cuda;
mod direct;
mod dnn;
pub(crate) mod kernels;
mod patches;
#[cfg(target_arch = "x86_64")]
mod pruned;
#[cfg(target_arch = "x86_64")]
mod scattered;
mod thin;
#[cfg(target_arch = "x86_64")]
mod transpose;

use super::activation::{self, ActivationFn};
use super::image;
use super::padding::{self, Padding};
use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

/// The geometry of a square convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvParams {
    /// The window's side.
    pub kernel: usize,
    /// Steps of the window, in both directions.
    pub stride: usize,
    /// Zeros added on each side.
    pub padding: Padding,
}

impl ConvParams {
    /// How many windows fit into an image: rows and columns of them.
    pub fn output_size(&self, [h, w]: [usize; 2]) -> [usize; 2] {
        let along = |size, padding| padding::count(size, padding, self.kernel, self.stride);
        [along(h, self.padding.rows()), along(w, self.padding.columns())]
    }
}

/// The convolution of `x` with `w`, plus `bias`.
pub fn forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, conv: ConvParams) -> Result<Tensor> {
    forward_with(x, w, bias, false, conv)
}

/// The same with ReLU behind it: on a GPU where a bias is added, in that pass over the output.
pub fn forward_relu(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, conv: ConvParams) -> Result<Tensor> {
    forward_with(x, w, bias, true, conv)
}

fn forward_with(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    relu: bool,
    conv: ConvParams,
) -> Result<Tensor> {
    let z = ConvDims::new(x.shape(), w.shape()[0], conv);
    z.check_weight(w);
    assert_eq!(x.dtype(), w.dtype(), "a convolution's input and weight have one type");
    assert!(bias.is_none_or(|bias| bias.len() == z.o), "a convolution's bias is [output]");
    if let Device::Cuda(gpu) = x.device() {
        return cuda::forward(&gpu, x, w, bias, relu, &z);
    }
    let bias = bias.map(Tensor::to_f32);
    let mut y = Tensor::empty(&x.device(), &z.output_shape(), x.dtype(), Category::Transient)?;
    match x.dtype() {
        DType::F32 => direct::forward(x, w, bias.as_deref(), &z, &mut y)?,
        _ => patches::forward(x, w, bias.as_deref(), &z, &mut y)?,
    }
    if relu { activation::forward_owned(ActivationFn::Relu, y) } else { Ok(y) }
}

/// The gradient of `x`, whose shape is `input_shape`.
pub fn backward_input(dy: &Tensor, w: &Tensor, conv: ConvParams, input_shape: &[usize]) -> Result<Tensor> {
    let z = ConvDims::new(input_shape, w.shape()[0], conv);
    z.check_weight(w);
    assert_eq!(dy.shape(), z.output_shape(), "the gradient of a convolution's output");
    assert_eq!(dy.dtype(), w.dtype(), "a convolution's gradient and weight have one type");
    match (dy.device(), dy.dtype()) {
        (Device::Cuda(gpu), _) => cuda::backward_input(&gpu, dy, w, &z),
        (Device::Cpu(_), DType::F32) => direct::backward_input(dy, w, &z),
        (Device::Cpu(_), _) => patches::backward_input(dy, w, &z),
    }
}

/// The gradient of `w`: [o, kernel, kernel, c].
pub fn backward_weight(x: &Tensor, dy: &Tensor, conv: ConvParams) -> Result<Tensor> {
    let z = ConvDims::new(x.shape(), dy.width(), conv);
    assert_eq!(dy.shape(), z.output_shape(), "the gradient of a convolution's output");
    assert_eq!(x.dtype(), dy.dtype(), "a convolution's input and gradient have one type");
    if let Device::Cuda(gpu) = x.device() {
        return cuda::backward_weight(&gpu, x, dy, &z);
    }
    let mut dw = Tensor::empty(&x.device(), &z.weight_shape(), x.dtype(), Category::Workspace)?;
    match x.dtype() {
        DType::F32 => direct::backward_weight(x, dy, &z, &mut dw)?,
        _ => patches::backward_weight(x, dy, &z, &mut dw)?,
    }
    Ok(dw)
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct ConvDims {
    batch: usize,
    h: usize,
    w: usize,
    c: usize,
    oh: usize,
    ow: usize,
    o: usize,
    conv: ConvParams,
}

impl ConvDims {
    fn new(input: &[usize], o: usize, conv: ConvParams) -> ConvDims {
        let [batch, h, w, c] = image::shape(input);
        let [oh, ow] = conv.output_size([h, w]);
        let z = ConvDims { batch, h, w, c, oh, ow, o, conv };
        assert!(batch * h * w * c * o * conv.kernel > 0, "an empty convolution: {z:?}");
        z
    }

    /// Elements under one window.
    fn window(&self) -> usize {
        self.conv.kernel * self.conv.kernel * self.c
    }

    /// Rows of output pixels, all images.
    fn rows(&self) -> usize {
        self.batch * self.oh
    }

    fn input_shape(&self) -> [usize; 4] {
        [self.batch, self.h, self.w, self.c]
    }

    fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.oh, self.ow, self.o]
    }

    fn weight_shape(&self) -> [usize; 4] {
        [self.o, self.conv.kernel, self.conv.kernel, self.c]
    }

    fn check_weight(&self, w: &Tensor) {
        assert_eq!(
            w.shape(),
            self.weight_shape(),
            "a convolution's weight is [output, kernel, kernel, input]"
        );
    }
}

/// Inputs under a window, and outputs, whose weights are moved at a time: they stay in the first-level cache
/// although one of the two orders jumps.
const CHANNELS: usize = 16;

/// Adds up partial sums of the weight's gradient, each [slices of outputs, window, `slice` outputs], into
/// dw: [o, window].
fn collect<T: Float>(cpu: &Cpu, sums: &[f32], slice: usize, z: &ConvDims, dw: &mut [T]) {
    let (depth, size) = (z.window(), z.window() * z.o);
    cpu.for_chunks(dw, CHANNELS * depth, |range, dw| {
        let first = range.start / depth;
        let start = first / slice * slice;
        let width = slice.min(z.o - start);
        let count = dw.len() / depth;
        for input in 0..depth {
            let mut total = [0.0f32; CHANNELS];
            for partial in sums.chunks_exact(size) {
                let at = start * depth + input * width + first - start;
                total.iter_mut().zip(&partial[at..at + count]).for_each(|(total, x)| *total += x);
            }
            for (o, total) in total[..count].iter().enumerate() {
                dw[o * depth + input] = T::from_f32(*total);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;
    use crate::cuda::Cuda;
    use crate::random;
    use crate::testing::{self, assert_close, check_on, dot, gradient, tensor, values, wide};

    /// Calls `f(y index, x index, w index)` for every product of the convolution.
    fn products(z: &ConvDims, mut f: impl FnMut(usize, usize, usize)) {
        let ConvParams { kernel, stride, padding } = z.conv;
        for (n, i, j) in grid(z.batch, z.oh, z.ow) {
            for (u, v, o) in grid(kernel, kernel, z.o) {
                let (row, column) = (i * stride + u, j * stride + v);
                let rows = padding.top..padding.top + z.h;
                if rows.contains(&row) && (padding.left..padding.left + z.w).contains(&column) {
                    let y = ((n * z.oh + i) * z.ow + j) * z.o + o;
                    let x = ((n * z.h + row - padding.top) * z.w + column - padding.left) * z.c;
                    let w = ((o * kernel + u) * kernel + v) * z.c;
                    (0..z.c).for_each(|c| f(y, x + c, w + c));
                }
            }
        }
    }

    fn grid(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..a * b * c).map(move |i| (i / c / b, i / c % b, i % c))
    }

    fn plain_forward(x: &[f64], w: &[f64], z: &ConvDims) -> Vec<f64> {
        let mut out = vec![0.0; z.rows() * z.ow * z.o];
        products(z, |y, xi, wi| out[y] += x[xi] * w[wi]);
        out
    }

    /// Mostly zeros, as behind a ReLU and a max pool, at places that differ from channel to channel.
    fn few_values(seed: u64, n: usize, spread: f64) -> Vec<f32> {
        let kept = testing::integers(seed ^ 77, n, 5);
        values(seed, n, spread).iter().zip(kept).map(|(x, kept)| if kept == 0 { *x } else { 0.0 }).collect()
    }

    fn plain_backward(dy: &[f64], x: &[f64], w: &[f64], z: &ConvDims) -> (Vec<f64>, Vec<f64>) {
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        products(z, |y, xi, wi| {
            dx[xi] += dy[y] * w[wi];
            dw[wi] += dy[y] * x[xi];
        });
        (dx, dw)
    }

    /// The first GPU, where there is one, with or without cuDNN, in TF32 where that is allowed; opened for
    /// this alone, since other tests use other settings at the same time.
    fn gpu(cudnn: bool) -> Option<[Device; 3]> {
        if !testing::devices().iter().any(|devices| matches!(devices[0], Device::Cuda(_))) {
            return None;
        }
        if let Err(why) = Cuda::cudnn()
            && cudnn
        {
            espalier_testing::skipped(espalier_testing::Need::Cudnn, why);
            return None;
        }
        let gpu = Cuda::open(0).unwrap();
        gpu.use_cudnn(cudnn);
        gpu.allow_tf32_in_convolutions(cudnn);
        Some([1, 2, 3].map(|_| Device::Cuda(gpu.clone())))
    }

    /// The host's devices and, where there is one, a GPU with our own kernels: f32 is exact on them.
    fn exact_devices() -> &'static [[Device; 3]] {
        static DEVICES: OnceLock<Vec<[Device; 3]>> = OnceLock::new();
        DEVICES.get_or_init(|| {
            let hosts = testing::devices().iter().filter(|devices| matches!(devices[0], Device::Cpu(_)));
            hosts.cloned().chain(gpu(false)).collect()
        })
    }

    /// A GPU with cuDNN, where there is one.
    fn cudnn_devices() -> &'static [[Device; 3]] {
        static DEVICES: OnceLock<Vec<[Device; 3]>> = OnceLock::new();
        DEVICES.get_or_init(|| gpu(true).into_iter().collect())
    }

    /// Of sums that are rounded as usual.
    const TOLERANCES: [(DType, f64); 2] = [(DType::F32, 5e-5), (DType::Bf16, 1.0 / 128.0)];

    /// Makes numbers: of a seed, how many, and how far they spread.
    type Values = fn(u64, usize, f64) -> Vec<f32>;

    /// All three passes against the plain loops, everywhere, on numbers that bf16 holds exactly. So does
    /// TF32, hence its products are exact too; but the tensor cores cut off where others round when they add
    /// up.
    fn compare(shape: [usize; 4], o: usize, conv: ConvParams, seed: u64) {
        compare_on(exact_devices(), &TOLERANCES, [values; 2], shape, o, conv, seed);
        compare_on(cudnn_devices(), &[(DType::F32, 2e-4), TOLERANCES[1]], [values; 2], shape, o, conv, seed);
    }

    fn compare_on(
        devices: &[[Device; 3]],
        tolerances: &[(DType, f64)],
        [values, gradients]: [Values; 2],
        shape: [usize; 4],
        o: usize,
        conv: ConvParams,
        seed: u64,
    ) {
        let z = ConvDims::new(&shape, o, conv);
        eprintln!("{z:?}");
        let weight = z.weight_shape();
        let spread = 1.0 / (z.window() as f64).sqrt();
        let x = values(seed, shape.iter().product(), 1.0);
        let w = values(seed + 1, weight.iter().product(), spread);
        let bias = values(seed + 2, o, 1.0);
        let dy = gradients(seed + 3, z.output_shape().iter().product(), 1.0);
        let (x64, w64) = (wide(&x), wide(&w));
        let y = plain_forward(&x64, &w64, &z);
        let biased = y.iter().zip(wide(&bias).iter().cycle()).map(|(y, bias)| y + bias).collect();
        let (dx, dw) = plain_backward(&wide(&dy), &x64, &w64, &z);
        check_on(devices, tolerances, &[y, biased, dx, dw], &|device, dtype| {
            let x = tensor(device, dtype, &shape, &x);
            let w = tensor(device, dtype, &weight, &w);
            let bias = tensor(device, dtype, &[o], &bias);
            let dy = tensor(device, dtype, &z.output_shape(), &dy);
            let biased = forward(&x, &w, Some(&bias), conv).unwrap();
            // To the bit: of sums that nearly cancel, little is left beside what their rounding dropped.
            let cut: Vec<f32> = biased.to_f32().iter().map(|y| y.max(0.0)).collect();
            assert_eq!(forward_relu(&x, &w, Some(&bias), conv).unwrap().to_f32(), cut);
            vec![
                forward(&x, &w, None, conv).unwrap(),
                biased,
                backward_input(&dy, &w, conv, &shape).unwrap(),
                backward_weight(&x, &dy, conv).unwrap(),
            ]
        });
    }

    /// Images of few channels, which GPUs have kernels of their own for: more pixels than a block has, and fewer.
    #[test]
    fn thin_images_agree_with_plain_loops() {
        for (shape, o, kernel, stride, padding) in [
            ([3, 28, 28, 1], 32, 5, 1, 0),
            ([2, 13, 9, 3], 16, 3, 2, 1),
            ([1, 5, 4, 1], 4, 1, 1, 0),
            ([2, 9, 10, 2], 128, 2, 1, 1),
            ([5, 17, 8, 4], 64, 4, 3, 2),
        ] {
            let conv = ConvParams { kernel, stride, padding: padding.into() };
            assert!(thin::serves(&ConvDims::new(&shape, o, conv), DType::F32));
            compare(shape, o, conv, 5);
        }
        let no = |shape: [usize; 4], o| {
            !thin::serves(
                &ConvDims::new(&shape, o, ConvParams { kernel: 5, stride: 1, padding: 0.into() }),
                DType::F32,
            )
        };
        assert!(no([1, 9, 9, 3], 32), "a window of 75");
        assert!(no([1, 9, 9, 1], 24), "no power of two");
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
            compare([batch, h, w, c], o, ConvParams { kernel, stride, padding: padding.into() }, seed);
        }

        /// The strips beside a cut, which are thinner than the window and padded on one side alone, among them.
        #[test]
        fn padding_may_differ_from_side_to_side(
            (kernel, stride, [top, bottom, left, right]) in (1usize..6, 1usize..4, [0usize..5, 0..5, 0..5, 0..5]),
            (batch, h, w) in (1usize..5, 1usize..9, 1usize..9),
            (c, o) in (1usize..20, 1usize..40),
            seed in 0u64..1000,
        ) {
            prop_assume!(h + top + bottom >= kernel && w + left + right >= kernel);
            let padding = Padding { top, bottom, left, right };
            compare([batch, h, w, c], o, ConvParams { kernel, stride, padding }, seed);
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
            ([9, 4, 5, 96], 33, 3, 1, 1),
        ] {
            compare(shape, o, ConvParams { kernel, stride, padding: Padding::all(padding) }, 7);
        }
        // resnet8's at stride 2, padded as TensorFlow's "same".
        let padding = Padding { top: 0, bottom: 1, left: 0, right: 1 };
        for (shape, o) in [([2, 32, 32, 16], 32), ([3, 16, 12, 32], 64)] {
            compare(shape, o, ConvParams { kernel: 3, stride: 2, padding }, 7);
        }
    }

    /// Simple-cnn's layers and resnet8's, with batches that fill vectors and one that does not, an odd number of
    /// channels, and few channels, strides and small batches, which are left to the dense kernels.
    #[test]
    fn pruned_weights_agree_with_plain_loops() {
        for (shape, o, kernel, stride, padding) in [
            ([20, 28, 28, 1], 32, 5, 1, 0),
            ([16, 8, 8, 32], 64, 5, 1, 0),
            ([33, 8, 9, 16], 10, 3, 1, 1),
            ([18, 6, 7, 19], 7, 3, 1, 1),
            ([16, 5, 3, 3], 5, 1, 1, 0),
            ([17, 7, 7, 4], 8, 3, 2, 1),
            ([3, 6, 6, 16], 16, 3, 1, 1),
        ] {
            let conv = ConvParams { kernel, stride, padding: Padding::all(padding) };
            compare_on(exact_devices(), &TOLERANCES, [few_values, values], shape, o, conv, 13);
        }
    }

    /// Simple-cnn's second layer, a stride, runs of more vectors than registers hold, and shapes that are
    /// left to the dense kernels: few channels, channels that fill no vector, a border.
    #[test]
    fn gradients_of_what_is_mostly_zeros_agree_with_plain_loops() {
        for (shape, o, kernel, stride, padding) in [
            ([3, 12, 12, 32], 64, 5, 1, 0),
            ([130, 6, 6, 16], 16, 3, 1, 0),
            ([2, 11, 10, 16], 32, 3, 2, 0),
            ([2, 7, 6, 64], 16, 5, 1, 0),
            ([2, 9, 9, 1], 16, 5, 1, 0),
            ([2, 9, 9, 16], 20, 3, 1, 0),
            ([2, 9, 9, 16], 16, 3, 1, 1),
        ] {
            let conv = ConvParams { kernel, stride, padding: Padding::all(padding) };
            compare_on(exact_devices(), &TOLERANCES, [values, few_values], shape, o, conv, 11);
        }
    }

    /// Normal numbers with all the bits of an f32, which neither bf16 nor TF32 holds.
    fn full_values(seed: u64, n: usize, spread: f64) -> Vec<f32> {
        let key = random::key(seed, n as u64);
        (0..n as u64).map(|i| (random::normal(key, i) * spread) as f32).collect()
    }

    /// A layer of a VGG, a ResNet's stride, and a photograph's channels: f32 means f32, unless TF32 is
    /// allowed, which rounds each operand to within 2^-11.
    #[test]
    fn f32_is_exact_unless_tf32_is_allowed() {
        for (shape, o, kernel, stride, padding) in
            [([2, 8, 8, 64], 32, 3, 1, 1), ([2, 9, 9, 16], 64, 3, 2, 1), ([2, 16, 16, 3], 16, 7, 2, 3)]
        {
            let conv = ConvParams { kernel, stride, padding: Padding::all(padding) };
            compare_on(exact_devices(), &TOLERANCES[..1], [full_values; 2], shape, o, conv, 3);
            compare_on(cudnn_devices(), &[(DType::F32, 1.0 / 512.0)], [full_values; 2], shape, o, conv, 3);
        }
    }

    #[test]
    fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
        let z = ConvDims::new(
            &[1, 5, 4, 2],
            3,
            ConvParams { kernel: 3, stride: 2, padding: Padding { top: 1, bottom: 0, left: 2, right: 1 } },
        );
        let (x, w) = (wide(&values(1, 40, 1.0)), wide(&values(2, 54, 1.0)));
        let dy = wide(&values(3, z.rows() * z.ow * z.o, 1.0));
        let loss = |x: &[f64], w: &[f64]| dot(&plain_forward(x, w, &z), &dy);
        let (dx, dw) = plain_backward(&dy, &x, &w, &z);
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        assert_close(&narrow(dx), &gradient(&x, |x| loss(x, &w)), 1e-6);
        assert_close(&narrow(dw), &gradient(&w, |w| loss(&x, w)), 1e-6);
    }

    #[test]
    fn sizes_follow_the_usual_rule() {
        let size = |kernel, stride, padding, size| ConvParams { kernel, stride, padding }.output_size(size);
        assert_eq!(size(5, 1, Padding::NONE, [28, 9]), [24, 5]);
        assert_eq!(size(3, 2, Padding::all(1), [7, 32]), [4, 16]);
        assert_eq!(size(3, 1, Padding { top: 1, bottom: 0, left: 0, right: 2 }, [8, 8]), [7, 8]);
    }
}

//! The speed of a GPU's convolutions at the layers of known networks, in microseconds: our own kernels beside
//! cuDNN, in f32, TF32 and bf16. Every time is that of the whole operation, with what it does to weights and
//! scratch space.
//!
//! `cargo bench -p espalier-tensor --bench cuda_conv -- [--json] [--offers]`
//!
//! `--json` prints a line for each time, which `conv_check.py` sets beside PyTorch's; `--offers` prints every
//! algorithm that cuDNN ranks for the layers, channels filled up to 16 bytes, with its time, and marks those
//! that we would use.

use std::time::Instant;

use espalier_tensor::cuda::Cuda;
use espalier_tensor::cuda::dnn::{ConvKey, ConvPass};
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::{Category, DType, Device, Tensor, random};

/// Network, image side, channels, outputs, window, stride, padding.
type Layer = (&'static str, usize, usize, usize, usize, usize, usize);

const BATCH: usize = 128;
const LAYERS: &[Layer] = &[
    ("vgg-16", 32, 3, 64, 3, 1, 1),
    ("vgg-16", 32, 64, 64, 3, 1, 1),
    ("vgg-16", 16, 64, 128, 3, 1, 1),
    ("vgg-16", 16, 128, 128, 3, 1, 1),
    ("vgg-16", 8, 128, 256, 3, 1, 1),
    ("vgg-16", 8, 256, 256, 3, 1, 1),
    ("vgg-16", 4, 256, 512, 3, 1, 1),
    ("vgg-16", 4, 512, 512, 3, 1, 1),
    ("vgg-16", 2, 512, 512, 3, 1, 1),
    ("resnet8", 32, 3, 16, 3, 1, 1),
    ("resnet8", 32, 16, 16, 3, 1, 1),
    ("resnet8", 32, 16, 32, 3, 2, 1),
    ("resnet8", 16, 32, 64, 3, 2, 1),
    ("resnet8", 8, 64, 64, 3, 1, 1),
    ("simple-cnn", 28, 1, 32, 5, 1, 0),
    ("simple-cnn", 12, 32, 64, 5, 1, 0),
    ("stem", 32, 3, 64, 5, 1, 2),
    ("stem", 64, 3, 64, 7, 2, 3),
];

/// How a convolution is computed: whether by cuDNN where it is the better way, and in which type.
const VARIANTS: [(&str, bool, DType); 4] = [
    ("own f32", false, DType::F32),
    ("cuDNN tf32", true, DType::F32),
    ("own bf16", false, DType::Bf16),
    ("cuDNN bf16", true, DType::Bf16),
];

const PASSES: [&str; 3] = ["forward", "input", "weight"];

fn main() {
    let flag = |name: &str| std::env::args().any(|argument| argument == name);
    let probe = Cuda::probe();
    if !probe.usable() {
        println!("SKIPPED, nothing was measured: {}", probe.missing.join("; "));
        return;
    }
    match Cuda::cudnn() {
        Ok((major, minor, patch)) => eprintln!("{}cuDNN        {major}.{minor}.{patch}", probe),
        Err(why) => eprintln!("{probe}cuDNN is not used, and its columns are our own kernels: {why}"),
    }
    let cuda = Cuda::open(0).unwrap();
    if flag("--offers") {
        return LAYERS.iter().for_each(|layer| offers(&cuda, *layer));
    }
    if !flag("--json") {
        println!(
            "{:<40}{}",
            "microseconds, batch 128",
            VARIANTS.map(|variant| format!("{:>12}", variant.0)).concat()
        );
    }
    for &layer in LAYERS {
        let times = VARIANTS.map(|(_, cudnn, dtype)| {
            cuda.use_cudnn(cudnn);
            cuda.allow_tf32_in_convolutions(cudnn);
            measure(&Device::Cuda(cuda.clone()), layer, dtype)
        });
        for (pass, name) in PASSES.into_iter().enumerate() {
            if flag("--json") {
                for (variant, times) in VARIANTS.iter().zip(times) {
                    let (net, side, c, o, kernel, stride, padding) = layer;
                    println!(
                        "{{\"net\": \"{net}\", \"layer\": [{side}, {c}, {o}, {kernel}, {stride}, {padding}], \"pass\": \
                         \"{name}\", \"way\": \"{}\", \"us\": {:.2}}}",
                        variant.0,
                        times[pass] * 1e6
                    );
                }
            } else {
                let row = times.map(|times| format!("{:>12.1}", times[pass] * 1e6)).concat();
                println!("{:<40}{row}", format!("{} {name}", describe(layer)));
            }
        }
    }
}

fn describe((net, side, c, o, kernel, stride, _): Layer) -> String {
    format!("{net} {side}^2 {c} to {o}, {kernel}/{stride}")
}

/// Seconds of the three passes.
fn measure(device: &Device, (_, side, c, o, kernel, stride, padding): Layer, dtype: DType) -> [f64; 3] {
    let geometry = ConvParams { kernel, stride, padding: padding.into() };
    let [out, _] = geometry.output_size([side, side]);
    let x = noise(device, &[BATCH, side, side, c], dtype);
    let w = noise(device, &[o, kernel, kernel, c], dtype);
    let bias = noise(device, &[o], dtype);
    let dy = noise(device, &[BATCH, out, out, o], dtype);
    [
        time(device, || conv::forward(&x, &w, Some(&bias), geometry).unwrap()),
        time(device, || conv::backward_input(&dy, &w, geometry, x.shape()).unwrap()),
        time(device, || conv::backward_weight(&x, &dy, geometry).unwrap()),
    ]
}

/// The shortest mean of a few rounds of runs.
fn time(device: &Device, work: impl Fn() -> Tensor) -> f64 {
    const RUNS: u32 = 20;
    for _ in 0..3 {
        drop(work());
    }
    let round = || {
        device.synchronize().unwrap();
        let start = Instant::now();
        for _ in 0..RUNS {
            drop(work());
        }
        device.synchronize().unwrap();
        start.elapsed().as_secs_f64() / f64::from(RUNS)
    };
    (0..3).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn noise(device: &Device, shape: &[usize], dtype: DType) -> Tensor {
    let key = random::key(1, 1);
    // One block of numbers, over and over: drawing millions would take longer than all measurements.
    let block: Vec<f32> = (0..65_521).map(|i| random::uniform(key, i) as f32 - 0.5).collect();
    let data: Vec<f32> = block.iter().copied().cycle().take(shape.iter().product()).collect();
    Tensor::from_f32(device, shape, dtype, &data, Category::Activations).unwrap()
}

/// What cuDNN ranks for a layer, measured.
fn offers(cuda: &Cuda, layer: Layer) {
    let (_, side, c, o, kernel, stride, padding) = layer;
    let [out, _] = ConvParams { kernel, stride, padding: padding.into() }.output_size([side, side]);
    for dtype in [DType::F32, DType::Bf16] {
        for (pass, name) in [ConvPass::Forward, ConvPass::Input, ConvPass::Weight].into_iter().zip(PASSES) {
            let (x, y) = ([BATCH, side, side, c.next_multiple_of(16 / dtype.bytes())], [BATCH, out, out, o]);
            let (padding_before, padding_after) = ([padding; 2], [padding; 2]);
            let key = ConvKey { pass, dtype, x, y, kernel, stride, padding_before, padding_after };
            println!("{} {dtype:?} {name}", describe(layer));
            for (rank, offer) in cuda.convolution_offers(&key).unwrap().iter().enumerate() {
                let traits = offer.traits;
                println!(
                    "  {rank:>2} {} engine {:>3} {:>8.1} us, {:>6.1} MiB, planned in {:>6.1} ms{}{}{}{}",
                    if offer.used { "*" } else { " " },
                    traits.engine,
                    offer.seconds * 1e6,
                    offer.workspace as f64 / f64::from(1 << 20),
                    offer.planning * 1e3,
                    if traits.tensor_cores { ", tensor cores" } else { "" },
                    if traits.repeats { "" } else { ", does not repeat" },
                    if traits.plain { "" } else { ", alters operands or sums" },
                    if traits.compiled { ", compiled" } else { "" },
                );
            }
        }
    }
}

//! Speed of the operations on images and sequences: milliseconds of each pass, and the sums over the
//! convolutions of whole networks.
//!
//! `cargo bench -p espalier-tensor --bench space [-- --threads N] [--seconds S] [--only NAME] [--bf16]`
//!
//! `--processor` counts the processor's time instead of the clock's, and takes the least of the runs instead of
//! their median: what to compare on a machine that is busy with other things.

use std::time::Instant;

use espalier_tensor::ops::batch_norm::NormEpilogue;
use espalier_tensor::ops::conv::{self, ConvParams};
use espalier_tensor::ops::padding::Padding;
use espalier_tensor::ops::pool::{self, PoolParams};
use espalier_tensor::ops::{attention, batch_norm};
use espalier_tensor::{Category, DType, Device, Tensor, random};

/// Side, input channels, output channels, kernel, stride, padding, how many times in the network.
type Layer = (usize, usize, usize, usize, usize, usize, usize);

const SIMPLE: &[Layer] = &[(28, 1, 32, 5, 1, 0, 1), (12, 32, 64, 5, 1, 0, 1)];
const RESNET8: &[Layer] = &[
    (32, 3, 16, 3, 1, 1, 1),
    (32, 16, 16, 3, 1, 1, 2),
    (32, 16, 32, 3, 2, 1, 1),
    (16, 32, 32, 3, 1, 1, 1),
    (16, 32, 64, 3, 2, 1, 1),
    (8, 64, 64, 3, 1, 1, 1),
];
const VGG16: &[Layer] = &[
    (32, 3, 64, 3, 1, 1, 1),
    (32, 64, 64, 3, 1, 1, 1),
    (16, 64, 128, 3, 1, 1, 1),
    (16, 128, 128, 3, 1, 1, 1),
    (8, 128, 256, 3, 1, 1, 1),
    (8, 256, 256, 3, 1, 1, 2),
    (4, 256, 512, 3, 1, 1, 1),
    (4, 512, 512, 3, 1, 1, 2),
    (2, 512, 512, 3, 1, 1, 3),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).map(String::as_str)
    };
    let threads = value("--threads").map_or(2, |n| n.parse().expect("a number of threads"));
    let seconds = value("--seconds").map_or(0.5, |n| n.parse().expect("a number of seconds"));
    let dtype = if arguments.iter().any(|a| a == "--bf16") { DType::Bf16 } else { DType::F32 };
    let wanted = |name: &str| value("--only").is_none_or(|only| only == name);
    let device = Device::cpu(threads).expect("threads");
    let processor = arguments.iter().any(|a| a == "--processor");
    let bench = Bench { device: &device, dtype, seconds, processor };
    device.enter(|| {
        for (name, layers) in [("simple-cnn", SIMPLE), ("resnet8", RESNET8), ("vgg16", VGG16)] {
            if wanted(name) {
                bench.network(name, layers);
            }
        }
        if wanted("pool") {
            bench.pools();
        }
        if wanted("norm") {
            bench.norms();
        }
        if wanted("attention") {
            bench.attention(8, 256, 8, 64);
        }
    });
}

struct Bench<'a> {
    device: &'a Device,
    dtype: DType,
    seconds: f64,
    processor: bool,
}

/// Seconds that this process has run, all threads together.
fn processor_time() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `t` alone.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

impl Bench<'_> {
    fn tensor(&self, shape: &[usize]) -> Tensor {
        let key = random::key(1, shape.len() as u64);
        let n = shape.iter().product::<usize>() as u64;
        let data: Vec<f32> = (0..n).map(|i| random::uniform(key, i) as f32 - 0.5).collect();
        Tensor::from_f32(self.device, shape, self.dtype, &data, Category::Activations).expect("memory")
    }

    /// The time of a call, in milliseconds.
    fn time<R>(&self, work: impl Fn() -> R) -> f64 {
        work();
        let begin = Instant::now();
        let now = || if self.processor { processor_time() } else { begin.elapsed().as_secs_f64() };
        let mut times = Vec::new();
        while times.len() < 3 || begin.elapsed().as_secs_f64() < self.seconds {
            let start = now();
            std::hint::black_box(work());
            times.push((now() - start) * 1e3);
        }
        times.sort_by(f64::total_cmp);
        times[if self.processor { 0 } else { times.len() / 2 }]
    }

    fn network(&self, name: &str, layers: &[Layer]) {
        const BATCH: usize = 128;
        println!("{name:12} {:>24}  forward      dx      dw   ms; GFLOP/s of each", "");
        let mut total = 0.0;
        for (i, &(side, c, o, kernel, stride, padding, times)) in layers.iter().enumerate() {
            let conv = ConvParams { kernel, stride, padding: padding.into() };
            let [out, _] = conv.output_size([side, side]);
            let shape = [BATCH, side, side, c];
            let (x, w) = (self.tensor(&shape), self.tensor(&[o, kernel, kernel, c]));
            let (bias, dy) = (self.tensor(&[o]), self.tensor(&[BATCH, out, out, o]));
            let forward = self.time(|| conv::forward(&x, &w, Some(&bias), conv).unwrap());
            // The first layer of a network needs no gradient of its input.
            let dx =
                if i == 0 { 0.0 } else { self.time(|| conv::backward_input(&dy, &w, conv, &shape).unwrap()) };
            let dw = self.time(|| conv::backward_weight(&x, &dy, conv).unwrap());
            let flops = 2e-6 * (BATCH * out * out * o * c * kernel * kernel) as f64;
            let rates = [forward, dx, dw].map(|ms| if ms > 0.0 { flops / ms } else { 0.0 });
            println!(
                "{side:4} x {c:3} -> {o:3}, {kernel} / {stride}, {times} times {forward:10.2} {dx:7.2} {dw:7.2}   {rates:6.0?}"
            );
            total += (forward + dx + dw) * times as f64;
        }
        println!("{name:12} convolutions {total:.1} ms");
    }

    fn pools(&self) {
        let pool = PoolParams { kernel: 2, stride: 2, padding: Padding::NONE };
        for (side, c) in [(24, 32), (32, 64), (16, 128)] {
            let shape = [128, side, side, c];
            let x = self.tensor(&shape);
            let (y, places) = pool::max_forward(&x, pool, true).unwrap();
            let forward = self.time(|| pool::max_forward(&x, pool, true).unwrap());
            let backward = self.time(|| pool::max_backward(&y, &places, pool, &shape).unwrap());
            let mean = self.time(|| pool::avg_forward(&x, pool).unwrap());
            let spread = self.time(|| pool::avg_backward(&y, pool, &shape).unwrap());
            println!("pool {side} x {c}: max {forward:.2} {backward:.2}, avg {mean:.2} {spread:.2} ms");
        }
    }

    fn norms(&self) {
        for (side, c) in [(32, 64), (16, 128), (4, 512), (2, 512)] {
            let x = self.tensor(&[128, side, side, c]);
            let scale = self.tensor(&[c]);
            let (_, mean, rstd) =
                batch_norm::forward(&x, &scale, &scale, 1e-5, NormEpilogue::default()).unwrap();
            let forward =
                self.time(|| batch_norm::forward(&x, &scale, &scale, 1e-5, NormEpilogue::default()).unwrap());
            let backward = self.time(|| batch_norm::backward(&x, &x, &scale, &mean, &rstd).unwrap());
            println!("batch norm {side} x {c}: {forward:.2} {backward:.2} ms");
        }
    }

    fn attention(&self, batch: usize, t: usize, heads: usize, d: usize) {
        let qkv = self.tensor(&[batch, t, 3 * heads * d]);
        let (y, logsumexp) = attention::forward(&qkv, heads, heads).unwrap();
        let forward = self.time(|| attention::forward(&qkv, heads, heads).unwrap());
        let backward = self.time(|| attention::backward(&y, &qkv, &y, &logsumexp, heads, heads).unwrap());
        println!("attention {batch} x {t} x {heads} x {d}: {forward:.2} {backward:.2} ms");
    }
}

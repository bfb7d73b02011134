//! The speed of the element-wise and row-wise operations, as memory traffic: bytes that must be read and written
//! at least once, divided by the time, beside a plain copy in the same run.
//!
//! `cargo bench -p espalier-tensor --bench ops -- [threads]`

use std::hint::black_box;
use std::time::Instant;

use espalier_tensor::cpu::{Cpu, Isa};
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::dropout::ElementNumbering;
use espalier_tensor::ops::embedding::TableRows;
use espalier_tensor::ops::update::{self, ParamUpdate, StepParams, TrustNorms, UpdateRule};
use espalier_tensor::ops::{
    cast, cross_entropy, dropout, elementwise, embedding, layer_norm, reduce, rms_norm,
};
use espalier_tensor::{Category, DType, Device, Tensor, random};

const ROWS: usize = 8192;
const WIDTH: usize = 1024;
const VOCAB: usize = 50_257;

/// The shortest time of several runs of `work`, each on what `prepare` makes, untimed.
fn time<T>(prepare: impl Fn() -> T, mut work: impl FnMut(T)) -> f64 {
    (0..15)
        .map(|_| {
            let input = prepare();
            let start = Instant::now();
            work(input);
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// The same of work that needs nothing made for it.
fn of<T>(mut work: impl FnMut() -> T) -> f64 {
    time(|| (), |()| drop(black_box(work())))
}

fn noise(device: &Device, shape: &[usize], dtype: DType) -> Tensor {
    let n = shape.iter().product::<usize>();
    let key = random::key(1, 1);
    let data: Vec<f32> = (0..n as u64).map(|i| random::uniform(key, i) as f32 * 4.0 - 2.0).collect();
    Tensor::from_f32(device, shape, dtype, &data, Category::Activations).unwrap()
}

fn main() {
    let threads = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(1);
    for isa in Isa::available().filter(|isa| isa.amx().is_none()) {
        for dtype in [DType::F32, DType::Bf16] {
            table(&Device::Cpu(Cpu::with_isa(threads, isa).unwrap()), isa, dtype, threads);
        }
    }
}

fn table(device: &Device, isa: Isa, dtype: DType, threads: usize) {
    let shape = [ROWS, WIDTH];
    let x = noise(device, &shape, dtype);
    let dy = noise(device, &shape, dtype);
    let bytes = x.byte_len() as f64;
    println!("\n{isa:?}, {dtype:?}, {threads} threads, [{ROWS}, {WIDTH}]        GB/s   of a copy");
    let copy = bytes * 2.0 / of(|| cast::cast(&x, dtype, Category::Activations));
    let report = |name: &str, bytes: f64, seconds: f64| {
        println!("{name:<44} {:8.1} {:9.2}", bytes / seconds / 1e9, bytes / seconds / copy);
    };
    report("copy", copy, 1.0);
    for kind in [ActivationFn::Relu, ActivationFn::Gelu, ActivationFn::Silu] {
        report(&format!("{kind:?}"), 2.0 * bytes, of(|| activation::forward(kind, &x)));
        let prepare = || dy.duplicate(Category::Activations).unwrap();
        let work = |dy| drop(black_box(activation::backward(kind, &x, dy)));
        report(&format!("{kind:?}, backward"), 3.0 * bytes, time(prepare, work));
        let work = |dy| drop(black_box(activation::backward_remaking(kind, &x, dy)));
        report(&format!("{kind:?}, backward and again"), 4.0 * bytes, time(prepare, work));
    }
    report("add", 3.0 * bytes, of(|| elementwise::add(&x, &dy)));
    let (key, numbers) = (random::key(1, 2), ElementNumbering::from(0));
    report("dropout", 2.0 * bytes, of(|| dropout::apply(&x, 0.1, key, numbers)));
    report("sum_rows", bytes, of(|| reduce::sum_rows(&x, Category::Gradients)));
    report("squared_norm", bytes, of(|| reduce::squared_norm(&x).unwrap()));

    let (scale, shift) = (noise(device, &[WIDTH], dtype), noise(device, &[WIDTH], dtype));
    let (_, statistics) = layer_norm::forward(&x, &scale, &shift, 1e-5).unwrap();
    report("layer_norm", 2.0 * bytes, of(|| layer_norm::forward(&x, &scale, &shift, 1e-5)));
    let input = of(|| layer_norm::backward_input(&dy, &x, &scale, &statistics));
    report("layer_norm, input's gradient", 3.0 * bytes, input);
    let prepare = || Some(dy.duplicate(Category::Activations).unwrap());
    let remaking =
        |plus| drop(black_box(layer_norm::backward_remaking(&dy, &x, &scale, &shift, &statistics, plus)));
    report("layer_norm, input's gradient, sum, y", 5.0 * bytes, time(prepare, remaking));
    let weights = of(|| layer_norm::backward_weights(&dy, &x, &statistics, dtype));
    report("layer_norm, weights' gradients", 2.0 * bytes, weights);
    let (_, statistics) = rms_norm::forward(&x, &scale, 1e-5).unwrap();
    report("rms_norm", 2.0 * bytes, of(|| rms_norm::forward(&x, &scale, 1e-5)));
    let input = of(|| rms_norm::backward_input(&dy, &x, &scale, &statistics));
    report("rms_norm, input's gradient", 3.0 * bytes, input);

    // Ids as unequal as those of a text.
    let id = |i: u64| (random::uniform(random::key(3, 3), i).powi(6) * VOCAB as f64) as u32;
    let ids: Vec<u32> = (0..ROWS as u64).map(id).collect();
    let ids = Tensor::from_slice(device, &[1, ROWS], &ids, Category::Activations).unwrap();
    let embed = of(|| embedding::backward(&ids, &dy, VOCAB, TableRows::All));
    report("embedding, backward (v 50257)", bytes + bytes * VOCAB as f64 / ROWS as f64, embed);

    for v in [10, VOCAB] {
        let rows = x.len() / v;
        let logits = noise(device, &[rows, v], dtype);
        let targets: Vec<u32> = (0..rows).map(|i| (i * 7 % v) as u32).collect();
        let targets = Tensor::from_slice(device, &[rows], &targets, Category::Activations).unwrap();
        let prepare = || logits.duplicate(Category::Activations).unwrap();
        let work = |logits| {
            let mut losses = cross_entropy::LossAccumulator::new(&targets).unwrap();
            drop(black_box(losses.differentiate(logits, 1.0)));
            losses.total().unwrap();
        };
        report(&format!("cross_entropy (v {v})"), 2.0 * logits.byte_len() as f64, time(prepare, work));
    }

    let zeros = || Tensor::zeros(device, &shape, DType::F32, Category::Optimizer).unwrap();
    let (mut w, mut master, mut m, mut v) = (noise(device, &shape, dtype), zeros(), zeros(), zeros());
    // Reads and writes of the states, the f32 weight and, where there is one, the rounded weight.
    let traffic = |states: f64| {
        (2.0 * states + 2.0) * 4.0 * x.len() as f64 + if dtype == DType::Bf16 { 2.0 * bytes } else { bytes }
    };
    let mixed = dtype == DType::Bf16;
    let (beta1, beta2, eps) = (0.9, 0.999, 1e-8);
    for (name, rule) in [
        ("momentum", UpdateRule::Momentum { momentum: 0.9, nesterov: true }),
        ("adam", UpdateRule::Adam { beta1, beta2, eps, decoupled: true }),
        ("lamb, with its norms", UpdateRule::Lamb { beta1, beta2, eps, max_norm: f32::INFINITY }),
    ] {
        v.fill_zero().unwrap();
        let seconds = of(|| {
            let target = ParamUpdate {
                rounding: None,
                weight: &mut w,
                master: mixed.then_some(&mut master),
                gradient: &dy,
                states: [&mut v, &mut m].into_iter().take(rule.states()).collect(),
                mask: None,
                weight_decay: 0.1,
                adapt: true,
            };
            let step = StepParams { lr: 1e-3, gradient_scale: 1.0, number: 3 };
            update::step(rule, step, vec![target], TrustNorms::Measured).unwrap();
        });
        report(name, traffic(rule.states() as f64), seconds);
    }
}

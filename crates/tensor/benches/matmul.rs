//! Speed of the matrix product, a table of GFLOP/s by shape and type; `--json` prints a line of JSON for each.
//!
//! `cargo bench -p espalier-tensor --bench matmul [-- --json] [--threads N] [--seconds S] [--only f32|bf16]`
//!
//! A shape is written as the product is seen, `m x n x k`, with which operand is stored transposed: `nn` is the
//! forward of a layer with weights `[k, n]`, `nt` the gradient of its input, `tn` the gradient of its weights.

use std::time::Instant;

use espalier_tensor::cpu::Cpu;
use espalier_tensor::cpu::gemm::{GemmWorkspace, MatrixMut, MatrixRef, serial};
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, DType, Device, Float, Operand, Tensor, bf16, random};

/// Stored transposed?, m, n, k.
const SHAPES: [(&str, usize, usize, usize); 15] = [
    ("nn", 2048, 8192, 512),
    ("nt", 2048, 512, 8192),
    ("tn", 512, 8192, 2048),
    ("nn", 1024, 1024, 1024),
    ("nt", 1024, 1024, 1024),
    ("tn", 1024, 1024, 1024),
    ("nn", 2048, 512, 2048),
    ("nt", 2048, 2048, 512),
    ("tn", 512, 2048, 2048),
    ("nn", 128, 10, 1024),
    ("nt", 128, 1024, 10),
    ("tn", 1024, 10, 128),
    ("nn", 4096, 32, 288),
    ("tn", 288, 32, 65536),
    ("tn", 25, 16, 65536),
];

/// The single-thread products inside attention and convolution: as above.
const SMALL: [(&str, usize, usize, usize); 7] = [
    ("nt", 64, 64, 64),
    ("nt", 64, 256, 64),
    ("nn", 64, 64, 256),
    ("nn", 576, 16, 25),
    ("nn", 1024, 32, 288),
    ("nn", 1024, 64, 576),
    ("tn", 64, 64, 64),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).map(String::as_str)
    };
    let json = arguments.iter().any(|a| a == "--json");
    let threads = value("--threads").map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        |n| n.parse().expect("--threads takes a number"),
    );
    let seconds: f64 = value("--seconds").map_or(0.5, |s| s.parse().expect("--seconds takes a number"));
    let device = Device::cpu(threads).expect("threads");
    if !json {
        println!(
            "{:8} {:6} {:2} {:>5} {:>5} {:>5} {:>9} {:>9}",
            "threads", "type", "", "m", "n", "k", "best", "median"
        );
    }
    let report = |threads: usize,
                  dtype: &str,
                  (kind, m, n, k): (&str, usize, usize, usize),
                  times: &mut [f64]| {
        times.sort_by(f64::total_cmp);
        let rate = |seconds: f64| 2.0 * (m * n * k) as f64 / seconds / 1e9;
        let (best, median) = (rate(times[0]), rate(times[times.len() / 2]));
        if json {
            println!(
                r#"{{"threads":{threads},"dtype":"{dtype}","kind":"{kind}","m":{m},"n":{n},"k":{k},"best":{best:.2},"median":{median:.2}}}"#
            );
        } else {
            println!("{threads:<8} {dtype:6} {kind:2} {m:>5} {n:>5} {k:>5} {best:>9.1} {median:>9.1}");
        }
    };
    for (dtype, name) in [(DType::F32, "f32"), (DType::Bf16, "bf16")] {
        if value("--only").is_some_and(|only| only != name) {
            continue;
        }
        for shape in SHAPES {
            report(threads, name, shape, &mut device.enter(|| tensors(&device, dtype, shape, seconds)));
        }
        for shape in SMALL {
            let times = &mut match dtype {
                DType::Bf16 => slices::<bf16>(shape, seconds),
                _ => slices::<f32>(shape, seconds),
            };
            report(1, name, shape, times);
        }
    }
}

/// Seconds of each run until `seconds` have passed, after two that do not count.
fn measure(seconds: f64, repeat: usize, mut work: impl FnMut()) -> Vec<f64> {
    (0..2).for_each(|_| work());
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || start.elapsed().as_secs_f64() < seconds {
        let run = Instant::now();
        (0..repeat).for_each(|_| work());
        times.push(run.elapsed().as_secs_f64() / repeat as f64);
    }
    times
}

fn numbers(len: usize, stream: u64) -> Vec<f32> {
    (0..len as u64).map(|i| random::uniform(random::key(1, stream), i) as f32 - 0.5).collect()
}

fn tensors(
    device: &Device,
    dtype: DType,
    (kind, m, n, k): (&str, usize, usize, usize),
    seconds: f64,
) -> Vec<f64> {
    let (ta, tb) = (kind.starts_with('t'), kind.ends_with('t'));
    let tensor = |rows, cols, stream| {
        let data = numbers(rows * cols, stream);
        Tensor::from_f32(device, &[rows, cols], dtype, &data, Category::Workspace).expect("memory")
    };
    let a = if ta { tensor(k, m, 1) } else { tensor(m, k, 1) };
    let b = if tb { tensor(n, k, 2) } else { tensor(k, n, 2) };
    measure(seconds, 1, || {
        matmul(Operand::new(&a, ta), Operand::new(&b, tb), None, Category::Activations).expect("memory");
    })
}

fn slices<T: Float>((kind, m, n, k): (&str, usize, usize, usize), seconds: f64) -> Vec<f64> {
    let (ta, tb) = (kind.starts_with('t'), kind.ends_with('t'));
    let data = |len, stream| numbers(len, stream).into_iter().map(T::from_f32).collect::<Vec<T>>();
    let (a, b, mut c) = (data(m * k, 1), data(k * n, 2), vec![0.0f32; m * n]);
    let cpu = Cpu::new(1).expect("a thread");
    let packing = GemmWorkspace::new::<T>(&cpu, 1, &[(m, n, k)]);
    measure(seconds, 16, || {
        let (a, b) =
            (MatrixRef::of(&a, if ta { m } else { k }, ta), MatrixRef::of(&b, if tb { k } else { n }, tb));
        serial(&packing, [m, n, k], a, b, MatrixMut { data: &mut c, row_stride: n }, false);
    })
}

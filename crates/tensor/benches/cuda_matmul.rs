//! The CUDA device against plain loops on the host, and the speed of its matrix products.
//!
//! Checks copies, memory and every kind of product (all transpositions, both types, all epilogues) against sums
//! in f64, and that they repeat bit for bit; then prints TFLOP/s. Ends at once where there is no GPU, and
//! fails where a check does.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use espalier_tensor::cuda::{Args, Build, Cuda, KernelSource};
use espalier_tensor::ops::matmul::cuda::{GpuMatmul, MatmulEpilogue};
use espalier_tensor::{Category, DType, Device, Error, Operand, Tensor};

fn main() {
    let probe = Cuda::probe();
    print!("{probe}");
    if !probe.usable() {
        println!("SKIPPED: nothing was checked or measured");
        return;
    }
    let cuda = Cuda::open(0).unwrap();
    let device = Device::Cuda(cuda.clone());
    memory(&cuda, &device);
    kernels(&cuda, &device);
    let worst = products(&device);
    println!("products: the worst error is {worst:.2} of what is allowed");
    for product in cuda.unfused_products().unwrap() {
        println!("  finished by our kernels: {product}");
    }
    repeat(&device);
    speed(&cuda, &device);
    println!("held {} MiB, peak booked {} MiB", cuda.held() >> 20, cuda.ledger().total_peak() >> 20);
    let wrong = WRONG.load(Relaxed);
    if wrong > 0 {
        println!("{wrong} comparisons are WRONG");
        std::process::exit(1);
    }
    println!("all comparisons are right");
}

/// Numbers in (-1, 1), the same in every run.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn tensor(device: &Device, shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let data = numbers(shape.iter().product(), seed);
    Tensor::from_f32(device, shape, dtype, &data, Category::Activations).unwrap()
}

fn memory(cuda: &Cuda, device: &Device) {
    for len in [0, 1, 1000, 1 << 20, (4 << 20) + 3, (9 << 20) + 1] {
        let data: Vec<u32> = (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let t = Tensor::from_slice(device, &[len], &data, Category::Weights).unwrap();
        assert_eq!(t.host_bytes(), bytemuck::cast_slice::<u32, u8>(&data), "{len} numbers there and back");
        let copy = t.duplicate(Category::Weights).unwrap();
        assert_eq!(copy.host_bytes(), t.host_bytes());
        let zeros = Tensor::zeros(device, &[len], DType::U32, Category::Weights).unwrap();
        assert!(zeros.host_bytes().iter().all(|byte| *byte == 0));
    }
    assert_eq!(cuda.ledger().total(), 0, "every buffer is gone");
    let refused = cuda.allocate(1 << 45, Category::Weights);
    assert!(matches!(refused, Err(Error::OutOfMemory { asked, .. }) if asked == 1 << 45));
    // More than the GPU has, one after the other: the first block is given back to make room for the second.
    drop(cuda.allocate(cuda.gpu().memory / 10 * 6, Category::Weights).unwrap());
    drop(cuda.allocate(cuda.gpu().memory / 10 * 8, Category::Weights).unwrap());
    cuda.release_unused().unwrap();
    assert_eq!(cuda.held(), 0, "nothing is kept");
    println!("copies and memory: as they should be");
}

const TURNED: KernelSource = KernelSource {
    name: "turned.cu",
    includes: &[],
    text: r#"
        // y[i] = x[WIDTH - 1 - i] * scale + block sum of x, through dynamic shared memory.
        KERNEL(256) turned(const T* x, T* y, float scale, u32 width) {
            extern __shared__ float row[];
            float sum = 0.0f;
            for (u32 i = threadIdx.x; i < WIDTH; i += blockDim.x) sum += row[i] = to_f32(x[i]);
            sum = block_sum(sum);
            for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[i] = from_f32<T>(row[WIDTH - 1 - i] * scale + sum);
        }
    "#,
    exact: false,
    builds: &[],
};

fn kernels(cuda: &Cuda, device: &Device) {
    // 80 KB of shared memory, more than a kernel gets unasked.
    const WIDTH: usize = 20_000;
    for dtype in [DType::F32, DType::Bf16] {
        let build = Build { element: Some(dtype), defines: &[("WIDTH", WIDTH as i64)] };
        let start = Instant::now();
        let kernel = cuda.kernel(&TURNED, build, "turned").unwrap();
        let waited = start.elapsed();
        let x = Tensor::from_f32(device, &[WIDTH], dtype, &vec![0.5; WIDTH], Category::Activations).unwrap();
        let mut y = x.empty_like(Category::Activations).unwrap();
        let args = Args::new().input(&x).output(&mut y).f32(2.0).u32(WIDTH as u32);
        // SAFETY: `turned(x, y, scale, width)`, both of WIDTH elements, a float for each in shared memory.
        unsafe { kernel.launch(1, 256, 4 * WIDTH as u32, args) }.unwrap();
        let expected = 0.5 * 2.0 + 0.5 * WIDTH as f32;
        assert!(y.to_f32().iter().all(|y| (y - expected).abs() <= expected / 256.0), "{dtype:?}");
        println!("a kernel for {dtype:?} was ready after {waited:.1?}");
        // Older drivers do not know a kernel's parameters, and would read beyond those given.
        if Cuda::probe().driver >= Some((12, 4)) {
            let launch = std::panic::AssertUnwindSafe(|| {
                // SAFETY: never launched: the arguments are too few, and that is noticed.
                unsafe { kernel.launch(1, 256, 0, Args::new().input(&x)) }
            });
            let hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(|_| {}));
            let noticed = std::panic::catch_unwind(launch).is_err();
            std::panic::set_hook(hook);
            assert!(noticed, "wrong arguments went unnoticed");
        }
    }
}

/// What a product should give, in f64.
fn expected(a: &Tensor, ta: bool, b: &Tensor, tb: bool, m: usize, n: usize, k: usize) -> Vec<f64> {
    let (a, b) = (a.to_f32(), b.to_f32());
    let at = |i: usize, l: usize| f64::from(if ta { a[l * m + i] } else { a[i * k + l] });
    let bt = |l: usize, j: usize| f64::from(if tb { b[j * k + l] } else { b[l * n + j] });
    (0..m * n).map(|c| (0..k).map(|l| at(c / n, l) * bt(l, c % n)).sum()).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x * x * x)).tanh())
}

/// How many comparisons went wrong. The rest is still compared: a GPU may be far away.
static WRONG: AtomicUsize = AtomicUsize::new(0);

/// The largest error as a fraction of what is allowed; prints what is beyond it.
fn compare(what: &str, got: &Tensor, expected: &[f64], k: usize) -> f64 {
    // A bf16 keeps 8 bits; a sum of k products of numbers below 1 errs by a few units of f32 times its terms.
    let terms = (k as f64).sqrt().max(2.0);
    let (relative, absolute) = match got.dtype() {
        DType::Bf16 => (1.0 / 128.0, terms / 400.0),
        _ => (2e-6, terms * 1e-6),
    };
    let got = got.to_f32();
    let errors = got.iter().zip(expected).map(|(got, expected)| {
        let part = (f64::from(*got) - expected).abs() / (expected.abs() * relative + absolute);
        if part.is_nan() { f64::INFINITY } else { part }
    });
    let (i, worst) = errors.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    if worst > 1.0 {
        WRONG.fetch_add(1, Relaxed);
        println!("WRONG: {what}: element {i} is {}, should be {}", got[i], expected[i]);
    }
    worst
}

fn products(device: &Device) -> f64 {
    let mut worst = 0.0f64;
    let mut check = |what: &str, got: &Tensor, expected: &[f64], k| {
        worst = worst.max(compare(what, got, expected, k));
    };
    let types = [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::F32)];
    for (input, output) in types {
        for (m, n, k) in [(64, 48, 32), (33, 17, 29), (257, 136, 65), (8, 1000, 300), (1, 8, 1), (5, 3, 0)] {
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                let shape = |rows, cols, t| if t { [cols, rows] } else { [rows, cols] };
                let a = tensor(device, &shape(m, k, ta), input, 1);
                let b = tensor(device, &shape(k, n, tb), input, 2);
                let bias = tensor(device, &[n], output, 3);
                let plain = expected(&a, ta, &b, tb, m, n, k);
                let with_bias: Vec<f64> = {
                    let bias = bias.to_f32();
                    plain.iter().enumerate().map(|(i, x)| x + f64::from(bias[i % n])).collect()
                };
                let what = |kind: &str| format!("{kind} {input:?}->{output:?} {m}x{n}x{k} ta={ta} tb={tb}");
                let product = || GpuMatmul::new(Operand::new(&a, ta), Operand::new(&b, tb));
                let fresh = || tensor(device, &[m, n], output, 4);

                let mut c = fresh();
                product().into(&mut c).unwrap();
                check(&what("plain"), &c, &plain, k);

                let mut c = fresh();
                let before = c.to_f32();
                product().accumulate(true).into(&mut c).unwrap();
                let added: Vec<f64> = before.iter().zip(&plain).map(|(c, x)| f64::from(*c) + x).collect();
                check(&what("accumulate"), &c, &added, k);

                let mut c = fresh();
                product().then(MatmulEpilogue::Bias(&bias)).into(&mut c).unwrap();
                check(&what("bias"), &c, &with_bias, k);

                for bias in [None, Some(&bias)] {
                    let sums = if bias.is_some() { &with_bias } else { &plain };
                    let (mut c, mut pre) = (fresh(), fresh());
                    product().then(MatmulEpilogue::Gelu { bias, pre: &mut pre }).into(&mut c).unwrap();
                    check(&what("before gelu"), &pre, sums, k);
                    let after: Vec<f64> = sums.iter().map(|x| gelu(*x)).collect();
                    check(&what("gelu"), &c, &after, k);
                }
            }
        }
    }
    worst
}

/// Shapes whose sums an algorithm would like to split: the same bits, again and again.
fn repeat(device: &Device) {
    for dtype in [DType::F32, DType::Bf16] {
        for (m, n, k, ta, tb) in
            [(768, 768, 32768, true, false), (64, 64, 65536, true, false), (128, 3072, 768, false, true)]
        {
            let shape = |rows, cols, t| if t { [cols, rows] } else { [rows, cols] };
            let (a, b) =
                (tensor(device, &shape(m, k, ta), dtype, 1), tensor(device, &shape(k, n, tb), dtype, 2));
            let once = || {
                let mut c = Tensor::empty(device, &[m, n], dtype, Category::Gradients).unwrap();
                GpuMatmul::new(Operand::new(&a, ta), Operand::new(&b, tb)).into(&mut c).unwrap();
                c.host_bytes().into_owned()
            };
            let first = once();
            if (0..5).any(|_| once() != first) {
                WRONG.fetch_add(1, Relaxed);
                println!("WRONG: {dtype:?} {m}x{n}x{k} does not repeat");
            }
        }
    }
    println!("products were run again and compared bit for bit");
}

/// Seconds of one `work`, which queues on the GPU: the mean over about a fifth of a second.
fn seconds(cuda: &Cuda, mut work: impl FnMut()) -> f64 {
    let mut run = |times: u32| {
        cuda.synchronize().unwrap();
        let start = Instant::now();
        (0..times).for_each(|_| work());
        cuda.synchronize().unwrap();
        start.elapsed().as_secs_f64() / f64::from(times)
    };
    run(2);
    let one = run(2);
    run((0.2 / one).clamp(3.0, 2000.0) as u32)
}

fn speed(cuda: &Cuda, device: &Device) {
    let bytes = vec![1u8; 256 << 20];
    let mut buffer = cuda.allocate(bytes.len(), Category::Workspace).unwrap();
    let up = seconds(cuda, || buffer.upload(&bytes).unwrap());
    let mut back = bytes.clone();
    let down = seconds(cuda, || buffer.download(&mut back).unwrap());
    let gb = bytes.len() as f64 / 1e9;
    println!("256 MiB from host to card: {:.1} GB/s, back: {:.1} GB/s", gb / up, gb / down);
    drop(buffer);
    let mut tiny = Tensor::zeros(device, &[8, 8], DType::F32, Category::Workspace).unwrap();
    let x = tensor(device, &[8, 8], DType::F32, 1);
    let call = seconds(cuda, || GpuMatmul::new(&x, &x).into(&mut tiny).unwrap());
    println!("a product of 8 x 8 takes {:.1} us from end to end", call * 1e6);

    println!("\n{:<34}{:>12}", "", "TFLOP/s");
    let rows = 32768;
    type Case = (&'static str, DType, DType, usize, usize, usize, bool, bool, &'static str);
    let cases: &[Case] = &[
        ("bf16 8192^3", DType::Bf16, DType::Bf16, 8192, 8192, 8192, false, false, ""),
        ("bf16 8192^3, b transposed", DType::Bf16, DType::Bf16, 8192, 8192, 8192, false, true, ""),
        ("qkv            + bias", DType::Bf16, DType::Bf16, rows, 2304, 768, false, false, "bias"),
        ("attention out  + bias", DType::Bf16, DType::Bf16, rows, 768, 768, false, false, "bias"),
        ("up             + bias", DType::Bf16, DType::Bf16, rows, 3072, 768, false, false, "bias"),
        ("up             + bias, gelu", DType::Bf16, DType::Bf16, rows, 3072, 768, false, false, "gelu"),
        ("down           + bias", DType::Bf16, DType::Bf16, rows, 768, 3072, false, false, "bias"),
        ("up, dx", DType::Bf16, DType::Bf16, rows, 768, 3072, false, true, ""),
        ("up, dw in bf16", DType::Bf16, DType::Bf16, 768, 3072, rows, true, false, ""),
        ("up, dw in f32", DType::Bf16, DType::F32, 768, 3072, rows, true, false, ""),
        ("down, dw in f32", DType::Bf16, DType::F32, 3072, 768, rows, true, false, ""),
        ("logits of 8192 rows", DType::Bf16, DType::Bf16, 8192, 50304, 768, false, true, ""),
        ("f32 4096^3", DType::F32, DType::F32, 4096, 4096, 4096, false, false, ""),
        ("f32 as tf32 8192^3", DType::F32, DType::F32, 8192, 8192, 8192, false, false, "tf32"),
    ];
    for &(name, input, output, m, n, k, ta, tb, extra) in cases {
        let shape = |rows, cols, t| if t { [cols, rows] } else { [rows, cols] };
        let a = tensor(device, &shape(m, k, ta), input, 1);
        let b = tensor(device, &shape(k, n, tb), input, 2);
        let bias = tensor(device, &[n], output, 3);
        let mut c = Tensor::empty(device, &[m, n], output, Category::Activations).unwrap();
        let mut pre = Tensor::zeros(device, &[m, n], output, Category::Activations).unwrap();
        cuda.allow_tf32(extra == "tf32").unwrap();
        let time = seconds(cuda, || {
            let product = GpuMatmul::new(Operand::new(&a, ta), Operand::new(&b, tb));
            match extra {
                "bias" => product.then(MatmulEpilogue::Bias(&bias)),
                "gelu" => product.then(MatmulEpilogue::Gelu { bias: Some(&bias), pre: &mut pre }),
                _ => product,
            }
            .into(&mut c)
            .unwrap();
        });
        println!("{name:<34}{:>12.1}", 2e-12 * (m as f64) * (n as f64) * (k as f64) / time);
    }
    for product in cuda.unfused_products().unwrap() {
        println!("  finished by our kernels: {product}");
    }
    cuda.allow_tf32(false).unwrap();
}

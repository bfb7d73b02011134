//! What the tests of the operations share.
//!
//! A test computes on every instruction set, in both float types and on one, two and three threads, whose bits
//! must agree, and compares with a plain reference in f64. A GPU, where there is one, follows the instruction
//! sets and computes three times, to the same bits. Inputs are numbers that bf16 holds exactly, so that one
//! reference serves both types.

use std::sync::OnceLock;

use espalier_testing::{Need, skipped};

use crate::cpu::{Cpu, Isa};
use crate::cuda::Cuda;
use crate::{Category, DType, Device, Float, Tensor, bf16, random};

/// For every instruction set, the device with one, two and three threads; then, where a GPU is found, three
/// handles of it. The host comes first, for tests that only make sense there.
pub fn devices() -> &'static [[Device; 3]] {
    static DEVICES: OnceLock<Vec<[Device; 3]>> = OnceLock::new();
    if let Some(why) = no_gpu() {
        // Each test by itself: it is one more that nobody has seen on a GPU.
        skipped(Need::Cuda, why);
    }
    DEVICES.get_or_init(|| {
        let device = |isa, threads| Device::Cpu(Cpu::with_isa(threads, isa).unwrap());
        let hosts = Isa::available().map(|isa| [1, 2, 3].map(|threads| device(isa, threads)));
        let gpu = no_gpu().is_none().then(|| Cuda::open(0).unwrap());
        hosts.chain(gpu.map(|gpu| [1, 2, 3].map(|_| Device::Cuda(gpu.clone())))).collect()
    })
}

/// Why this machine cannot use a GPU, where it cannot.
fn no_gpu() -> Option<&'static str> {
    static WHY: OnceLock<Option<String>> = OnceLock::new();
    let why = || Some(Cuda::probe()).filter(|probe| !probe.usable()).map(|probe| probe.missing.join("; "));
    WHY.get_or_init(why).as_deref()
}

/// Where a tensor's elements begin, on whichever device: two tensors with one address share a buffer.
pub fn address(x: &Tensor) -> u64 {
    match x.device() {
        Device::Cpu(_) => x.bytes().as_ptr() as u64,
        Device::Cuda(_) => x.cuda_buffer().address(),
    }
}

/// Standard normal numbers, times `spread`, that bf16 holds exactly.
pub fn values(seed: u64, n: usize, spread: f64) -> Vec<f32> {
    let key = random::key(seed, n as u64);
    let round = |x: f64| <bf16 as Float>::from_f32(x as f32).to_f32();
    (0..n as u64).map(|i| round(random::normal(key, i) * spread)).collect()
}

/// Integers below `bound`.
pub fn integers(seed: u64, n: usize, bound: usize) -> Vec<u32> {
    let key = random::key(seed, n as u64);
    (0..n as u64).map(|i| (random::uniform(key, i) * bound as f64) as u32).collect()
}

pub fn tensor(device: &Device, dtype: DType, shape: &[usize], data: &[f32]) -> Tensor {
    assert_eq!(shape.iter().product::<usize>(), data.len());
    Tensor::from_f32(device, shape, dtype, data, Category::Activations).unwrap()
}

/// A tensor of indices.
pub fn indices(device: &Device, shape: &[usize], data: &[u32]) -> Tensor {
    Tensor::from_slice(device, shape, data, Category::Activations).unwrap()
}

/// Widens a slice.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Runs `compute` everywhere and compares each tensor it returns with the expected values: to within 5e-5 of
/// the tensor's largest element for f32, 2^-7 for bf16, which rounds to 2^-9 and is then added up.
pub fn check(expected: &[Vec<f64>], compute: impl Fn(&Device, DType) -> Vec<Tensor>) {
    check_on(devices(), &[(DType::F32, 5e-5), (DType::Bf16, 1.0 / 128.0)], expected, &compute);
}

/// As [`check`], on these devices and in these types, each with its tolerance; compiled once for all closures.
pub(crate) fn check_on(
    devices: &[[Device; 3]],
    tolerances: &[(DType, f64)],
    expected: &[Vec<f64>],
    compute: &dyn Fn(&Device, DType) -> Vec<Tensor>,
) {
    for &(dtype, _) in tolerances {
        for threads in devices {
            let [one, two, three] = threads.each_ref().map(|device| compute(device, dtype));
            assert_eq!(one.len(), expected.len());
            for (i, x) in one.iter().enumerate() {
                assert_eq!(x.host_bytes(), two[i].host_bytes(), "two threads, output {i}");
                assert_eq!(x.host_bytes(), three[i].host_bytes(), "three threads, output {i}");
                let tolerance = tolerances.iter().find(|(dtype, _)| *dtype == x.dtype());
                let (_, tolerance) = tolerance.expect("a tolerance for the type of the output");
                if let Some(far) = far(&x.to_f32(), &expected[i], *tolerance) {
                    panic!("output {i} in {dtype:?} on {:?}: {far}", threads[0].name());
                }
            }
        }
    }
}

/// As [`check`], against what the first host device makes of f32: for sizes at which a plain reference is slow.
pub(crate) fn check_like_host(compute: impl Fn(&Device, DType) -> Vec<Tensor>) {
    let host = compute(&devices()[0][0], DType::F32);
    let expected: Vec<Vec<f64>> = host.iter().map(|x| wide(&x.to_f32())).collect();
    check(&expected, compute);
}

/// Asserts that values agree to within `tolerance`, relative to the largest expected one.
#[track_caller]
pub fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    if let Some(far) = far(got, expected, tolerance) {
        panic!("{far}");
    }
}

/// The value that is furthest from what was expected, where it is too far.
fn far(got: &[f32], expected: &[f64], tolerance: f64) -> Option<String> {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
    // A NaN is further than anything.
    let error = |i: usize| match (f64::from(got[i]) - expected[i]).abs() {
        error if error.is_nan() => f64::INFINITY,
        error => error,
    };
    let worst = (0..got.len()).max_by(|&a, &b| error(a).total_cmp(&error(b)))?;
    (error(worst) > tolerance * largest).then(|| {
        let (got, expected) = (got[worst], expected[worst]);
        format!("element {worst}: {got}, expected {expected}; allowed are {tolerance} of {largest}")
    })
}

/// The gradient of `f` at `x` by central differences.
pub fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    let h = 1e-5;
    (0..x.len())
        .map(|i| {
            let middle = x[i];
            x[i] = middle + h;
            let above = f(&x);
            x[i] = middle - h;
            let below = f(&x);
            x[i] = middle;
            (above - below) / (2.0 * h)
        })
        .collect()
}

/// The dot product of two slices, for losses.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The bits of a mask that keeps about this fraction of `len` weights.
pub(crate) fn mask_words(seed: u64, len: usize, fraction: f64) -> Vec<u32> {
    let key = random::key(seed, len as u64);
    let mut words = vec![0u32; len.div_ceil(32)];
    for i in (0..len).filter(|&i| random::uniform(key, i as u64) < fraction) {
        words[i / 32] |= 1 << (i % 32);
    }
    words
}

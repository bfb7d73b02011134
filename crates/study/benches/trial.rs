//! How fast trials of a study run: steps a second of so many at once, and what a validation takes.
//! `cargo bench -p espalier-study --bench trial -- [--network resnet8] [--device cuda] [--trials 8] [--batch 64] [--steps 64] [--sparsity 0.9] [--goal 0.12] [--eval-batch 500] [--field train.micro_batches=4]`
//!
//! The study's simple-cnn with momentum on made-up images of 28 x 28, of which 6000 are held out, or its resnet8 on
//! images of 32 x 32 x 3, of which 5000 are. Each trial has a thread and a device of its own: one thread of the processor, or a stream of the GPU. All begin
//! together; the first steps are not timed. Prints one line of JSON; `benches/trial.py` puts it beside
//! PyTorch.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;
use std::{env, fs, thread};

use espalier_plan::RunFile;
use espalier_plan::config::Override;
use espalier_study::{RunningTrial, TrialSettings, Workload};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;

const WARM_UP: u64 = 8;
const CHECKS: usize = 3;

/// Seconds that a trial took for its steps, and for a validation.
struct TrialSeconds {
    steps: f64,
    check_seconds: f64,
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).cloned()
    };
    let number = |name: &str, default: f64| value(name).map_or(default, |n| n.parse().expect("a number"));
    let (trials, batch) = (number("--trials", 1.0) as usize, number("--batch", 64.0) as usize);
    let (steps, sparsity) = (number("--steps", 32.0) as u64, number("--sparsity", 0.0));
    let kind = value("--device").unwrap_or_else(|| "cpu".into());
    let device = match kind.as_str() {
        "cuda" => {
            let cuda = Cuda::open(0).expect("a GPU");
            // As PyTorch's convolutions do by themselves, and `device.tf32` in a run file.
            cuda.allow_tf32_in_convolutions(true);
            Device::Cuda(cuda)
        }
        _ => Device::cpu(1).expect("a processor"),
    };
    let folder = env::temp_dir().join(format!("espalier-trial-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for images");
    let network = value("--network").unwrap_or_else(|| "simple-cnn".into());
    let (format, path) = match network.as_str() {
        "resnet8" => ("cifar10", write_cifar(&folder)),
        _ => ("idx", write_idx(&folder)),
    };
    let eval_batch = number("--eval-batch", 0.0) as usize;
    let run = RunFile::parse(
        RUN,
        &[
            format!("model.name={network}").into(),
            format!("data.kind={format}").into(),
            Override::data_path(&path),
            format!("train.steps={}", WARM_UP + steps).into(),
            format!("train.eval_batch={eval_batch}").into(),
        ],
    );
    let mut workload = Workload::open(&run.expect("a run file"), &device).expect("made-up images");
    fs::remove_dir_all(&folder).expect("the folder was just made");
    if let Some(goal) = value("--goal") {
        workload = workload.with_goal(goal.parse().expect("a number"));
    }
    let field = |text: String| {
        let (name, value) = text.split_once('=').expect("a field and its value");
        (name.to_owned(), value.parse().expect("a number"))
    };
    let fields: Vec<(String, f64)> = value("--field").map(field).into_iter().collect();
    let start = Barrier::new(trials);
    let begin = |seed: usize| {
        let device = if seed == 0 { device.clone() } else { device.another().expect("another handle") };
        let settings = TrialSettings { batch, sparsity, seed: seed as u64, fields: fields.clone() };
        let mut trial = RunningTrial::begin(&workload.on_device(&device), &settings).expect("a trial");
        trial.advance(WARM_UP).expect("steps");
        start.wait();
        let begin = Instant::now();
        for _ in 0..CHECKS {
            trial.advance(WARM_UP).expect("a look");
        }
        let check_seconds = begin.elapsed().as_secs_f64() / CHECKS as f64;
        start.wait();
        let begin = Instant::now();
        let check = trial.advance(WARM_UP + steps).expect("steps");
        assert!(!check.diverged, "a trial that diverges has no speed");
        TrialSeconds { steps: begin.elapsed().as_secs_f64() - check_seconds, check_seconds }
    };
    let all: Vec<TrialSeconds> = thread::scope(|scope| {
        let threads: Vec<_> = (0..trials)
            .map(|seed| {
                let begin = &begin;
                scope.spawn(move || begin(seed))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a trial that ends well")).collect()
    });
    let longest = |of: fn(&TrialSeconds) -> f64| all.iter().map(of).fold(0.0, f64::max);
    let (seconds, check_seconds) = (longest(|trial| trial.steps), longest(|trial| trial.check_seconds));
    println!(
        "{{\"network\": \"{network}\", \"device\": \"{kind}\", \"trials\": {trials}, \"batch\": {batch}, \"sparsity\": {sparsity}, \"step_ms\": {:.4}, \
         \"steps_per_s\": {:.1}, \"look_ms\": {:.3}, \"looks_per_s\": {:.2}}}",
        seconds * 1e3 / steps as f64,
        (trials as u64 * steps) as f64 / seconds,
        check_seconds * 1e3,
        trials as f64 / check_seconds,
    );
}

const RUN: &str = r#"
    [model]
    name = "simple-cnn"
    init = "fan-in"
    [data]
    kind = "idx"
    [optimizer]
    name = "momentum"
    [learning_rate]
    peak = 0.01
    schedule = "constant"
    [prune]
    method = "snip"
    samples = 1000
    biases = true
"#;

/// Bytes that say nothing of each other, below some number.
struct Noise(u64);

impl Noise {
    fn bytes(&mut self, count: usize, most: u64) -> Vec<u8> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) % most) as u8
        };
        (0..count).map(|_| next()).collect()
    }
}

/// 60,000 images in MNIST's format.
fn write_idx(folder: &Path) -> PathBuf {
    const IMAGES: usize = 60_000;
    let mut noise = Noise(1);
    let head = |magic: u32, sizes: &[usize]| {
        let header = std::iter::once(magic).chain(sizes.iter().map(|size| *size as u32));
        header.flat_map(u32::to_be_bytes).collect::<Vec<u8>>()
    };
    let images = [head(0x803, &[IMAGES, 28, 28]), noise.bytes(IMAGES * 784, 256)].concat();
    fs::write(folder.join("train-images-idx3-ubyte"), images).expect("room for images");
    let labels = [head(0x801, &[IMAGES]), noise.bytes(IMAGES, 10)].concat();
    fs::write(folder.join("train-labels-idx1-ubyte"), labels).expect("room for labels");
    folder.into()
}

/// 50,000 images in CIFAR-10's format, in one file.
fn write_cifar(folder: &Path) -> PathBuf {
    let mut noise = Noise(1);
    let image = |_| [noise.bytes(1, 10), noise.bytes(3072, 256)].concat();
    let path = folder.join("data_batch_1.bin");
    fs::write(&path, (0..50_000).flat_map(image).collect::<Vec<u8>>()).expect("room for images");
    path
}

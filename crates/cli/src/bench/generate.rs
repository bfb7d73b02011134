//! `espalier bench generate`: how fast a model generates, and what fraction of the memory's bandwidth that is.
//!
//! A token reads every weight of every product once, and the keys and values of all positions before it: so
//! tokens for each second are at most the bandwidth over those bytes. The bandwidth is measured in the same
//! run, by reading a block of memory that no cache holds, before and after. Weights are random: nothing here
//! depends on their values.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use espalier_nn::weights::Weights;
use espalier_plan::cluster::measured::median;
use espalier_plan::config::ModelConfig;
use espalier_plan::device::DeviceKind;
use espalier_plan::spec::presets::Gpt;
use espalier_plan::spec::{LayerKernel, Precision};
use espalier_plan::{DataFacts, Plan, RunFile};
use espalier_tensor::ops::reduce;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Error;
use espalier_train::infer::{Generator, Sampler, Sampling};
use espalier_train::parallel::Ranks;
use espalier_train::stage::Stage;
use serde::Serialize;

use crate::device;
use crate::output::{self, print_out};

/// Bytes of the block that a processor reads to measure the bandwidth: more than any of its caches holds.
const READ: usize = 1 << 29;
/// How often it is read, before the text and after it.
const READS: usize = 5;
/// The most tokens of a prompt, and behind one: both together are a context as long as a run file can ask for.
const MOST: u64 = 1 << 23;

#[derive(Args)]
#[command(after_help = "Examples:
  espalier bench generate
  espalier bench generate --precision f32 --layers 12 --width 768 --heads 12 --vocab 50257
  espalier bench generate --device cuda --layers 32 --width 4096 --heads 32 --json")]
pub struct BenchGenerateArguments {
    /// Device; auto takes a GPU if there is one.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device::kind())]
    device: DeviceKind,
    /// Data type of the weights.
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = device::precision())]
    precision: Precision,
    /// Layers of the GPT.
    #[arg(long, value_name = "N", default_value_t = 18)]
    layers: usize,
    /// Hidden size.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    width: usize,
    /// Attention heads.
    #[arg(long, value_name = "N", default_value_t = 16)]
    heads: usize,
    /// Vocabulary size.
    #[arg(long, value_name = "N", default_value_t = 50_257)]
    vocab: usize,
    /// Prompt length in tokens.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=MOST))]
    prompt: u64,
    /// Number of new tokens.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(2..=MOST))]
    tokens: u64,
    /// Print the measurements as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct GenerateBenchReport {
    device: &'static str,
    format: String,
    parameters: u64,
    prompt_tokens: usize,
    prompt_tokens_per_s: f64,
    new_tokens: usize,
    tokens_per_s: f64,
    /// Weights, and keys and values at half of the way.
    bytes_per_token: f64,
    cache_bytes: u64,
    bytes_per_s: f64,
    bandwidth: f64,
    share_of_bandwidth: f64,
}

pub fn generate(arguments: &BenchGenerateArguments) -> Result<ExitCode> {
    let (prompt, tokens) = (arguments.prompt as usize, arguments.tokens as usize);
    let plan = plan(arguments, prompt + tokens)?;
    let device = device::choose(arguments.device, std::thread::available_parallelism()?.get())?;
    let (reads, generation, times) = device.enter(|| -> espalier_train::Result<_> {
        let mut reads = time_reads(&device)?;
        let dtype = espalier_nn::dtype(plan.storage.precision);
        let weights = Weights::initialise(&plan.model, &device, dtype, 0)?;
        let (ranks, stage) = (Ranks::single(), Stage::new(&plan, &Ranks::single())?);
        let mut generator = Generator::new(&plan, &stage, &weights, &ranks, &device)?;
        let ids: Vec<u32> = (0..prompt).map(|i| (i * 7919 % arguments.vocab) as u32).collect();
        let mut sampler = Sampler::new(Sampling::GREEDY);
        // Once before it counts: memory is taken, and a GPU's kernels are compiled.
        generator.generate(&ids, 2, &mut sampler, &mut |_| true)?;
        generator.reset_cache();
        let (mut times, mut last) = (Vec::new(), None);
        let mut tick = |_| {
            times.extend(last.replace(Instant::now()).map(|last: Instant| last.elapsed().as_secs_f64()));
            true
        };
        let generation = generator.generate(&ids, tokens, &mut sampler, &mut tick)?;
        reads.extend(time_reads(&device)?);
        Ok((reads, generation, times))
    })?;
    // Medians: a machine that others share takes much longer now and then.
    let (bandwidth, tokens_per_s) = (1.0 / median(reads), 1.0 / median(times));
    let size = plan.storage.precision.size();
    let cache_bytes = plan.cache_bytes(0).map_err(Error::Plan)?;
    let read = (prompt + tokens / 2) as f64 / (prompt + tokens) as f64 * cache_bytes as f64;
    let bytes_per_token = (read_weights(&plan) * size) as f64 + read;
    let report = GenerateBenchReport {
        device: device.name(),
        format: format!("dense-{}", plan.storage.precision.name()),
        parameters: plan.parameters,
        prompt_tokens: prompt,
        prompt_tokens_per_s: prompt as f64 / generation.prompt_time.as_secs_f64(),
        new_tokens: tokens,
        tokens_per_s,
        bytes_per_token,
        cache_bytes,
        bytes_per_s: bytes_per_token * tokens_per_s,
        bandwidth,
        share_of_bandwidth: bytes_per_token * tokens_per_s / bandwidth,
    };
    report.print(&device::describe(&device));
    output::answer(arguments.json, || &report)
}

/// The model, with a context that is just long enough.
fn plan(arguments: &BenchGenerateArguments, context: usize) -> Result<Plan> {
    let BenchGenerateArguments { precision, layers, width, heads, vocab, .. } = *arguments;
    let shape = Gpt { layers, width, heads, context, vocab, ..Gpt::default() };
    let run = RunFile::of_model(ModelConfig::of_gpt(&shape)).map_err(Error::Plan)?;
    let run = run.with(|run| run.train.precision = precision).map_err(Error::Plan)?;
    let facts = DataFacts { vocab: Some(vocab), image: None, classes: None };
    Ok(Plan::new(run, facts).map_err(Error::Plan)?)
}

/// Weights that a token reads: those of all products. Of tables it reads one row.
fn read_weights(plan: &Plan) -> u64 {
    let mut weights = 0;
    plan.model.for_each(&mut |layer| {
        if let LayerKernel::Product(size) = layer.properties().kernel {
            weights += size.input * size.output;
        }
    });
    weights as u64
}

/// Seconds of some readings of a block that no cache holds, for each byte of it.
fn time_reads(device: &Device) -> espalier_train::Result<Vec<f64>> {
    let bytes = match device {
        Device::Cpu(_) => READ,
        // A GPU reads so much faster that less would be over before it has begun.
        Device::Cuda(_) => 16 * READ,
    };
    let block = Tensor::zeros(device, &[bytes / 4], DType::F32, Category::Workspace)?;
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        let begin = Instant::now();
        let sum = match device {
            Device::Cpu(cpu) => f64::from(cpu.read(block.slice::<f32>())),
            Device::Cuda(_) => reduce::squared_norm(&block)?,
        };
        std::hint::black_box(sum);
        times.push(begin.elapsed().as_secs_f64() / bytes as f64);
    }
    Ok(times)
}

impl GenerateBenchReport {
    fn print(&self, device: &str) {
        print_out!(
            "{} ({device}), {}, {:.2} billion parameters",
            self.device,
            self.format,
            self.parameters as f64 / 1e9
        );
        print_out!("prefill  {:>6} tokens {:>10.1} tokens/s", self.prompt_tokens, self.prompt_tokens_per_s);
        print_out!("decode   {:>6} tokens {:>10.1} tokens/s", self.new_tokens, self.tokens_per_s);
        print_out!(
            "decode reads {:.3} GB per token: {:.1} of {:.1} GB/s memory bandwidth, a fraction of {:.2}",
            self.bytes_per_token / 1e9,
            self.bytes_per_s / 1e9,
            self.bandwidth / 1e9,
            self.share_of_bandwidth
        );
    }
}

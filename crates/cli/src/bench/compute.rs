//! `espalier bench compute`: how fast a device is, as the `[device]` of a cluster file says it.
//!
//! On a processor a device is one core, and all cores work at once: that is what a rank has when all ranks
//! are busy. A core alone is timed too, which gives the peak that fractions are of, and shows what company
//! costs.

mod layers;
mod op;
mod sizes;
mod sparse;
mod sparse_work;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_plan::cluster::datasheet::{self, Datasheet};
use espalier_plan::cluster::measured::{self, OpTiming, best_rate, rounded};
use espalier_plan::cluster::merge::{self, ClusterSection};
use espalier_plan::cluster::{self, ByPass, Convolution, ConvolutionPass, Copy, MatmulRates, Node};
use espalier_plan::device::DeviceKind;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::machine::memory_left;
use espalier_tensor::{DType, Device, Error};
use serde_json::{Value, json};

use super::cluster_file::ClusterFile;
use super::timing::{Launches, at_once};
use crate::device;
use crate::local_cluster::core_name;
use crate::output::{self, print_err, print_out};
use op::BenchOp;
use sizes::{BenchSizes, ConvolutionSizes};

/// About how long things that take turns are timed together.
const BUDGET: Duration = Duration::from_millis(600);

const PRECISIONS: [(&str, DType); 2] = [("f32", DType::F32), ("bf16", DType::Bf16)];

#[derive(Args)]
#[command(after_help = "docs/plan.md explains every field of a cluster file.

Examples:
  espalier bench compute
  espalier bench compute --device cuda --out h200.toml --json")]
pub struct ComputeArguments {
    /// Device; auto takes a GPU if there is one; cpu measures one core while the others are loaded too.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device::kind())]
    device: DeviceKind,
    /// Cluster file to create; in an existing one [device] is replaced.
    #[arg(short, long, value_name = "FILE", default_value = "cluster.toml")]
    out: PathBuf,
    /// Print the measurements as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    /// Sizes that say nothing of the machine, for tests.
    #[arg(long, hide = true)]
    quick: bool,
}

pub fn compute(arguments: &ComputeArguments) -> Result<ExitCode> {
    let file = ClusterFile::open(&arguments.out)?;
    let devices = BenchDevices::open(arguments.device, arguments.quick)?;
    print_err!("measuring {}", devices.in_words());
    let mut rows = Vec::new();
    let device = devices.measure(&mut rows)?;
    print_out!("{}", summary(&device));
    let comment = format!("Measured by `espalier bench compute`: {}.", devices.in_words());
    let note = "measured by `espalier bench`";
    let section = ClusterSection::device(device.clone());
    file.finish(&section, &comment, |name| {
        merge::begin(name, note, device.clone(), &devices.node(), &comment)
    })?;
    output::answer(arguments.json, || {
        let rows: Vec<_> = rows.iter().map(ComputeRow::json).collect();
        json!({ "file": arguments.out, "devices": devices.count(), "device": device, "rows": rows })
    })
}

/// The devices that this machine has, all alike.
struct BenchDevices {
    /// Those that work at once: a GPU, or all cores.
    devices: Vec<Device>,
    sizes: &'static BenchSizes,
    budget: Duration,
}

/// What was measured of one thing.
struct ComputeRow {
    op: BenchOp,
    precision: &'static str,
    /// Of a pass, when all devices are busy,
    busy: OpTiming,
    /// and when no other is; none where there is no other.
    single: Option<OpTiming>,
}

impl BenchDevices {
    fn open(kind: DeviceKind, quick: bool) -> Result<BenchDevices> {
        let first = device::choose(kind, 1)?;
        let (devices, sizes) = match &first {
            Device::Cuda(gpu) => {
                // As a run does unless it says otherwise.
                gpu.allow_tf32_in_convolutions(true);
                (vec![first], &sizes::GPU)
            }
            Device::Cpu(_) => {
                let cores = std::thread::available_parallelism()?.get();
                let others = (1..cores).map(|_| Device::cpu(1));
                let devices: Result<Vec<Device>, Error> = [Ok(first)].into_iter().chain(others).collect();
                (devices?, &sizes::CORE)
            }
        };
        let (sizes, budget) = if quick { (&sizes::QUICK, Duration::ZERO) } else { (sizes, BUDGET) };
        Ok(BenchDevices { devices, sizes, budget })
    }

    /// A node of these.
    fn node(&self) -> Node {
        Node { devices: self.count(), cores: matches!(self.devices[0], Device::Cpu(_)), link: None }
    }

    /// How many devices a node of these has.
    fn count(&self) -> usize {
        match &self.devices[0] {
            Device::Cpu(_) => self.devices.len(),
            Device::Cuda(_) => Cuda::probe().gpus.len(),
        }
    }

    fn in_words(&self) -> String {
        match (&self.devices[0], self.devices.len()) {
            (Device::Cpu(_), 1) => "one core".into(),
            (Device::Cpu(_), cores) => format!("one core of {cores} while all are busy"),
            (Device::Cuda(gpu), _) => format!("one {}", gpu.name()),
        }
    }

    /// What a person calls one of the devices.
    fn device_name(&self) -> String {
        match &self.devices[0] {
            Device::Cpu(_) => core_name(),
            Device::Cuda(gpu) => gpu.name().into(),
        }
    }

    /// A device as a cluster file has it. What was seen goes to `rows`, and line by line to standard error.
    fn measure(&self, rows: &mut Vec<ComputeRow>) -> Result<cluster::DeviceSpec> {
        let sheet = match &self.devices[0] {
            Device::Cpu(_) => None,
            Device::Cuda(gpu) => datasheet::of(gpu.name()),
        };
        let start = self.time(&[BenchOp::Launch], "f32", DType::F32)?;
        let launch_us = rounded(start[0].busy.seconds * 1e6);
        rows.extend(start);
        let [f32, bf16] = PRECISIONS.map(|(name, dtype)| self.matrix(name, dtype, sheet, rows));
        let memory = self.memory_rates(sheet, rows)?;
        let [memory_gb, reserved_gb] = self.memory()?;
        let name = self.device_name();
        let (bf16, fp16) = (Some(bf16?), None);
        Ok(cluster::DeviceSpec { name, memory_gb, reserved_gb, launch_us, bf16, fp16, f32: f32?, memory })
    }

    /// Products, and convolutions and attention held against them.
    fn matrix(
        &self,
        precision: &'static str,
        dtype: DType,
        sheet: Option<Datasheet>,
        rows: &mut Vec<ComputeRow>,
    ) -> Result<MatmulRates> {
        let mut products = Vec::new();
        for decade in (self.sizes.products)(dtype) {
            products.extend(self.time(&self.sizes.layers(decade), precision, dtype)?);
        }
        let peak = match (sheet, dtype) {
            (Some(sheet), DType::F32) => sheet.f32_tflops,
            (Some(sheet), _) => sheet.bf16_tflops,
            (None, _) => rounded_up(best(&products) * 1e-12),
        };
        let efficiency = measured::efficiency(&busy(&products), 1e9, peak * 1e12);
        let mut matrix = MatmulRates {
            peak_tflops: peak,
            efficiency,
            attention: None,
            zeros: 1.0,
            convolution: Convolution::Efficiency(1.0),
            sparse: None,
        };
        matrix.convolution = match self.sizes.convolutions {
            ConvolutionSizes::Together(of) => {
                let ops: Vec<BenchOp> = of.iter().copied().map(BenchOp::Convolution).collect();
                let timed = self.time(&ops, precision, dtype)?;
                let mut points: Vec<[f64; 2]> = Vec::new();
                for (size, row) in of.iter().zip(&timed) {
                    let (narrowest, rate) = (size.input.min(size.output) as f64, row.busy.rate());
                    let reached = rounded(rate / matrix.peak());
                    match points.iter_mut().find(|[channels, _]| *channels == narrowest) {
                        // One of two may be bound by memory.
                        Some([_, fraction]) => *fraction = fraction.max(reached),
                        None => points.push([narrowest, reached]),
                    }
                }
                rows.extend(timed);
                Convolution::Channels(points)
            }
            ConvolutionSizes::EachPass(of) => {
                let mut took: Vec<(ConvolutionPass, f64)> = Vec::new();
                for size in of {
                    let passes = size.passes();
                    let timed = self.time(&passes.map(|(op, _)| op), precision, dtype)?;
                    took.extend(passes.iter().zip(&timed).map(|((_, pass), row)| (*pass, row.busy.seconds)));
                    rows.extend(timed);
                }
                Convolution::Passes(ByPass::fit(&took, matrix.peak()))
            }
        };
        matrix.attention =
            Some(self.fraction_of_product(self.sizes.attention, precision, dtype, &matrix, rows)?);
        rows.extend(products);
        if let (Some(of), DType::F32) = (&self.sizes.sparse, dtype) {
            matrix.sparse = Some(self.skipped_zeros(of, rows)?);
        }
        Ok(matrix)
    }

    /// What some work reaches of a product of as many flops.
    fn fraction_of_product(
        &self,
        ops: &[BenchOp],
        precision: &'static str,
        dtype: DType,
        products: &MatmulRates,
        rows: &mut Vec<ComputeRow>,
    ) -> Result<f64> {
        let timed = self.time(ops, precision, dtype)?;
        let fraction = measured::share_of(|flops| products.seconds(flops), &busy(&timed));
        rows.extend(timed);
        Ok(fraction)
    }

    /// What passes through memory: of 32-bit numbers, and what 16-bit numbers reach of that.
    fn memory_rates(&self, sheet: Option<Datasheet>, rows: &mut Vec<ComputeRow>) -> Result<Copy> {
        let [mut wide, mut narrow] = [Vec::new(), Vec::new()];
        for decade in self.sizes.elementwise.clone() {
            for ((precision, dtype), timed) in PRECISIONS.into_iter().zip([&mut wide, &mut narrow]) {
                timed.extend(self.time(&[self.sizes.elementwise_of(decade, dtype)], precision, dtype)?);
            }
        }
        let gb_per_s = sheet.map_or_else(|| rounded_up(best(&wide) * 1e-9), |sheet| sheet.gb_per_s);
        let efficiency = measured::efficiency(&busy(&wide), 1e6, gb_per_s * 1e9);
        let light = self.time(&self.sizes.light(), "f32", DType::F32)?;
        let batch_norm = if matches!(self.devices[0], Device::Cuda(_)) { GPU_BATCH_NORM } else { 1.0 };
        let mut memory = Copy { gb_per_s, efficiency, bf16: 1.0, light: 1.0, batch_norm };
        memory.bf16 = measured::share_of(|bytes| memory.seconds(bytes), &busy(&narrow));
        memory.light = measured::share_of(|bytes| memory.seconds(bytes), &busy(&light)).max(1.0);
        rows.extend(wide.into_iter().chain(narrow).chain(light));
        Ok(memory)
    }

    /// Times some work in turns: on all devices at once, then on one alone where there are others.
    fn time(&self, ops: &[BenchOp], precision: &'static str, dtype: DType) -> Result<Vec<ComputeRow>> {
        let prepare =
            |device: &Device| ops.iter().map(|op| op.prepare(device, dtype)).collect::<Result<_, _>>();
        // What it takes to launch is the host's, all else the GPU's.
        let launches = if ops == [BenchOp::Launch] { Launches::Eager } else { Launches::Captured };
        let samples = |devices: &[Device]| -> Result<Vec<OpTiming>> {
            let times = at_once(devices, self.budget, launches, prepare)?;
            let sample = |(op, ms): (&BenchOp, f64)| OpTiming {
                size: op.size(dtype),
                seconds: ms * 1e-3 / op.pass_count(),
            };
            Ok(ops.iter().zip(times).map(sample).collect())
        };
        let busy = samples(&self.devices)?;
        let single: Vec<Option<OpTiming>> = match self.devices.len() {
            1 => vec![None; ops.len()],
            _ => samples(&self.devices[..1])?.into_iter().map(Some).collect(),
        };
        let timed = ops.iter().zip(busy).zip(single);
        let rows: Vec<ComputeRow> =
            timed.map(|((op, busy), single)| ComputeRow { op: *op, precision, busy, single }).collect();
        rows.iter().for_each(|row| print_out!("{}", row.line()));
        Ok(rows)
    }

    /// GB that a device has, and what of it is taken before a run begins: by the driver and by what was loaded.
    fn memory(&self) -> Result<[f64; 2]> {
        let tenths = |bytes: usize| (bytes as f64 * 1e-8).floor() / 10.0;
        match &self.devices[0] {
            Device::Cuda(gpu) => {
                gpu.release_unused()?;
                let for_runs = gpu.memory_left()? + gpu.ledger().total();
                Ok([tenths(gpu.gpu().memory), rounded(tenths(gpu.gpu().memory) - tenths(for_runs))])
            }
            Device::Cpu(_) => {
                let unknown =
                    || Error::Unsupported { what: "the system does not say what memory is left".into() };
                let left = memory_left().ok_or_else(unknown)? as usize;
                Ok([tenths(left / self.devices.len()), 0.0])
            }
        }
    }
}

/// What a batch norm reaches of a GPU's rate: by steps of networks on one H200, not measured by itself.
const GPU_BATCH_NORM: f64 = 0.8;

/// What rows reach when all devices are busy.
fn busy(rows: &[ComputeRow]) -> Vec<OpTiming> {
    rows.iter().map(|row| row.busy).collect()
}

/// The best rate of any row, alone or not.
fn best(rows: &[ComputeRow]) -> f64 {
    let all: Vec<OpTiming> = rows.iter().flat_map(|row| [Some(row.busy), row.single]).flatten().collect();
    best_rate(&all)
}

/// Two digits: a best rate that was measured is a peak, which nothing exceeds.
fn rounded_up(rate: f64) -> f64 {
    let unit = 10f64.powf(rate.log10().floor() - 1.0);
    rounded((rate / unit).ceil() * unit)
}

impl ComputeRow {
    fn line(&self) -> String {
        let (kind, op) = (self.op.kind(), self.op.to_string());
        let rate = |sample: OpTiming| match self.op {
            BenchOp::Launch => format!("{:.2} us", sample.seconds * 1e6),
            BenchOp::Elementwise { .. } | BenchOp::LightElementwise { .. } => {
                format!("{:.1} GB/s", sample.rate() * 1e-9)
            }
            _ => format!("{:.3} TFLOP/s", sample.rate() * 1e-12),
        };
        let size = match self.op {
            BenchOp::Launch => String::new(),
            BenchOp::Elementwise { .. } | BenchOp::LightElementwise { .. } => {
                format!("{} MB", rounded(self.busy.size * 1e-6))
            }
            _ => format!("{} Gflop", rounded(self.busy.size * 1e-9)),
        };
        let single = self.single.map_or(String::new(), |single| format!("   alone {}", rate(single)));
        format!("  {kind:<11} {:<4} {op:<36} {size:>16} {:>15}{single}", self.precision, rate(self.busy))
    }

    fn json(&self) -> Value {
        json!({
            "work": self.op.kind(),
            "precision": self.precision,
            "sizes": self.op.to_string(),
            "size": self.busy.size,
            "seconds": self.busy.seconds,
            "seconds_alone": self.single.map(|single| single.seconds),
        })
    }
}

/// What convolutions reach, in words.
fn convolutions(convolution: &Convolution) -> String {
    match convolution {
        Convolution::Efficiency(fraction) => format!("{fraction:.2} of matmul"),
        Convolution::Channels(points) => format!("{} channels", by_channels(points)),
        Convolution::Passes(ByPass { channels, start_us, weight_ns, pixel_ns, window_ns }) => {
            format!(
                "{} channels, plus {start_us} us overhead, {weight_ns} ns per weight, {pixel_ns} ns per pixel and {window_ns} ns per im2col element",
                by_channels(channels)
            )
        }
    }
}

fn by_channels(points: &[[f64; 2]]) -> String {
    let each = points.iter().map(|[channels, fraction]| format!("{:.0} % with {channels}", 100.0 * fraction));
    each.collect::<Vec<_>>().join(", ")
}

/// What was found, in a few lines.
fn summary(device: &cluster::DeviceSpec) -> String {
    let points = |points: &[[f64; 2]], unit: &str| {
        let each =
            points.iter().map(|[size, fraction]| format!("{:.0} % at {size} {unit}", 100.0 * fraction));
        each.collect::<Vec<_>>().join(", ")
    };
    let matrix = |name: &str, matrix: &MatmulRates| {
        format!(
            "{name}: peak {} TFLOP/s; matmul reaches {}; convolution {}; attention {:.2} of matmul\n{}",
            matrix.peak_tflops,
            points(&matrix.efficiency, "Gflop"),
            convolutions(&matrix.convolution),
            matrix.attention.unwrap_or(1.0),
            matrix.sparse.as_ref().map_or(String::new(), sparse::in_words),
        )
    };
    let memory = &device.memory;
    format!(
        "{}: {} GB, {} GB of it reserved; launch overhead {} us\n{}{}memory: peak {} GB/s; elementwise kernels reach {}; bf16 {:.2} of that; light ones {:.2}x",
        device.name,
        device.memory_gb,
        device.reserved_gb,
        device.launch_us,
        matrix("f32", &device.f32),
        device.bf16.as_ref().map_or(String::new(), |rates| matrix("bf16", rates)),
        memory.gb_per_s,
        points(&memory.efficiency, "MB"),
        memory.bf16,
        memory.light,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of it in a moment: what is written is read, and its sizes grow.
    #[test]
    fn what_is_measured_is_a_cluster() {
        let devices = BenchDevices::open(DeviceKind::Cpu, true).unwrap();
        let mut rows = Vec::new();
        let device = devices.measure(&mut rows).unwrap();
        let text = merge::begin(
            "here",
            "",
            device.clone(),
            &Node { devices: 1, cores: true, link: None },
            "measured",
        );
        let read = cluster::Cluster::parse(&text).unwrap();
        assert_eq!(read.device, device);
        for matrix in [Some(&device.f32), device.bf16.as_ref()].into_iter().flatten() {
            assert_eq!(matrix.efficiency.len(), 2);
            assert!(
                matrix.efficiency.iter().all(|[_, fraction]| *fraction > 0.0 && *fraction <= 1.0),
                "{matrix:?}"
            );
            assert!(matrix.seconds(1e5) <= matrix.seconds(1e6), "{matrix:?}");
        }
        let skipped = device.f32.sparse.as_ref().expect("a core skips zeros in f32");
        assert_eq!([skipped.linear.len(), skipped.convolution.len()], [1, 1], "{skipped:?}");
        assert_eq!(device.bf16.as_ref().unwrap().sparse, None);
        assert_eq!(rows.iter().filter(|row| row.op.kind() == "product").count(), 2 * 2 * 3);
        assert!(rows.iter().all(|row| row.busy.seconds > 0.0));
    }

    #[test]
    fn a_peak_is_not_exceeded() {
        assert_eq!([rounded_up(0.1234), rounded_up(18.01), rounded_up(2.0)], [0.13, 19.0, 2.0]);
    }
}

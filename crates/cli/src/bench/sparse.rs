//! `espalier bench sparse`: the figure behind the decision to keep pruned weights dense.
//!
//! SAMO (Singh and Bhatele, 2023) multiplies with dense weights although nine in ten are zero, because the
//! dense product of a fully connected layer was 6 to 22 times faster than the sparse one. This measures the
//! same layer here: batch 576, weights from 128^2 to 4096^2, dense against our own CSR kernel on the
//! processor or cuSPARSE on a GPU; then, for the largest sizes, from how many zeros on the sparse product
//! would win.

mod measure;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use espalier_plan::device::DeviceKind;
use espalier_report::Figure;
use espalier_tensor::DType;

use crate::device;
use crate::output::{self, print_err, print_out};
use crate::output_file::{OutputFile, may_replace};
use measure::SparseBench;
use report::{SparseReport, SparsitySweep};

/// Sides of the weights that are measured unless others are asked for.
const SIZES: &str = "128,256,512,1024,2048,4096";
/// The largest side: its weights in f32 take a gigabyte.
const MOST_SIDE: u64 = 16_384;
/// Shares of zeros between which the sparse product is expected to overtake the dense one.
const SWEEP: [f64; 10] = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];
/// How many of the largest sizes are swept.
const SWEPT: usize = 2;
/// About how long a row of the table takes, and a point of a sweep.
const ROW: Duration = Duration::from_millis(1200);
const POINT: Duration = Duration::from_millis(700);

#[derive(Args)]
#[command(after_help = "Examples:
  espalier bench sparse
  espalier bench sparse --device cpu --precision f32 --svg dense-or-sparse.svg
  espalier bench sparse --sizes 1024,8192 --sparsity 0.95 --json")]
pub struct SparseArguments {
    /// Device; auto takes a GPU if there is one.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device::kind())]
    device: DeviceKind,
    /// Fraction of zero weights, in [0, 1).
    #[arg(long, value_name = "FRACTION", default_value = "0.9", value_parser = fraction)]
    sparsity: f64,
    /// Batch size: rows of the layer's input.
    #[arg(long, value_name = "N", default_value_t = 576, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    batch: u64,
    /// Data type of weights and activations; accumulation is in f32.
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = precision())]
    precision: DType,
    /// Layer widths: weights are N x N.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = SIZES,
          value_parser = clap::value_parser!(u64).range(1..=MOST_SIDE))]
    sizes: Vec<u64>,
    /// Output figure.
    #[arg(
        short = 'o',
        long,
        visible_alias = "out",
        value_name = "FILE.svg",
        default_value = "out/bench-sparse.svg"
    )]
    svg: PathBuf,
    /// Overwrite the file even if this program did not write it.
    #[arg(long)]
    force: bool,
    /// Print the measurements as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

fn precision() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["f32", "bf16"])
        .map(|name| if name == "f32" { DType::F32 } else { DType::Bf16 })
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(fraction) if (0.0..1.0).contains(&fraction) => Ok(fraction),
        _ => Err("expected a fraction in [0, 1), such as 0.9".into()),
    }
}

pub fn sparse(arguments: &SparseArguments) -> Result<ExitCode> {
    let mut sizes: Vec<usize> = arguments.sizes.iter().map(|&size| size as usize).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if !arguments.force {
        may_replace(&arguments.svg, "figure of this program", Figure::is_figure, "add --force")?;
    }
    let output = OutputFile::open(&arguments.svg, "--svg")?;
    let device = device::choose(arguments.device, std::thread::available_parallelism()?.get())?;
    let bench = SparseBench { device, dtype: arguments.precision, batch: arguments.batch as usize };
    let mut report = SparseReport::new(&bench, arguments.sparsity);

    output::on_standard_output(format_args!("{}", report.heading()));
    for &size in &sizes {
        report.rows.push(bench.measure(size, arguments.sparsity, true, ROW)?);
        print_out!("{}", report.line(report.rows.last().expect("just measured")));
    }
    // Where nothing multiplies sparsely, there is nothing to look for.
    if report.rows.iter().any(|row| row.sparse.is_ok()) {
        for &size in sizes.iter().rev().take(SWEPT) {
            let mut points = Vec::new();
            for sparsity in SWEEP {
                if let Some(ratio) = bench.measure(size, sparsity, false, POINT)?.ratio() {
                    points.push((sparsity, ratio));
                }
            }
            report.sweeps.push(SparsitySweep { size, points });
        }
    }
    for sentence in report.sentences() {
        print_out!("{sentence}");
    }
    output.finish(&report.figure().svg())?;
    print_err!("figure: {}", arguments.svg.display());
    output::answer(arguments.json, || report.json(&arguments.svg))
}

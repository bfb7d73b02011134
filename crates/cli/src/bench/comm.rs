//! `espalier bench comm`: how fast messages between the devices of this machine are, as the `[node.link]` of
//! a cluster file says it.
//!
//! Ranks are threads of this process on a processor, and GPUs joined by NCCL where there are several. All
//! send at once, so what they share is shared.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_plan::cluster::Fabric;
use espalier_plan::cluster::measured::{median, rounded};
use espalier_plan::cluster::merge::ClusterSection;
use espalier_plan::cost::AllReduce;
use espalier_plan::device::DeviceKind;
use espalier_plan::spec::Precision;
use espalier_tensor::cuda::Cuda;
use espalier_train::Error;
use serde_json::json;

use super::cluster_file::ClusterFile;
use crate::comm_timing::{self, BenchRanks, LinkSamples, OversubscriptionCost, POINT_TO_POINT};
use crate::device;
use crate::output::{self, print_err, print_out};

/// Elements of messages: those that only have to start, and those that fill a link.
const SIZES: [f64; 5] = [256.0, 4096.0, 65_536.0, 1_048_576.0, 4_194_304.0];
/// All of it is measured so often, and medians count: others may use the machine for a moment.
const ROUNDS: usize = 7;
/// Of the all-reduce beside which a rank computes: a bucket of gradients.
const OVERLAPPED: f64 = 1_048_576.0;

#[derive(Args)]
#[command(after_help = "docs/plan.md explains every field of a cluster file.

Examples:
  espalier bench compute && espalier bench comm
  espalier bench comm --device cuda --out h200.toml --json")]
pub struct CommArguments {
    /// Device; auto takes GPUs if there are any; cpu is one thread per core.
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device::kind())]
    device: DeviceKind,
    /// Cluster file of `espalier bench compute`; its [node.link] is replaced.
    #[arg(short, long, value_name = "FILE", default_value = "cluster.toml")]
    out: PathBuf,
    /// Print the measurements as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    /// Sizes that say nothing of the machine, for tests.
    #[arg(long, hide = true)]
    quick: bool,
}

pub fn comm(arguments: &CommArguments) -> Result<ExitCode> {
    let file = ClusterFile::open(&arguments.out)?;
    if !file.exists() {
        let why = format!(
            "there is no such file; `espalier bench compute --out {}` creates it",
            arguments.out.display()
        );
        return Err(Error::File { path: arguments.out.clone(), why }.into());
    }
    let ranks = ranks(arguments.device)?;
    let (carrier, precision) = match ranks {
        BenchRanks::Threads(_) => ("threads", Precision::F32),
        BenchRanks::Gpus(_) => ("NCCL", Precision::Bf16),
    };
    print_err!("measuring communication among {} ranks ({carrier}, {})", ranks.count(), precision.name());
    let (sizes, overlapped, count) = match arguments.quick {
        true => (&SIZES[..2], SIZES[0], 1),
        false => (&SIZES[..], OVERLAPPED, ROUNDS),
    };
    let links = rounds(count, || comm_timing::links(ranks, AllReduce::Ring, precision, sizes))?;
    let links = LinkSamples::medians(&links);
    let bytes = precision.size() as f64;
    output::on_standard_output(table(&links, bytes));
    let two = links.costs(|pattern| pattern == POINT_TO_POINT);
    let rings = links.costs(|pattern| pattern != POINT_TO_POINT);
    let occupies = rounded(median(rounds(count, || comm_timing::occupies(ranks, precision, overlapped))?));
    let costs = rounds(count, || comm_timing::oversubscription(ranks))?
        .into_iter()
        .collect::<Option<Vec<OversubscriptionCost>>>();
    let middle = |of: fn(&OversubscriptionCost) -> f64| {
        costs.as_ref().map_or(0.0, |costs| rounded(median(costs.iter().map(of)) * 1e6))
    };
    let (meet_us, turn_us) = (middle(|costs| costs.sync_seconds), middle(|costs| costs.idle_seconds));
    let link = Fabric { occupies, meet_us, turn_us, ..Fabric::fit(&two, &rings, bytes) };
    print_out!(
        "link: latency {} us, {} GB/s, of which ring collectives reach {:.0} %; an all-reduce takes {:.0} % of the compute it \
         overlaps with",
        link.alpha_us,
        link.gb_per_s,
        100.0 * link.efficiency,
        100.0 * link.occupies
    );
    if costs.is_some() {
        print_out!(
            "with two ranks per core, a synchronization costs each rank {meet_us} us, and one of all ranks leaves cores idle for {turn_us} us"
        );
    }
    let comment = format!("Measured by `espalier bench comm`: {} ranks, {carrier}.", ranks.count());
    file.finish(&ClusterSection::link(link), &comment, |_| unreachable!("there is a file"))?;
    output::answer(arguments.json, || {
        let rows = links.0.iter().map(
            |sample| json!({ "pattern": sample.pattern, "bytes": sample.elements * bytes, "seconds": sample.seconds }),
        );
        json!({
            "file": arguments.out,
            "ranks": ranks.count(),
            "carrier": carrier,
            "link": link,
            "rows": rows.collect::<Vec<_>>(),
        })
    })
}

fn rounds<R>(count: usize, measure: impl Fn() -> Result<R, Error>) -> Result<Vec<R>, Error> {
    (0..count).map(|_| measure()).collect()
}

/// Those that there are: GPUs where two are found, or a thread for each core.
fn ranks(kind: DeviceKind) -> Result<BenchRanks> {
    let gpus = if kind == DeviceKind::Cpu { 0 } else { Cuda::probe().gpus.len() };
    match (kind, gpus) {
        (DeviceKind::Cuda, 0) => Cuda::probe().require()?,
        (_, 2..) => return Ok(BenchRanks::Gpus(gpus)),
        (DeviceKind::Cuda, _) => {
            let what =
                "this machine has one GPU, and communication needs two: --device cpu measures threads".into();
            return Err(espalier_tensor::Error::Unsupported { what }.into());
        }
        _ => {}
    }
    Ok(BenchRanks::Threads(std::thread::available_parallelism()?.get().max(2)))
}

/// A line for each pattern and size.
fn table(links: &LinkSamples, element_bytes: f64) -> String {
    let lines = links.0.iter().map(|sample| {
        let sent = sample.cost.words * element_bytes;
        let (kb, us, rate) =
            (sample.elements * element_bytes * 1e-3, sample.seconds * 1e6, sent / sample.seconds * 1e-9);
        let pattern = sample.pattern.replace('_', "-");
        format!("  {pattern:<15} {kb:>10.1} kB {us:>11.1} us {rate:>8.2} GB/s sent by each rank\n")
    });
    lines.collect()
}

//! `espalier bench`: measures this machine, one subcommand for each kind of measurement.

pub mod busy;
pub mod cluster_file;
mod comm;
mod compute;
mod generate;
mod timing;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args)]
#[command(arg_required_else_help = true)]
pub struct BenchArguments {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Benchmark a device (matmul, convolution, attention, memory bandwidth); write a cluster file.
    Compute(compute::ComputeArguments),
    /// Benchmark communication between devices; add it to the cluster file of `bench compute`.
    Comm(comm::CommArguments),
    /// Benchmark text generation (decoding): tokens/s, and the fraction of memory bandwidth used.
    Generate(generate::BenchGenerateArguments),
}

pub fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    busy::warn_if_busy();
    match &arguments.command {
        BenchCommand::Compute(arguments) => compute::compute(arguments),
        BenchCommand::Comm(arguments) => comm::comm(arguments),
        BenchCommand::Generate(arguments) => generate::generate(arguments),
    }
}

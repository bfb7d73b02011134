//! `espalier bench`: measures this machine, one subcommand a question.

mod busy;
pub mod cluster_file;
mod comm;
mod compute;
mod generate;
mod sparse;
mod timing;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args)]
#[command(arg_required_else_help = true)]
pub struct BenchArguments {
    #[command(subcommand)]
    question: Question,
}

#[derive(Subcommand)]
enum Question {
    /// How fast a device is: products, convolutions, attention, passes over memory; into a cluster file.
    Compute(compute::ComputeArguments),
    /// How fast messages between devices are; into the cluster file that `bench compute` wrote.
    Comm(comm::CommArguments),
    /// How fast a model writes, and what share of the memory's bandwidth that is.
    Generate(generate::GenerateArguments),
    /// Why dense kernels: a linear layer whose weights are mostly zero, multiplied densely and sparsely.
    Sparse(sparse::SparseArguments),
}

/// Runs the command.
pub fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    busy::warn_if_busy();
    match &arguments.question {
        Question::Compute(arguments) => compute::compute(arguments),
        Question::Comm(arguments) => comm::comm(arguments),
        Question::Generate(arguments) => generate::generate(arguments),
        Question::Sparse(arguments) => sparse::sparse(arguments),
    }
}

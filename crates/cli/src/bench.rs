//! `espalier bench`: measures this machine, one subcommand a question.

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
    /// Why dense kernels: a linear layer whose weights are mostly zero, multiplied densely and sparsely.
    Sparse(sparse::SparseArguments),
}

/// Runs the command.
pub fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    match &arguments.question {
        Question::Sparse(arguments) => sparse::sparse(arguments),
    }
}

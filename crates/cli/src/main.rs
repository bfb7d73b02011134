//! `espalier`: the one binary. It reads arguments, talks to a person or a program, and calls the libraries.

mod device;
mod progress;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use espalier_train::Error;

/// Prunes neural networks and trains them in parallel.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train the model that a run file describes.
    Train(train::TrainArguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.command {
        Command::Train(arguments) => train::train(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}{}", advice(&error));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// What to do about it, where a setting of the run file helps.
fn advice(error: &anyhow::Error) -> &'static str {
    match error.downcast_ref::<Error>() {
        Some(Error::Tensor(espalier_tensor::Error::OutOfMemory { .. })) => {
            "; a smaller train.batch, more train.micro_batches, train.recompute = \"block\" or \
             train.precision = \"bf16\" need less"
        }
        _ => "",
    }
}

/// 2: the user's input; 3: a device; 4: diverged; 1: our fault. (Interrupted and saved, 130, is no error.)
fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<Error>() {
        Some(Error::Plan(_) | Error::Data(_) | Error::Checkpoint { .. } | Error::File { .. }) => 2,
        Some(Error::Tensor(_)) => 3,
        Some(Error::Diverged { .. }) => 4,
        None => 1,
    }
}

//! `espalier`: the one binary. It reads arguments, talks to a person or a program, and calls the libraries.

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
            eprintln!("error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
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

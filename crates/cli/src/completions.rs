//! `espalier completions`: what a shell needs to complete this program's commands, options and their values.
//!
//! The script is made of the very declarations that arguments are read by, so it cannot know less than they do.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};

#[derive(Args)]
#[command(after_help = "Examples:
  espalier completions bash > ~/.local/share/bash-completion/completions/espalier
  espalier completions zsh > ~/.zfunc/_espalier
  espalier completions fish > ~/.config/fish/completions/espalier.fish

zsh: add `fpath+=~/.zfunc` before `compinit` in ~/.zshrc.")]
pub struct CompletionsArguments {
    /// Shell.
    shell: Shell,
}

pub fn completions(arguments: &CompletionsArguments) -> Result<ExitCode> {
    let mut script = Vec::new();
    generate(arguments.shell, &mut crate::Cli::command(), "espalier", &mut script);
    let mut stdout = io::stdout().lock();
    match stdout.write_all(&script).and_then(|()| stdout.flush()) {
        // Whoever closed the pipe has read enough.
        Err(why) if why.kind() != io::ErrorKind::BrokenPipe => Err(why.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

//! `espalier chat`: a conversation with a trained model, line by line.
//!
//! What was said stays in the model's cache: a line and its answer are read once. A model knows no roles unless it was trained
//! with them, so the conversation is a plain text, a line of the person and then what the model writes behind it.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_train::infer::{Generator, Sampler};

use crate::log::LogArguments;
use crate::say::{self, say};
use crate::signals::{INTERRUPTED, Stop};
use crate::writing::{Writer, WritingArguments};

/// How long other ranks wait for a person.
const PATIENCE: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Args)]
#[command(after_help = "Examples:
  espalier chat out/hello
  espalier chat out/hello --max-new-tokens 200 --temperature 0.6 --stop \"\\n\"
Each line is one message; /quit or end of input ends the chat.")]
pub struct ChatArguments {
    /// A checkpoint folder, or a run folder (its newest checkpoint).
    checkpoint: PathBuf,
    #[command(flatten)]
    writing: WritingArguments,
    #[command(flatten)]
    log: LogArguments,
}

/// Runs the command.
pub fn chat(arguments: &ChatArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let stop = Stop::listen_saying("interrupted")?;
    let writer = Writer::open(&arguments.checkpoint, &arguments.writing)?;
    let interrupted = writer.on_ranks(PATIENCE, |generator| {
        let leads = generator.ranks().leads();
        let mut chat =
            Conversation { writer: &writer, writing: &arguments.writing, stop: &stop, said: Vec::new() };
        let mut sampler = Sampler::new(arguments.writing.sampling());
        loop {
            stop.begun.store(false, Ordering::SeqCst);
            let line = if leads { chat.listen() } else { None };
            // The end of the conversation is a word of no tokens.
            let line = generator.from_first(&line.unwrap_or_default())?;
            if line.is_empty() {
                return Ok(false);
            }
            stop.begun.store(true, Ordering::SeqCst);
            chat.answer(generator, line, &mut sampler)?;
            if generator.ranks().any(stop.asked.load(Ordering::SeqCst))? {
                return Ok(true);
            }
        }
    })?;
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// What was said, on one rank.
struct Conversation<'a> {
    writer: &'a Writer,
    writing: &'a WritingArguments,
    stop: &'a Stop,
    /// All tokens, of which the generator has read as many as it says.
    said: Vec<u32>,
}

impl Conversation<'_> {
    /// The tokens of the next line that can be answered; none where there is none.
    fn listen(&self) -> Option<Vec<u32>> {
        let asks = io::stdin().is_terminal();
        loop {
            if asks {
                say::on_standard_error(format_args!("> "));
            }
            let mut line = String::new();
            let read = io::stdin().lock().read_line(&mut line);
            if !read.is_ok_and(|bytes| bytes > 0) || line.trim() == "/quit" {
                return None;
            }
            if !line.ends_with('\n') {
                line.push('\n');
            }
            match self.writer.prompt(&line) {
                Ok(ids) => return Some(ids),
                Err(why) => say!("{why}"),
            }
        }
    }

    /// Reads a line and writes what follows.
    fn answer(
        &mut self,
        generator: &mut Generator<'_>,
        line: Vec<u32>,
        sampler: &mut Sampler,
    ) -> espalier_train::Result<()> {
        let (shows, context) = (generator.ranks().leads(), generator.context());
        self.said.extend(line);
        // An answer should have some room.
        if self.said.len() + (self.writing.max_new_tokens as usize).min(context / 4) > context {
            if shows {
                say!(
                    "note: the conversation is longer than the context length of {context} tokens: its beginning is dropped"
                );
            }
            self.said.drain(..self.said.len().saturating_sub(context / 2));
            generator.forget();
        }
        let unread = &self.said[generator.length()..];
        let (written, _) = self.writer.write(self.writing, generator, unread, sampler, self.stop, shows)?;
        self.said.extend(written.tokens);
        Ok(())
    }
}

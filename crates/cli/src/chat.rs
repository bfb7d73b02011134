//! `espalier chat`: a conversation with a trained model, line by line.
//!
//! What was said stays in the model's cache: a line and its answer are read once. A model knows no roles
//! unless it was trained with them, so the conversation is a plain text, a line of the person and then what
//! the model writes behind it.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_train::infer::{Generator, Sampler};

use crate::generation::{GenerationArguments, GenerationSession};
use crate::log::LogArguments;
use crate::output::{self, print_err};
use crate::signals::{INTERRUPTED, StopSignal};

/// How long other ranks wait for a person.
const TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Args)]
#[command(after_help = "Examples:
  espalier chat out/hello
  espalier chat out/hello --max-new-tokens 200 --temperature 0.6 --stop \"\\n\"
Each line is one message; /quit or end of input ends the chat.")]
pub struct ChatArguments {
    /// A checkpoint folder, or a run folder (its newest checkpoint).
    checkpoint: PathBuf,
    #[command(flatten)]
    generation: GenerationArguments,
    #[command(flatten)]
    log: LogArguments,
}

pub fn chat(arguments: &ChatArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let stop = StopSignal::listen_with_message("interrupted")?;
    let session = GenerationSession::open(&arguments.checkpoint, &arguments.generation)?;
    let interrupted = session.on_ranks(TIMEOUT, |generator| {
        let is_rank0 = generator.ranks().is_rank0();
        let mut chat = Conversation {
            session: &session,
            generation: &arguments.generation,
            stop: &stop,
            history: Vec::new(),
        };
        let mut sampler = Sampler::new(arguments.generation.sampling());
        loop {
            stop.begun.store(false, Ordering::SeqCst);
            let line = if is_rank0 { chat.listen() } else { None };
            // The end of the conversation is a line of no tokens.
            let line = generator.broadcast_from_rank0(&line.unwrap_or_default())?;
            if line.is_empty() {
                return Ok(false);
            }
            stop.begun.store(true, Ordering::SeqCst);
            chat.answer(generator, line, &mut sampler)?;
            if generator.ranks().any_rank(stop.requested.load(Ordering::SeqCst))? {
                return Ok(true);
            }
        }
    })?;
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The conversation so far, on one rank.
struct Conversation<'a> {
    session: &'a GenerationSession,
    generation: &'a GenerationArguments,
    stop: &'a StopSignal,
    /// All tokens, of which the generator has read as many as it says.
    history: Vec<u32>,
}

impl Conversation<'_> {
    /// The tokens of the next line that can be answered; none where there is none.
    fn listen(&self) -> Option<Vec<u32>> {
        let asks = io::stdin().is_terminal();
        loop {
            if asks {
                output::on_standard_error(format_args!("> "));
            }
            let mut line = String::new();
            let read = io::stdin().lock().read_line(&mut line);
            if !read.is_ok_and(|bytes| bytes > 0) || line.trim() == "/quit" {
                return None;
            }
            if !line.ends_with('\n') {
                line.push('\n');
            }
            match self.session.prompt(&line) {
                Ok(ids) => return Some(ids),
                Err(why) => print_err!("{why}"),
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
        let (prints, context) = (generator.ranks().is_rank0(), generator.context());
        self.history.extend(line);
        // An answer should have some room.
        if self.history.len() + (self.generation.max_new_tokens as usize).min(context / 4) > context {
            if prints {
                print_err!(
                    "note: the conversation is longer than the context length of {context} tokens: its beginning is dropped"
                );
            }
            self.history.drain(..self.history.len().saturating_sub(context / 2));
            generator.reset_cache();
        }
        let unread = &self.history[generator.length()..];
        let (generation, _) =
            self.session.generate(self.generation, generator, unread, sampler, self.stop, prints)?;
        self.history.extend(generation.tokens);
        Ok(())
    }
}

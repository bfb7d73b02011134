//! `espalier chat`: a conversation with a trained model, line by line.
//!
//! What was said stays in the model's cache: a line and its answer are read once. Where the tokenizer has a chat
//! template, lines are messages of a conversation that the template renders, with roles and the tokens that end
//! them. A model without one knows no roles, so the conversation is a plain text, a line of the person and then
//! what the model writes behind it.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_data::{ChatTemplate, Conversation};
use espalier_train::Error;
use espalier_train::infer::{Generator, Sampler};

use crate::generation::{GenerationArguments, GenerationSession};
use crate::log::LogArguments;
use crate::output::{self, print_err};
use crate::signals::{INTERRUPTED, StopSignal};

/// How long other ranks wait for a person.
const TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Says that the beginning of a conversation has to go.
fn report_dropped(context: usize) {
    print_err!(
        "note: the conversation is longer than the context length of {context} tokens: its beginning is dropped"
    );
}

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
        let mut chat = ChatSession {
            session: &session,
            generation: &arguments.generation,
            stop: &stop,
            history: Vec::new(),
            messages: Vec::new(),
        };
        let mut sampler = Sampler::new(arguments.generation.sampling());
        loop {
            stop.begun.store(false, Ordering::SeqCst);
            let read = if is_rank0 { chat.listen() } else { None };
            // The end of the conversation is one of no tokens.
            let read = generator.broadcast_from_rank0(&read.unwrap_or_default())?;
            if read.is_empty() {
                return Ok(false);
            }
            stop.begun.store(true, Ordering::SeqCst);
            chat.answer(generator, read, &mut sampler)?;
            if generator.ranks().any_rank(stop.requested.load(Ordering::SeqCst))? {
                return Ok(true);
            }
        }
    })?;
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The conversation so far, on one rank.
struct ChatSession<'a> {
    session: &'a GenerationSession,
    generation: &'a GenerationArguments,
    stop: &'a StopSignal,
    /// All tokens, of which the generator has read as many as it says.
    history: Vec<u32>,
    /// Who has said what, on rank 0, where a template renders it.
    messages: Vec<(&'static str, String)>,
}

impl ChatSession<'_> {
    /// All tokens up to the next answer, with a line that can be answered; none where there is none.
    fn listen(&mut self) -> Option<Vec<u32>> {
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
            let tokens = match self.session.template() {
                Some(template) => self.rendered(template, line.trim_end_matches(['\r', '\n'])),
                None => self.with_line(line),
            };
            match tokens {
                Ok(ids) => return Some(ids),
                Err(why) => print_err!("{why}"),
            }
        }
    }

    /// The conversation with one more message, as the template has it.
    fn rendered(&mut self, template: &ChatTemplate, line: &str) -> Result<Vec<u32>> {
        self.messages.push(("user", line.to_owned()));
        let room = (self.generation.max_new_tokens as usize).min(self.session.context() / 4);
        loop {
            let texts = self.messages.iter().map(|(role, text)| (*role, text.as_str()));
            let rendered = template.render(&Conversation::of_texts(texts), true).map_err(Error::Data);
            let ids = rendered.map_err(Into::into).and_then(|chat| self.session.tokens_of(&chat.text));
            match ids {
                Ok(ids) if ids.len() + room > self.session.context() && self.messages.len() > 1 => {
                    report_dropped(self.session.context());
                    // A question goes with its answer.
                    self.messages.drain(..2.min(self.messages.len() - 1));
                }
                Ok(ids) => return self.session.check_prompt(ids),
                Err(why) => {
                    self.messages.pop();
                    return Err(why);
                }
            }
        }
    }

    /// A plain text with one more line.
    fn with_line(&self, mut line: String) -> Result<Vec<u32>> {
        if !line.ends_with('\n') {
            line.push('\n');
        }
        let more = match self.history.is_empty() {
            true => self.session.prompt(&line)?,
            false => self.session.continuation(&line)?,
        };
        let mut all = self.history.clone();
        all.extend(more);
        // An answer should have some room.
        let context = self.session.context();
        if all.len() + (self.generation.max_new_tokens as usize).min(context / 4) > context {
            report_dropped(context);
            all.drain(..all.len().saturating_sub(context / 2));
        }
        Ok(all)
    }

    /// Reads what is new of the conversation and writes what follows.
    fn answer(
        &mut self,
        generator: &mut Generator<'_>,
        read: Vec<u32>,
        sampler: &mut Sampler,
    ) -> espalier_train::Result<()> {
        let prints = generator.ranks().is_rank0();
        // A template may render what was said otherwise than it was generated.
        if !read.starts_with(&self.history[..generator.length()]) {
            generator.reset_cache();
        }
        self.history = read;
        let unread = &self.history[generator.length()..];
        let (generation, text) =
            self.session.generate(self.generation, generator, unread, sampler, self.stop, prints)?;
        self.history.extend(generation.tokens);
        if prints && self.session.template().is_some() {
            self.messages.push(("assistant", text));
        }
        Ok(())
    }
}

//! `espalier generate`: a trained model goes on from a text.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::Args;
use espalier_train::infer::{End, Sampler, TextStream, Written};
use serde::Serialize;

use crate::log::LogArguments;
use crate::say::{self, say};
use crate::signals::{INTERRUPTED, Stop};
use crate::writing::{Writer, WritingArguments, show};

#[derive(Args)]
#[command(after_help = "Examples:
  espalier generate out/hello \"//! \"
  espalier generate out/hello/checkpoints/step-000500 \"fn main\" --temperature 0 --tokens 40
  espalier generate out/hello \"The \" --top-k 40 --top-p 0.9 --seed 7 --stop . --json
  espalier generate out/hello \"use \" --set parallel.pipeline=2 --set train.precision=bf16")]
pub struct GenerateArguments {
    /// A checkpoint's folder, or a run folder, whose newest one is meant.
    checkpoint: PathBuf,
    /// The text to go on from.
    prompt: String,
    #[command(flatten)]
    writing: WritingArguments,
    #[command(flatten)]
    log: LogArguments,
    /// Print the text with its tokens and rates as one line of JSON, and nothing while it is written.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    /// What was written, without the prompt.
    text: String,
    /// Its tokens, those of a word that ended it included.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    new_tokens: usize,
    /// From the first new token on.
    tokens_per_s: Option<f64>,
    prompt_tokens_per_s: f64,
    format: String,
    /// `length`, `context`, `stop` or `interrupted`.
    end: &'static str,
}

/// Runs the command.
pub fn generate(arguments: &GenerateArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let stop = Stop::listen_saying("interrupted")?;
    let GenerateArguments { checkpoint, prompt, writing, json, .. } = arguments;
    let writer = Writer::open(checkpoint, writing)?;
    let ids = writer.prompt(prompt)?;
    let tokenizer = writer.tokenizer();
    let is_asked = || stop.asked.load(Ordering::Relaxed);
    let (written, text) = writer.on_ranks(writer.limit(), |generator| {
        stop.begun.store(true, Ordering::SeqCst);
        let shows = generator.ranks().leads() && !json;
        let mut stream = TextStream::new(tokenizer, &writing.stop);
        let mut go_on = |token: u32| {
            if tokenizer.end() == Some(token) {
                return false;
            }
            let piece = stream.push(token);
            let is_heard = !shows || show(piece);
            is_heard && !stream.is_ended() && !is_asked()
        };
        let mut sampler = Sampler::new(writing.sampling());
        let written = generator.write(&ids, writing.tokens as usize, &mut sampler, &mut go_on)?;
        let rest = stream.finish();
        if shows {
            show(rest);
        }
        Ok((written, stream.text().to_owned()))
    })?;
    if !json && !text.ends_with('\n') {
        show("\n");
    }
    let interrupted = written.end == End::Stopped && is_asked();
    let report = Report::new(&writer, ids.len(), written, text, interrupted);
    report.say(writer.context());
    if *json {
        say::json(&serde_json::to_string(&report)?);
    }
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

impl Report {
    fn new(
        writer: &Writer,
        prompt_tokens: usize,
        written: Written,
        text: String,
        interrupted: bool,
    ) -> Report {
        Report {
            text,
            prompt_tokens,
            new_tokens: written.tokens.len(),
            tokens_per_s: written.rate(),
            prompt_tokens_per_s: prompt_tokens as f64 / written.prompt_time.as_secs_f64(),
            format: writer.format(),
            end: match written.end {
                End::Long => "length",
                End::Context => "context",
                End::Stopped if interrupted => "interrupted",
                End::Stopped => "stop",
            },
            tokens: written.tokens,
        }
    }

    /// What a person should know beside the text.
    fn say(&self, context: usize) {
        if self.end == "context" {
            say!("note: the text ends where the model's context of {context} tokens does");
        }
        let rate = self.tokens_per_s.map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
        say!(
            "{} tokens{rate}; prompt: {} tokens, {:.0} tokens/s",
            self.new_tokens,
            self.prompt_tokens,
            self.prompt_tokens_per_s
        );
    }
}

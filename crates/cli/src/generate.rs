//! `espalier generate`: text of a trained model, behind a prompt.

use std::io::{self, IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::Args;
use espalier_train::Error;
use espalier_train::infer::{FinishReason, Generation, Generator, Sampler, Sampling};
use serde::Serialize;

use crate::generation::{GenerationArguments, GenerationSession, show};
use crate::log::LogArguments;
use crate::output::{self, print_err};
use crate::run_file::conflict;
use crate::signals::{INTERRUPTED, StopSignal};

#[derive(Args)]
#[command(after_help = "Examples:
  espalier generate out/hello \"The model\"
  espalier generate out/hello/checkpoints/step-000600 \"A rank\" --temperature 0 --max-new-tokens 40
  espalier generate out/hello \"The\" --top-k 40 --top-p 0.9 --min-p 0.05 --seed 7 --stop . --json
  espalier generate out/hello \"The\" -n 3 --repetition-penalty 1.2 --dtype bf16
  espalier generate out/hello < prompt.txt
  espalier generate out/hello \"The\" --set parallel.pipeline=2")]
pub struct GenerateArguments {
    /// A checkpoint folder, or a run folder (its newest checkpoint).
    checkpoint: PathBuf,
    /// The prompt; `-`, or none, reads it from standard input.
    prompt: Option<String>,
    /// Number of samples, with seeds S, S+1, and so on.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: u32,
    /// Print only the new text, without the prompt.
    #[arg(long)]
    no_echo: bool,
    #[command(flatten)]
    generation: GenerationArguments,
    /// Print text, tokens and tokens/s as one line of JSON instead of streaming the text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

/// What `--json` prints: the first text, and all of them where several were asked for.
#[derive(Serialize)]
struct GenerateReport {
    #[serde(flatten)]
    first: GeneratedSample,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<Vec<GeneratedSample>>,
}

#[derive(Serialize, Clone)]
struct GeneratedSample {
    /// What was generated, without the prompt.
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

pub fn generate(arguments: &GenerateArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let stop = StopSignal::listen_with_message("interrupted")?;
    let prompt = arguments.prompt()?;
    let session = GenerationSession::open(&arguments.checkpoint, &arguments.generation)?;
    let ids = session.prompt(&prompt)?;
    let generated = session.on_ranks(session.limit(), |generator| {
        stop.begun.store(true, Ordering::SeqCst);
        let mut all = Vec::new();
        for number in 0..arguments.samples {
            generator.reset_cache();
            let one = generate_one(arguments, &session, (&prompt, &ids), number, &stop, generator)?;
            let ended = generator.ranks().any_rank(stop.requested.load(Ordering::SeqCst))?;
            all.push(one);
            if ended {
                break;
            }
        }
        Ok(all)
    })?;
    let interrupted = |generation: &Generation| {
        generation.end == FinishReason::Stopped && stop.requested.load(Ordering::SeqCst)
    };
    let last = generated.len() - 1;
    let (mut samples, mut is_interrupted) = (Vec::new(), generated.len() < arguments.samples as usize);
    for (number, (generation, text)) in generated.into_iter().enumerate() {
        let was_interrupted = number == last && interrupted(&generation);
        is_interrupted |= was_interrupted;
        let sample = GeneratedSample::new(&session, ids.len(), generation, text, was_interrupted);
        sample.print(session.context());
        samples.push(sample);
    }
    let first = samples[0].clone();
    let samples = (arguments.samples > 1).then_some(samples);
    output::json(arguments.json, || GenerateReport { first, samples });
    Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Generates one text, on one rank: printed as it comes, behind the prompt.
fn generate_one(
    arguments: &GenerateArguments,
    session: &GenerationSession,
    (prompt, ids): (&str, &[u32]),
    number: u32,
    stop: &StopSignal,
    generator: &mut Generator<'_>,
) -> espalier_train::Result<(Generation, String)> {
    let generation = &arguments.generation;
    let prints = generator.ranks().is_rank0() && !arguments.json;
    if prints && arguments.samples > 1 {
        show(&format!("{}--- {} of {}\n", if number > 0 { "\n" } else { "" }, number + 1, arguments.samples));
    }
    if prints && !arguments.no_echo {
        show(prompt);
    }
    let sampling = generation.sampling();
    let mut sampler =
        Sampler::new(Sampling { seed: sampling.seed.wrapping_add(u64::from(number)), ..sampling });
    session.generate(generation, generator, ids, &mut sampler, stop, prints)
}

impl GenerateArguments {
    /// The prompt, from standard input where it is not among the arguments.
    fn prompt(&self) -> Result<String> {
        match self.prompt.as_deref() {
            Some(prompt) if prompt != "-" => return Ok(prompt.into()),
            None if io::stdin().is_terminal() => {
                let problem = "is missing: give it after the checkpoint, or on standard input";
                return Err(conflict("PROMPT", problem).into());
            }
            _ => {}
        }
        let mut text = String::new();
        let refused = |why| Error::File {
            path: "standard input".into(),
            why: format!("the prompt cannot be read: {why}"),
        };
        io::stdin().lock().read_to_string(&mut text).map_err(refused)?;
        // What `echo` ends its line with is not part of it.
        let shorter = text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text));
        Ok(shorter.map_or(text.clone(), str::to_owned))
    }
}

impl GeneratedSample {
    fn new(
        session: &GenerationSession,
        prompt_tokens: usize,
        generation: Generation,
        text: String,
        interrupted: bool,
    ) -> GeneratedSample {
        GeneratedSample {
            text,
            prompt_tokens,
            new_tokens: generation.tokens.len(),
            tokens_per_s: generation.rate(),
            prompt_tokens_per_s: prompt_tokens as f64 / generation.prompt_time.as_secs_f64(),
            format: session.format(),
            end: match generation.end {
                FinishReason::MaxTokens => "length",
                FinishReason::ContextFull => "context",
                FinishReason::Stopped if interrupted => "interrupted",
                FinishReason::Stopped => "stop",
            },
            tokens: generation.tokens,
        }
    }

    /// What a person should know beside the text.
    fn print(&self, context: usize) {
        if self.end == "context" {
            print_err!("note: stopped at the context length of {context} tokens");
        }
        let rate = self.tokens_per_s.map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
        print_err!(
            "{} new tokens{rate}; prompt: {} tokens, {:.0} tokens/s",
            self.new_tokens,
            self.prompt_tokens,
            self.prompt_tokens_per_s
        );
    }
}

//! What `generate` and `chat` share: a trained model that is opened to generate text, and how it chooses its
//! tokens.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_data::{ChatTemplate, CivilTime, Tokenizer, TokenizerConfig};
use espalier_plan::Plan;
use espalier_plan::config::{Override, Purpose};
use espalier_plan::device::DeviceKind;
use espalier_plan::spec::Precision;
use espalier_tensor::Device;
use espalier_train::Error;
use espalier_train::infer::{Generation, Generator, Sampler, Sampling, TextStream};
use espalier_train::trained::{TrainedModel, on_ranks};

use crate::prepared::open_trained;
use crate::run_file::conflict;
use crate::setting::setting;
use crate::signals::StopSignal;
use crate::{device, ranks};

#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub struct GenerationArguments {
    /// Max new tokens.
    #[arg(long, visible_alias = "tokens", value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_new_tokens: u64,
    /// Sampling temperature (0 = greedy).
    #[arg(long, value_name = "T", default_value_t = 0.8, allow_negative_numbers = true, value_parser = temperature)]
    temperature: f64,
    /// Sample from the K most likely tokens (0 = all).
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Nucleus sampling: sample from the smallest set of tokens with total probability P.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = fraction)]
    top_p: f64,
    /// Drop tokens less likely than P times the most likely one.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true, value_parser = zero_to_one)]
    min_p: f64,
    /// Repetition penalty (1 = none; above 1 makes repeated tokens less likely).
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true, value_parser = penalty)]
    repetition_penalty: f64,
    /// Random seed.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Stop sequence; it is not printed. May be repeated.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Device; auto takes a GPU if there is one.
    #[arg(long, value_name = "DEVICE", value_parser = device::kind(), help_heading = "Model")]
    device: Option<DeviceKind>,
    /// Data type of the weights [default: as trained].
    #[arg(long, value_name = "TYPE", value_parser = device::precision(), help_heading = "Model")]
    dtype: Option<Precision>,
    /// A tokenizer.json, for models trained on token files, or to replace the model's own.
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    tokenizer: Option<PathBuf>,
    /// Override a field of the run file, as in `--set device.kind=cpu` or `--set parallel.tensor=2`;
    /// `--set FIELD=` removes it. Paths are relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting, help_heading = "Model")]
    overrides: Vec<Override>,
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |x| (0.0..f64::INFINITY).contains(&x), "expected a number of at least 0, such as 0.8")
}

fn zero_to_one(text: &str) -> Result<f64, String> {
    number(text, |x| (0.0..=1.0).contains(&x), "expected a number from 0 to 1, such as 0.05")
}

fn penalty(text: &str) -> Result<f64, String> {
    number(text, |x| x > 0.0 && x.is_finite(), "expected a number above 0, such as 1.2")
}

fn fraction(text: &str) -> Result<f64, String> {
    number(text, |x| x > 0.0 && x <= 1.0, "expected a probability above 0, up to 1, such as 0.9")
}

fn number(text: &str, fits: fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| fits(*x)).ok_or_else(|| expected.into())
}

impl GenerationArguments {
    /// How a token is chosen.
    pub fn sampling(&self) -> Sampling {
        let GenerationArguments { temperature, top_k, top_p, min_p, repetition_penalty, seed, .. } = *self;
        Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed }
    }

    /// Fields of the run file that are not as it was trained; what `--device` and `--dtype` say comes last.
    fn overrides(&self) -> Vec<Override> {
        let device = self.device.map(Override::device);
        let dtype = self.dtype.map(Override::precision);
        self.overrides.iter().cloned().chain(device).chain(dtype).collect()
    }
}

/// A trained model that is opened to generate text.
pub struct GenerationSession {
    trained: TrainedModel,
    plan: Plan,
    /// One that was asked for instead of the model's own.
    tokenizer: Option<Tokenizer>,
    /// How a conversation becomes a text, where the tokenizer knows.
    template: Option<ChatTemplate>,
    /// The token that ends an answer, where the tokenizer's files name one.
    end_of_answer: Option<u32>,
    device: Device,
}

impl GenerationSession {
    /// Opens a checkpoint, or says why no text can come of it.
    pub fn open(checkpoint: &Path, arguments: &GenerationArguments) -> Result<GenerationSession> {
        let trained = open_trained(checkpoint)?;
        let tokenizer = match &arguments.tokenizer {
            Some(path) => Some(Tokenizer::open(path).map_err(Error::Data)?),
            None => None,
        };
        let overrides = arguments.overrides();
        trained.run().check_overrides(&overrides, Purpose::Text).map_err(Error::Plan)?;
        let plan = trained.plan(&overrides)?;
        let refuse = |why: String| Err(trained.checkpoint().refuse(why));
        if plan.model.input.context().is_none() {
            refuse(format!("it is an image model ({}), which generates no text", plan.model.name))?;
        }
        if tokenizer.is_none() && trained.tokenizer().is_none() {
            let why = match trained.data() {
                Some(_) => "it was trained on token files, which have no tokenizer",
                None => "it has no tokenizer (tokenizer.json, or vocab.json and merges.txt)",
            };
            refuse(format!("{why}: add --tokenizer FILE"))?;
        }
        let device = device::open_here(&plan.device, plan.mesh.size())?;
        let (template, end_of_answer) = match tokenizer.as_ref().or(trained.tokenizer()) {
            Some(tokenizer) => {
                let folder = tokenizer.path().and_then(Path::parent);
                let config = folder.map(TokenizerConfig::of_folder).transpose().map_err(Error::Data)?;
                let end = config.and_then(|config| tokenizer.added(config.token("eos_token")?));
                let now = Some(CivilTime::now());
                (ChatTemplate::of_tokenizer(tokenizer, now).map_err(Error::Data)?, end)
            }
            None => (None, None),
        };
        Ok(GenerationSession { trained, plan, tokenizer, template, end_of_answer, device })
    }

    /// What turns text into its tokens and back.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer.as_ref().or(self.trained.tokenizer()).expect("one was found when it was opened")
    }

    /// How a conversation becomes a text, where the tokenizer knows.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The most tokens that it can read.
    pub fn context(&self) -> usize {
        self.plan.model.input.context().expect("a model of text")
    }

    /// How the weights are stored that each token reads.
    pub fn format(&self) -> String {
        format!("dense-{}", self.plan.storage.precision.name())
    }

    /// The tokens of a prompt, or why no text can be generated from it.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.check_prompt(self.tokenizer().encode_prompt(text).map_err(Error::Data)?)
    }

    /// The tokens of a text that continues another, or is a conversation with all its marks; likewise.
    pub fn continuation(&self, text: &str) -> Result<Vec<u32>> {
        self.check_prompt(self.tokenizer().encode(text).map_err(Error::Data)?)
    }

    /// The tokens of a text, whatever their number.
    pub fn tokens_of(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer().encode(text).map_err(Error::Data)?)
    }

    /// Tokens that the model can read, or why it cannot.
    pub fn check_prompt(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        let refuse = |problem: String| Err(conflict("PROMPT", &problem));
        if ids.is_empty() {
            refuse("is empty: a prompt of at least one token is needed".into())?;
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.plan.model.classes) {
            let vocab = self.plan.model.classes;
            refuse(format!("has the token id {id}, but the vocabulary has {vocab} tokens"))?;
        }
        if ids.len() > self.context() {
            let (tokens, context) = (ids.len(), self.context());
            refuse(format!("has {tokens} tokens, more than the context length of {context}"))?;
        }
        Ok(ids)
    }

    /// Does some work on every rank; a rank waits at most `limit` for another.
    pub fn on_ranks<R: Send>(
        &self,
        limit: Duration,
        work: impl Fn(&mut Generator<'_>) -> espalier_train::Result<R> + Sync,
    ) -> Result<R> {
        let GenerationSession { trained, plan, device, .. } = self;
        Ok(on_ranks(trained, plan, device, limit, Some(ranks::abort), work)?)
    }

    /// Generates text from some tokens, on one rank, and shows the text as it comes where `prints`; returns
    /// that text too.
    pub fn generate(
        &self,
        arguments: &GenerationArguments,
        generator: &mut Generator<'_>,
        ids: &[u32],
        sampler: &mut Sampler,
        stop: &StopSignal,
        prints: bool,
    ) -> espalier_train::Result<(Generation, String)> {
        let tokenizer = self.tokenizer();
        let mut stream = TextStream::new(tokenizer, &arguments.stop);
        let mut should_continue = |token: u32| {
            if [tokenizer.end(), self.end_of_answer].contains(&Some(token)) {
                return false;
            }
            let text = stream.push(token);
            let is_read = !prints || show(text);
            is_read && !stream.is_ended() && !stop.requested.load(Ordering::SeqCst)
        };
        let generation =
            generator.generate(ids, arguments.max_new_tokens as usize, sampler, &mut should_continue)?;
        let rest = stream.finish();
        if prints {
            show(rest);
            if !stream.text().ends_with('\n') {
                show("\n");
            }
        }
        Ok((generation, stream.text().to_owned()))
    }

    /// How long a rank waits for another, as the run file has it.
    pub fn limit(&self) -> Duration {
        self.plan.timeout
    }
}

/// Writes a piece of text where it can be read at once; whether somebody does.
pub fn show(text: &str) -> bool {
    let mut stdout = io::stdout().lock();
    text.is_empty() || stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_ok()
}

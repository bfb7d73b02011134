//! What `generate` and `chat` share: a trained model that is opened to write, and how it chooses its tokens.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use espalier_data::Tokenizer;
use espalier_plan::Plan;
use espalier_plan::config::Purpose;
use espalier_plan::device::DeviceKind;
use espalier_tensor::Device;
use espalier_train::Error;
use espalier_train::infer::{self, Generator, Sampling};
use espalier_train::trained::Trained;

use crate::say::say;
use crate::{device, ranks};

#[derive(Args)]
pub struct WritingArguments {
    /// The most tokens to write.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub tokens: u64,
    /// What logits are divided by: higher is bolder, and 0 always takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.8, allow_negative_numbers = true, value_parser = temperature)]
    temperature: f64,
    /// Draw from the K likeliest tokens; 0: from all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Draw from the likeliest tokens that have this share of the probability.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = share)]
    top_p: f64,
    /// Where chance comes from: the same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// End the text before this word. May be repeated.
    #[arg(long, value_name = "WORD", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// The tokenizer.json of a model whose data were token files, or another than it was trained with.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Override a field of the run file, as in `--set device.kind=cpu` or `--set parallel.tensor=2`. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    overrides: Vec<String>,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..f64::INFINITY).contains(&number) => Ok(number),
        _ => Err("expected a number of at least 0, such as 0.8".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("expected a share above 0, up to 1, such as 0.9".into()),
    }
}

impl WritingArguments {
    /// How a token is chosen.
    pub fn sampling(&self) -> Sampling {
        let WritingArguments { temperature, top_k, top_p, seed, .. } = *self;
        Sampling { temperature, top_k, top_p, seed }
    }
}

/// A trained model that is opened to write.
pub struct Writer {
    trained: Trained,
    plan: Plan,
    /// One that was asked for instead of the model's own.
    tokenizer: Option<Tokenizer>,
    device: Device,
}

impl Writer {
    /// Opens a checkpoint, or says why no text can come of it.
    pub fn open(checkpoint: &Path, arguments: &WritingArguments) -> Result<Writer> {
        let passed_over = |broken: &Error| say!("warning: {broken}; the one before it is used");
        let trained = Trained::open(checkpoint, passed_over)?;
        let tokenizer = match &arguments.tokenizer {
            Some(path) => Some(Tokenizer::open(path).map_err(Error::Data)?),
            None => None,
        };
        trained.run().check_overrides(&arguments.overrides, Purpose::Text).map_err(Error::Plan)?;
        let plan = trained.plan(&arguments.overrides)?;
        let refuse = |why: String| Err(trained.checkpoint().refuse(why));
        if plan.model.input.context().is_none() {
            refuse(format!("it is a model of images ({}), which writes no text", plan.model.name))?;
        }
        if tokenizer.is_none() && trained.tokenizer().is_none() {
            let why = match trained.data() {
                Some(_) => "its data were token files, which do not say what text they stand for",
                None => {
                    "no tokenizer.json is beside it, nor vocab.json and merges.txt, so nobody knows what its tokens stand for"
                }
            };
            refuse(format!("{why}: add --tokenizer FILE"))?;
        }
        let device = open_device(&plan)?;
        Ok(Writer { trained, plan, tokenizer, device })
    }

    /// What turns text into its tokens and back.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer.as_ref().or(self.trained.tokenizer()).expect("one was found when it was opened")
    }

    /// The most tokens that it can read.
    pub fn context(&self) -> usize {
        self.plan.model.input.context().expect("a model of text")
    }

    /// How the weights are stored that each token reads.
    pub fn format(&self) -> String {
        format!("dense-{}", self.plan.storage.precision.name())
    }

    /// The tokens of a text, or why it cannot be gone on from.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let conflict = |problem: String| {
            let field = "PROMPT".into();
            Err(Error::Plan(espalier_plan::Error::Conflict { field, problem }))
        };
        let ids = self.tokenizer().encode(text).map_err(Error::Data)?;
        if ids.is_empty() {
            conflict("is empty: the model goes on from a text, so it needs one".into())?;
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.plan.model.classes) {
            conflict(format!("has the token {id}, and the model knows {}", self.plan.model.classes))?;
        }
        if ids.len() > self.context() {
            conflict(format!("has {} tokens, and the model reads at most {}", ids.len(), self.context()))?;
        }
        Ok(ids)
    }

    /// Does some work on every rank; a rank waits at most `limit` for another.
    pub fn on_ranks<R: Send>(
        &self,
        limit: Duration,
        work: impl Fn(&mut Generator<'_>) -> espalier_train::Result<R> + Sync,
    ) -> Result<R> {
        let Writer { trained, plan, device, .. } = self;
        Ok(infer::on_ranks(trained, plan, device, limit, Some(ranks::give_up), work)?)
    }

    /// How long a rank waits for another, as the run file has it.
    pub fn limit(&self) -> Duration {
        self.plan.timeout
    }
}

/// The device that a plan asks for; ranks that are threads of this process share its processor, unless a card is asked for.
fn open_device(plan: &Plan) -> Result<Device> {
    let mut wish = plan.device.clone();
    if plan.mesh.size() > 1 && wish.kind == DeviceKind::Auto {
        wish.kind = DeviceKind::Cpu;
    }
    let threads = device::threads(wish.threads, std::thread::available_parallelism()?.get())?;
    Ok(device::open(&wish, threads).map_err(Error::Tensor)?)
}

/// Writes a piece of text where it can be read at once; whether somebody does.
pub fn show(text: &str) -> bool {
    let mut stdout = io::stdout().lock();
    text.is_empty() || stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_ok()
}

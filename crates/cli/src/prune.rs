//! `espalier prune`: a checkpoint in, a pruned checkpoint out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_plan::config::{self, RunFile};
use espalier_train::checkpoint::Checkpoint;
use espalier_train::parallel::Ranks;
use espalier_train::run::Observer;
use espalier_train::{Error, hub, run};

use crate::log::LogArguments;
use crate::prepared::{Prepared, prepare_text};
use crate::progress::{self, Progress};
use crate::run_file::{conflict, in_file, read_run};
use crate::say;
use crate::setting::setting;

#[derive(Args)]
#[command(after_help = "Examples:
  espalier prune out/hello --method magnitude --sparsity 0.9 -o out/hello-pruned
  espalier prune out/hello/checkpoints/step-000300 --method snip --set prune.samples=256 -o out/snip
  espalier prune gpt2 --method magnitude --sparsity 0.5 --set data.kind=text --set data.path=book.txt -o out/thin
  espalier train out/hello-pruned/run.toml --out out/hello-pruned --resume --set train.steps=600")]
pub struct PruneArguments {
    /// A checkpoint's folder, a run folder, whose newest one is meant, or a folder of Hugging Face's.
    checkpoint: PathBuf,
    /// random, magnitude, snip, grasp or 2:4; the others prune in the course of training.
    #[arg(long)]
    method: String,
    /// The share of weights that goes, in [0, 1).
    #[arg(long, allow_negative_numbers = true)]
    sparsity: Option<f64>,
    /// Override a field of the run file, as in `--set prune.scope=layer`; `--set FIELD=` leaves it out. Paths are relative to the
    /// current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<String>,
    /// The run folder to write.
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Print the summary as one line of JSON, the last of standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

/// Runs the command.
pub fn prune(arguments: &PruneArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let mut progress = Progress::lines();
    let said = arguments.sparsity.map(|sparsity| ("--sparsity", "prune.sparsity", format!("{sparsity:?}")));
    let method = ("--method", "prune.method", format!("{:?}", arguments.method));
    for (option, field, value) in said.into_iter().chain([method]) {
        refuse_contradiction(option, &value, field, &arguments.overrides)?;
    }
    let passed_over = |broken: &Error| progress.warning(&format!("{broken}; the one before it is used"));
    let whole = hub::find(&arguments.checkpoint, &Ranks::alone(), passed_over)?;
    let sparsity = arguments.sparsity.map(|sparsity| format!("prune.sparsity={sparsity:?}"));
    let overrides: Vec<String> = sparsity.into_iter().chain(arguments.overrides.iter().cloned()).collect();
    let (text, run_file, overrides) = run_of(&arguments.checkpoint, &whole, overrides)?;
    // The run may have been pruned by another method, whose fields this one does not have.
    let text = RunFile::with_method(&text, &arguments.method).map_err(|error| in_file(&run_file, error))?;
    let run = RunFile::parse(&text, &overrides).map_err(Error::Plan)?;
    let method = run.prune.as_ref().expect("the method was given");
    if !method.method.prunes_once() {
        let problem = format!(
            "is \"{}\", which prunes in the course of training: write it into a run file's [prune]",
            method.method.name()
        );
        return Err(
            Error::Plan(espalier_plan::Error::Conflict { field: "prune.method".into(), problem }).into()
        );
    }
    let prepared = prepare_text(&text, &run_file, &overrides, None, Some(whole.path()))?;
    let device = prepared.open_device()?;
    let Prepared { plan, dataset, .. } = prepared;
    let summary =
        device.enter(|| run::prune(plan, dataset, &device, &whole, &arguments.out, &mut progress))?;
    progress::summarise(&summary);
    if arguments.json {
        say::json(&serde_json::to_string(&summary)?);
    }
    Ok(ExitCode::SUCCESS)
}

/// The run file of what is pruned, where it stands or would stand, and the overrides that are left for it. Somebody else's model
/// has none: its architecture is known, and its data must be said.
fn run_of(path: &Path, whole: &Checkpoint, overrides: Vec<String>) -> Result<(String, PathBuf, Vec<String>)> {
    if !hub::is_foreign(path) {
        let run_file = whole.run_file();
        return Ok((read_run(&run_file)?, run_file, overrides));
    }
    if config::overridden(&overrides, "data.kind").is_none() {
        let problem = "is not said, and a model without a run of ours has no run file: --set data.kind=text and \
                       --set data.path=FILE say what it is trained on";
        return Err(conflict("data.kind", problem).into());
    }
    let described = hub::model_of(path, |_| {})?;
    let tokenizer = described.tokenizer.map(std::path::absolute).transpose()?;
    let text = "[model]\nname = \"auto\"\n";
    let (text, left) =
        RunFile::with_model(text, &overrides, &described.model, tokenizer.as_deref()).map_err(Error::Plan)?;
    Ok((text, "run.toml".into(), left))
}

/// Refuses a field that an option and a `--set` give different values.
fn refuse_contradiction(option: &str, value: &str, field: &str, overrides: &[String]) -> Result<()> {
    match config::overridden(overrides, field) {
        Some(set) if set != value => {
            let problem = format!("makes `{field}` {value}, but --set makes it {set}: leave one of them out");
            Err(Error::Plan(espalier_plan::Error::Conflict { field: option.into(), problem }).into())
        }
        _ => Ok(()),
    }
}

//! `espalier prune`: a checkpoint in, a pruned checkpoint out.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_plan::config::{self, Override, RunTable};
use espalier_train::checkpoint::Checkpoint;
use espalier_train::parallel::Ranks;
use espalier_train::run::Observer;
use espalier_train::{Error, hub, run};

use crate::log::LogArguments;
use crate::output;
use crate::prepared::{PreparedRun, prepare};
use crate::progress::{self, ProgressPrinter};
use crate::run_file::{conflict, in_file, read_run};
use crate::setting::setting;

#[derive(Args)]
#[command(after_help = "Examples:
  espalier prune out/hello --method magnitude --sparsity 0.9 -o out/hello-pruned
  espalier prune out/hello/checkpoints/step-000300 --method snip \\
      --set prune.samples=256 -o out/snip
  espalier prune gpt2 --method magnitude --sparsity 0.5 \\
      --set data.kind=text --set data.path=book.txt -o out/thin
  espalier train out/hello-pruned/run.toml --out out/hello-pruned --resume \\
      --set train.steps=600")]
pub struct PruneArguments {
    /// A checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face checkpoint.
    checkpoint: PathBuf,
    /// Pruning method: random, magnitude, wanda, snip, grasp or 2:4 (others prune during training: see `train`).
    #[arg(long)]
    method: String,
    /// Fraction of weights to prune, in [0, 1).
    #[arg(long, allow_negative_numbers = true)]
    sparsity: Option<f64>,
    /// Override a field of the run file, as in `--set prune.scope=layer`; `--set FIELD=` removes it. Paths
    /// are relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Output run folder.
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Print the summary as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

pub fn prune(arguments: &PruneArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let mut progress = ProgressPrinter::lines();
    let given = arguments.sparsity.map(|sparsity| ("--sparsity", "prune.sparsity", format!("{sparsity:?}")));
    let method = ("--method", "prune.method", format!("{:?}", arguments.method));
    for (option, field, value) in given.into_iter().chain([method]) {
        refuse_contradiction(option, &value, field, &arguments.overrides)?;
    }
    let on_damaged = |broken: &Error| progress.warning(&format!("{broken}; the one before it is used"));
    let checkpoint = hub::find(&arguments.checkpoint, &Ranks::single(), on_damaged)?;
    let sparsity = arguments.sparsity.map(Override::sparsity);
    let overrides: Vec<Override> = sparsity.into_iter().chain(arguments.overrides.iter().cloned()).collect();
    let (run, run_file) = run_of(arguments, &checkpoint, &overrides)?;
    let method = run.read().map_err(Error::Plan)?.prune.expect("the method was given");
    if !method.method.prunes_once() {
        let problem = format!(
            "is \"{}\", which prunes during training: put it in [prune] of a run file and use `espalier train`",
            method.method.name()
        );
        return Err(conflict("prune.method", &problem).into());
    }
    let prepared = prepare(&run, &run_file, None, Some(checkpoint.path()))?;
    let device = prepared.open_device()?;
    let PreparedRun { plan, dataset, .. } = prepared;
    let summary =
        device.enter(|| run::prune(plan, dataset, &device, &checkpoint, &arguments.out, &mut progress))?;
    progress::summarise(&summary);
    output::answer(arguments.json, || &summary)
}

/// The run file of what is pruned, with the method and the overrides in it, and where it stands or would
/// stand. Somebody else's model has none: its architecture is known, and its data must be set.
fn run_of(
    arguments: &PruneArguments,
    checkpoint: &Checkpoint,
    overrides: &[Override],
) -> Result<(RunTable, PathBuf)> {
    let path = &arguments.checkpoint;
    let is_foreign = hub::is_foreign(path);
    if is_foreign && config::overridden(overrides, "data.kind").is_none() {
        let problem = "is missing, and this model has no run file: give its training data with --set data.kind=text \
                       and --set data.path=FILE";
        return Err(conflict("data.kind", problem).into());
    }
    let run_file = if is_foreign { "run.toml".into() } else { checkpoint.run_file() };
    let text = if is_foreign { String::new() } else { read_run(&run_file)? };
    let mut run = RunTable::parse(&text, &[]).map_err(|error| in_file(&run_file, error))?;
    // The run may have been pruned by another method, whose fields this one does not have.
    run.set_method(&arguments.method);
    let mut run = run.with(overrides).map_err(Error::Plan)?;
    if is_foreign {
        let described = hub::model_of(path, |_| {})?;
        let tokenizer = described.tokenizer.map(std::path::absolute).transpose()?;
        run.set_model(&described.model, tokenizer.as_deref()).map_err(Error::Plan)?;
    }
    Ok((run, run_file))
}

/// Refuses a field that an option and a `--set` give different values.
fn refuse_contradiction(option: &str, value: &str, field: &str, overrides: &[Override]) -> Result<()> {
    match config::overridden(overrides, field) {
        Some(set) if set != value => {
            let problem =
                format!("sets `{field}` to {value}, but --set sets it to {set}: remove one of them");
            Err(conflict(option, &problem).into())
        }
        _ => Ok(()),
    }
}

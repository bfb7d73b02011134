//! `espalier explain`: what every layer of a run sends to other ranks by data, model and domain
//! parallelism, which is the cheapest, and which mixture is the cheapest for all of them.
//!
//! The arithmetic is `plan::cost`'s.

mod measure;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_data::Dataset;
use espalier_plan::config::Override;
use espalier_plan::cost::{AllReduce, AlphaBeta, Explanation, Setting};
use espalier_plan::pruning::Pruning;
use espalier_plan::{Error as PlanError, Plan};
use espalier_train::Error;
use serde_json::json;

use crate::comm_timing::LinkSamples;
use crate::output;
use crate::run_file::{conflict, in_file, open, resolve};
use crate::setting::setting;

#[derive(Args)]
#[command(after_help = "docs/explain.md has the formulas.

Examples:
  espalier explain runs/hello.toml --ranks 8
  espalier explain runs/alexnet.toml --ranks 8
  espalier explain runs/alexnet.toml --ranks 64 --set model.name=vgg-16 --set train.batch=32
  espalier explain runs/hello.toml --ranks 8 --sparsity 0.9 --alpha 1e-5 --beta 4e-11
  espalier explain runs/hello.toml --ranks 2 --measure")]
pub struct ExplainArguments {
    /// The run file (TOML); docs/run-file.md lists its fields.
    run_file: PathBuf,
    /// Number of ranks, at least 2.
    #[arg(long, value_name = "P")]
    ranks: usize,
    /// Override a field of the run file, as in `--set train.batch=256`; `--set FIELD=` removes it. Paths are
    /// relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Latency of a message in seconds [default: 2e-6, or as measured by --measure].
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    alpha: Option<f64>,
    /// Inverse bandwidth: seconds per element in the run's precision [default: that of 6 GB/s, or as measured by
    /// --measure].
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    beta: Option<f64>,
    /// Fraction of the prunable weights that is pruned [default: that of the run file].
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true)]
    sparsity: Option<f64>,
    /// All-reduce algorithm: ring, tree or halving (recursive halving and doubling).
    #[arg(long, value_name = "ALGORITHM", default_value = "ring")]
    all_reduce: String,
    /// Measure latency, bandwidth and every layer's collectives among threads of this process.
    #[arg(long)]
    measure: bool,
    /// Print the table as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// Ranks that messages are measured among at most: where many threads take turns on a few cores, what is
/// measured is how these are shared, and it takes minutes.
const MOST_MEASURED: usize = 512;

pub fn explain(arguments: &ExplainArguments) -> Result<ExitCode> {
    let all_reduce = arguments.check()?;
    let plan = plan(arguments)?;
    let pruning = arguments.pruning(&plan);
    let precision = plan.storage.precision;
    let published = AlphaBeta::published(precision.size());
    let mut at = Setting { ranks: arguments.ranks, batch: plan.batch.samples, link: published, all_reduce };
    let links = if arguments.measure { Some(measure::links(&at, precision)?) } else { None };
    let known = links.as_ref().map_or(published, LinkSamples::fitted);
    at.link = AlphaBeta {
        alpha: arguments.alpha.unwrap_or(known.alpha),
        beta: arguments.beta.unwrap_or(known.beta),
    };
    let explanation = Explanation::new(&plan.model, pruning.as_ref(), at).map_err(PlanError::Shape);
    let explanation = explanation.map_err(Error::Plan)?;
    let measured = match links {
        Some(links) => Some(measure::layers(links, &explanation, precision)?),
        None => None,
    };
    let text = table::text(
        &explanation,
        precision.size(),
        measured.as_ref(),
        plan.layout.mixture(),
        output::width(),
    );
    output::on_standard_output(&text);
    output::answer(arguments.json, || {
        let mut value = json!(explanation);
        value["word_bytes"] = precision.size().into();
        value["run"] = json!(plan.layout.mixture());
        value["conclusion"] = table::conclusion(&explanation).into();
        value["measured"] = measured.map(|measured| measured.json(&explanation)).into();
        value
    })
}

/// The run, without its data where these need not be opened to know their sizes.
fn plan(arguments: &ExplainArguments) -> Result<Plan> {
    let path = &arguments.run_file;
    let run_file = open(path, &arguments.overrides)?.read().map_err(|error| in_file(path, error))?;
    let run_file = resolve(run_file, path)?;
    let facts = Dataset::facts_of(&run_file).map_err(Error::Data)?;
    Ok(Plan::new(run_file, facts).map_err(Error::Plan)?)
}

impl ExplainArguments {
    /// What no formula takes is an error that names the argument.
    fn check(&self) -> Result<AllReduce> {
        if self.ranks < 2 {
            let problem = format!("is {}, but it must be at least 2", self.ranks);
            return Err(conflict("--ranks", &problem).into());
        }
        if self.measure && self.ranks > MOST_MEASURED {
            let problem = format!(
                "is {}, but --measure starts a thread for each, and does that for at most {MOST_MEASURED}",
                self.ranks
            );
            return Err(conflict("--ranks", &problem).into());
        }
        let times = [("--alpha", self.alpha), ("--beta", self.beta)];
        if let Some((name, Some(got))) = times
            .into_iter()
            .find(|(_, given)| given.is_some_and(|given| !(given.is_finite() && given >= 0.0)))
        {
            return Err(wrong(name, "seconds, as in 2e-6", &got.to_string()).into());
        }
        if let Some(got) = self.sparsity.filter(|fraction| !(0.0..1.0).contains(fraction)) {
            return Err(wrong("--sparsity", "a number in [0, 1)", &got.to_string()).into());
        }
        let found = AllReduce::ALL.into_iter().find(|(word, _)| *word == self.all_reduce);
        let refused = || wrong("--all-reduce", "ring, tree or halving", &format!("\"{}\"", self.all_reduce));
        Ok(found.ok_or_else(refused)?.1)
    }

    /// What is pruned: by the run file, or by the argument.
    fn pruning(&self, plan: &Plan) -> Option<Pruning> {
        match (self.sparsity, plan.pruning.clone()) {
            (None, written) => written,
            (Some(sparsity), Some(written)) => Some(Pruning { sparsity, ..written }),
            (Some(sparsity), None) => Some(Pruning::evenly(sparsity)),
        }
    }
}

fn wrong(field: &str, expected: &str, got: &str) -> Error {
    let (field, expected, got) = (field.into(), expected.into(), got.into());
    Error::Plan(PlanError::Value { field, expected, got, hint: None })
}

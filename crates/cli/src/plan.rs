//! `espalier plan`: which layout of so many devices is the fastest that fits, why, and what more memory or
//! pruning would buy.
//!
//! The arithmetic is `plan::search`'s. Tables and `--json` go to standard output, notes to standard error.

mod apply;
mod calibrate;
mod compare;
mod curve;
mod engines;
mod memory;
mod output_files;
mod ranges;
mod record;
mod sparsities;
mod table;
mod time_to_result;
mod too_large;
mod trace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_data::Dataset;
use espalier_plan::cluster::Cluster;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::engine::EngineProfile;
use espalier_plan::search::{LayoutSearch, SearchConstraints, SearchResult};
use espalier_plan::simulate::{LayoutRecord, Simulation};
use espalier_plan::spec::Precision;
use espalier_plan::{Error as PlanError, Plan};
use espalier_train::{Error, StatePeak};
use serde_json::{Value, json};

use crate::local_cluster::LocalCluster;
use crate::output::{self, print_err, print_out};
use crate::progress::state_peak;
use crate::run_file::{conflict, in_file, open, resolve};
use crate::setting::setting;
use crate::spinner::Spinner;
use compare::DeviceSweep;
use output_files::OutputFiles;
use ranges::{gigabytes, powers, sparsity};
use record::record;
pub use table::seconds;
use time_to_result::ResultArguments;

#[derive(Args)]
#[command(after_help = "docs/plan.md explains cluster files, engines and the cost model.

Examples:
  espalier plan runs/gpt3-13b.toml --cluster summit --gpus 256
  espalier plan runs/gpt3-13b.toml --cluster summit --gpus 256,512,1024,2048 \\
      --compare dense,samo,espalier
  espalier plan runs/gpt3-13b.toml --cluster dgx-h100 --gpus 64 \\
      --layout tensor=8,recompute=block
  espalier plan runs/gpt3-13b.toml --cluster summit --sweep gpus=64..2048 \\
      --svg scaling.svg
  espalier plan runs/gpt3-13b.toml --cluster summit --sweep gpus=256..2048 \\
      --engine sputnik,deepspeed-3d,axonn,samo --svg samo.svg
  espalier plan runs/gpt3-13b.toml --fits 80GB --gpus 8
  espalier plan runs/pipeline.toml --gpus 4 --layout pipeline=4 --trace plan.json
  espalier plan runs/hello.toml --gpus 2 --apply hello-2.toml
  espalier plan --study out/w3 --cluster dgx-h100 --svg w3-time.svg
  espalier plan runs/gpt3-13b.toml --cluster dgx-h100 --tokens 300B \\
      --sweep gpus=64..2048 --price-per-gpu-hour 2.5
  espalier plan --calibrate out/hello --cluster cluster.toml")]
pub struct PlanArguments {
    /// The run file (TOML); docs/run-file.md lists its fields.
    #[arg(required_unless_present_any = ["calibrate", "study"])]
    run_file: Option<PathBuf>,
    /// Cluster: summit, dgx-a100, dgx-h100, h200-node, this-machine, or a cluster file [default: device.cluster of
    /// the run file, or cluster.toml beside it or in the current folder, or this-machine].
    #[arg(long, value_name = "NAME|FILE", help_heading = "Search")]
    cluster: Option<String>,
    /// Number of devices (GPUs); a list gives one table for each [default: one node].
    #[arg(
        long,
        visible_alias = "ranks",
        value_name = "N[,N...]",
        value_delimiter = ',',
        help_heading = "Search"
    )]
    gpus: Vec<usize>,
    /// Training system to model: espalier, axonn, samo, sputnik, deepspeed-3d, megatron (2021), megatron-core
    /// or fsdp; with --sweep a list, which gives a column and a curve for each.
    #[arg(
        long,
        value_name = "NAME[,NAME...]",
        value_delimiter = ',',
        default_value = "espalier",
        help_heading = "Search"
    )]
    engine: Vec<String>,
    /// Constraints on the search, as in `data=32,tensor=2,micro_batch=4,recompute=block,schedule=1f1b`.
    #[arg(
        long,
        value_name = "FIELD=VALUE,...",
        default_value = "",
        hide_default_value = true,
        help_heading = "Search"
    )]
    layout: String,
    /// Override a field of the run file, as in `--set train.batch=256`; `--set FIELD=` removes it. Paths are
    /// relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Fraction of the prunable weights that is pruned [default: that of the run file]; `0..0.95` gives a table.
    #[arg(long, value_name = "FRACTION|A..B", help_heading = "Search")]
    sparsity: Option<String>,
    /// Number of layouts to list.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Search")]
    top: u16,
    /// Compare the best layouts with several forms of training state: dense, samo (SAMO, Singh & Bhatele 2023:
    /// 24 f + 2 bytes per weight at density f), espalier.
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', help_heading = "Search")]
    compare: Vec<String>,
    /// Best layout for each power of two, as in `gpus=64..2048`.
    #[arg(long, value_name = "gpus=A..B", conflicts_with = "gpus", help_heading = "Search")]
    sweep: Option<String>,
    /// Plot the sweep; with --compare, one curve for each form of state. Of a time to result: one for each
    /// sparsity.
    #[arg(long, value_name = "FILE", conflicts_with = "fits", help_heading = "Files")]
    svg: Option<PathBuf>,
    /// Check whether the run fits in devices with this much memory, as in 80GB.
    #[arg(long, value_name = "SIZE", help_heading = "Search")]
    fits: Option<String>,
    /// Show what the memory of the best layout is made of.
    #[arg(long, conflicts_with_all = ["fits", "sweep"], help_heading = "Search")]
    explain_memory: bool,
    /// Write a run file with the best layout.
    #[arg(long, value_name = "FILE", conflicts_with = "fits", help_heading = "Files")]
    apply: Option<PathBuf>,
    /// Write the simulated timeline of one step of the best layout for chrome://tracing or Perfetto: one rank
    /// per pipeline stage, with the event names of `espalier train --trace`.
    #[arg(long, value_name = "FILE", conflicts_with = "fits", help_heading = "Files")]
    trace: Option<PathBuf>,
    /// Let --apply, --svg and --trace overwrite any file, the run file included.
    #[arg(long, help_heading = "Files")]
    force: bool,
    /// Refit the rates of a cluster file to the measured step times of these runs
    /// [cluster file: that of --cluster, or cluster.toml, or the built-in one].
    #[arg(long, value_name = "RUN_FOLDER", num_args = 1.., conflicts_with_all = ["run_file", "gpus", "engine", "layout", "overrides",
        "sparsity", "top", "compare", "sweep", "svg", "fits", "explain_memory", "apply", "trace", "force",
        "study", "steps_to_result", "tokens", "batches", "price_per_gpu_hour", "save"], help_heading = "Calibration")]
    calibrate: Vec<PathBuf>,
    /// Output cluster file [default: the one that was refitted, or cluster.toml].
    #[arg(short, long, value_name = "FILE", requires = "calibrate", help_heading = "Calibration")]
    out: Option<PathBuf>,
    /// Print the layouts as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    result: ResultArguments,
}

impl PlanArguments {
    /// The run file of all but `--calibrate`; the study whose run it is, where none is named.
    fn run_file(&self) -> &Path {
        self.run_file.as_deref().or(self.result.study()).expect("one of them is asked for")
    }
}

pub fn plan(arguments: &PlanArguments) -> Result<ExitCode> {
    let value = match arguments.calibrate.is_empty() {
        true => {
            let request = PlanRequest::new(arguments)?;
            let value = request.answer()?;
            request.note_cluster();
            value
        }
        false => calibrate::calibrate(arguments)?,
    };
    output::answer(arguments.json, || value)
}

/// What was asked for.
struct PlanRequest<'a> {
    arguments: &'a PlanArguments,
    run: RunTable,
    plan: Plan,
    cluster: Cluster,
    /// Its name, or its file.
    source: String,
    engine: EngineProfile,
    /// All that were named, where they are several.
    engines: Vec<EngineProfile>,
    fixed: SearchConstraints,
    outputs: OutputFiles,
}

impl<'a> PlanRequest<'a> {
    fn new(arguments: &'a PlanArguments) -> Result<PlanRequest<'a>> {
        let named = arguments
            .cluster
            .as_deref()
            .map(|name| LocalCluster::named("--cluster", Path::new(name)))
            .transpose()?;
        let run = match (&arguments.run_file, arguments.result.study()) {
            (None, Some(folder)) => {
                time_to_result::study_run(folder)?.with(&arguments.overrides).map_err(Error::Plan)?
            }
            _ => open(arguments.run_file(), &arguments.overrides)?,
        };
        let fraction = arguments.sparsity.as_deref().filter(|range| !range.contains(".."));
        let fraction = fraction.map(sparsity).transpose()?;
        let plan = resolved(&run, arguments, fraction)?;
        let local = named.map_or_else(|| default_cluster(&plan, arguments), Ok)?;
        let (mut cluster, source) = (local.cluster, local.source);
        if let Some(size) = &arguments.fits {
            cluster.device.memory_gb = gigabytes(size)?;
        }
        if arguments.svg.is_some() && arguments.sweep.is_none() && !arguments.result.is_asked() {
            return Err(conflict("--svg", "plots a sweep or a time to result: add --sweep or --study").into());
        }
        arguments.result.check(arguments)?;
        if let Some(price) = arguments.result.price_per_gpu_hour {
            cluster.price_per_gpu_hour = Some(price);
        }
        let engines = engines::named(arguments)?;
        let engine = engines[0];
        arguments.compare.iter().try_for_each(|kind| compare::check(kind))?;
        let fixed = SearchConstraints::parse(&arguments.layout).map_err(Error::Plan)?;
        note_fp16(&cluster, &plan, &engine);
        let outputs = OutputFiles::open(arguments)?;
        Ok(PlanRequest { arguments, run, plan, cluster, source, engine, engines, fixed, outputs })
    }

    fn answer(&self) -> Result<Value> {
        if self.arguments.result.is_asked() {
            return time_to_result::answer(self);
        }
        match (&self.arguments.fits, &self.arguments.sparsity) {
            (Some(_), _) => self.fits(),
            (None, Some(range)) if range.contains("..") => self.sparsities(range),
            _ if self.engines.len() > 1 => engines::sweep(self),
            _ => self.tables(),
        }
    }

    /// That times are those of another machine, where nobody has named one.
    fn note_cluster(&self) {
        let PlanRequest { arguments, source, .. } = self;
        if arguments.cluster.is_none() && arguments.fits.is_none() && source == ASSUMED {
            print_err!(
                "note: times are those of {source}, two cores that are not this machine's: `espalier bench compute` and \
                 `espalier bench comm` measure these, and `--cluster` names others"
            );
        }
    }

    fn rows(&self) -> usize {
        usize::from(self.arguments.top)
    }

    /// Numbers of devices that were asked for.
    fn devices(&self) -> Result<Vec<usize>> {
        let devices = match &self.arguments.sweep {
            Some(range) => powers(range)?,
            None if self.arguments.gpus.is_empty() => vec![self.cluster.node.devices],
            None => self.arguments.gpus.clone(),
        };
        match devices.iter().find(|number| **number == 0) {
            Some(_) => Err(wrong("--gpus", "at least 1", "0", None).into()),
            None => Ok(devices),
        }
    }

    fn search(&self, plan: &Plan, devices: usize) -> Result<SearchResult> {
        let job = Simulation::new(plan, &self.cluster, self.engine);
        let search = LayoutSearch { job: &job, devices, fixed: &self.fixed, rows: self.rows() };
        Ok(search.run().map_err(Error::Plan)?)
    }

    /// A table for each number of devices, or the best of each.
    fn tables(&self) -> Result<Value> {
        let devices = self.devices()?;
        let mut all = Vec::new();
        let mut best = Vec::new();
        let mut spinner = Spinner::new(devices.len());
        for &number in &devices {
            spinner.next(&format!("searching layouts of {number} devices"));
            let job = Simulation::new(&self.plan, &self.cluster, self.engine);
            // The first is explained by the second, shown or not.
            let rows = self.rows().max(2);
            let search = LayoutSearch { job: &job, devices: number, fixed: &self.fixed, rows };
            let mut found = search.run().map_err(Error::Plan)?;
            let why = found.why(&self.cluster);
            found.ranked.truncate(self.rows());
            let Some(first) = found.ranked.first() else { return Err(self.too_large(number, &found)?) };
            best.push((number, first.clone()));
            let mut value = self.head(number);
            value["candidates"] = found.ranked.iter().map(|one| record(one, &self.plan)).collect();
            if self.arguments.sweep.is_some() {
                all.push(value["candidates"][0].take());
                continue;
            }
            let sparser = self.sparser()?;
            let advice = search.advice(first, sparser.as_ref()).map_err(Error::Plan)?;
            value["advice"] = advice.iter().map(|one| json!({ "change": one.change, "times_faster": one.times_faster, "candidate": record(&one.best, &self.plan) })).collect();
            let ranked = table::ranked(&self.plan, &self.cluster, self.engine.name, number, &found);
            print_out!("{ranked}\n{why}");
            if let Some(note) = self.dense_until() {
                print_out!("{note}");
            }
            output::on_standard_output(table::advice(&advice, first));
            value["why"] = why.into();
            if let Some(unbuilt) = search.context_parallelism(&found) {
                print_out!("{unbuilt}\n");
                value["not_built"] = unbuilt.into();
            }
            if self.arguments.explain_memory {
                print_out!("{}", memory::explained(first, &self.cluster));
            }
            if !self.arguments.compare.is_empty() {
                value["compare"] = compare::compare(self, number)?;
            }
            all.push(value);
        }
        drop(spinner);
        if let Some(output) = &self.outputs.apply {
            let (_, first) = &best[0];
            apply::write(self, first, output)?;
        }
        if let Some(output) = &self.outputs.trace {
            trace::write(self, &best[0].1.candidate, output)?;
        }
        if self.arguments.sweep.is_some() {
            output::on_standard_output(table::curve(&self.plan, &self.cluster, self.engine.name, &best));
            for ((number, _), value) in best.iter().zip(&mut all) {
                value["gpus"] = (*number).into();
            }
            let compared = compare::sweeps(self, &devices)?;
            if !compared.is_empty() {
                output::on_standard_output(format_args!("\n{}", compare::sweep_text(&devices, &compared)));
                for (number, value) in devices.iter().zip(&mut all) {
                    value["compare"] = compare::at(&self.plan, &compared, *number);
                }
            }
            if let Some(output) = &self.outputs.svg {
                let planned = DeviceSweep { name: "planned".into(), points: best };
                let curves = if compared.is_empty() { vec![planned] } else { compared };
                curve::draw(self, &devices, curves, output)?;
            }
        }
        Ok(match all.len() {
            1 if self.arguments.sweep.is_none() => all.remove(0),
            _ => json!({ "cluster": self.cluster.name, "engine": self.engine.name, "sweep": all }),
        })
    }

    fn head(&self, devices: usize) -> Value {
        let mut head = json!({ "cluster": self.cluster.name, "engine": self.engine.name, "gpus": devices });
        if self.plan.pruning.is_some() {
            let peak = StatePeak::planned(&self.plan);
            head["state_peak"] = json!({
                "before": peak.before.predicted,
                "after": peak.after.predicted,
                "pruned_after": peak.pruned_after,
                "scoring": peak.scoring,
            });
        }
        head
    }

    /// That memory is what dense state takes, where pruning comes after the first step.
    fn dense_until(&self) -> Option<String> {
        let pruning = self.plan.pruning.as_ref().filter(|pruning| !pruning.method.at_start())?;
        self.engine.compresses().then(|| {
            let (name, peak) = (pruning.method.name(), state_peak(&StatePeak::planned(&self.plan)));
            format!(
                "{name} prunes after the first step: memory is that of dense state. On one device, {peak}."
            )
        })
    }

    /// Whether pruning makes state smaller: the engine can, and nobody has decided otherwise.
    fn can_compress(&self) -> bool {
        self.engine.compresses() && self.fixed.compressed != Some(false)
    }

    /// The run with ten more points of sparsity, where that is below 1.
    fn sparser(&self) -> Result<Option<Plan>> {
        let more = self.plan.pruning.as_ref().map_or(0.0, |pruning| pruning.sparsity) + 0.1;
        if more >= 1.0 || !self.can_compress() {
            return Ok(None);
        }
        resolved(&self.run, self.arguments, Some(more)).map(Some)
    }

    /// One line: whether it fits.
    fn fits(&self) -> Result<Value> {
        let numbers = if self.arguments.gpus.is_empty() { vec![1] } else { self.arguments.gpus.clone() };
        let mut values = Vec::new();
        for number in numbers {
            let found = self.search(&self.plan, number)?;
            let fits = found.ranked.first().map(|best| (best.candidate, best.memory.total()));
            let shown = fits.or(found.smallest.map(|smallest| (smallest.candidate, smallest.memory)));
            let line = table::fits(&self.plan, &self.cluster, number, fits.is_some(), shown);
            print_out!("{line}");
            let batch = self.plan.batch.samples;
            values.push(json!({
                "fits": fits.is_some(),
                "gpus": number,
                "memory_bytes": shown.map(|(_, memory)| memory),
                "layout": shown.map(|(candidate, _)| LayoutRecord::new(&candidate, batch)),
            }));
        }
        Ok(if values.len() == 1 { values.remove(0) } else { json!({ "sweep": values }) })
    }
}

/// What is planned for where there is nothing else.
const ASSUMED: &str = "this-machine";

/// Where no cluster is named: that of the run file, what was measured here, or cores that are not these.
fn default_cluster(plan: &Plan, arguments: &PlanArguments) -> Result<LocalCluster> {
    if let Some(name) = &plan.device.cluster {
        return LocalCluster::named("device.cluster", name);
    }
    if let Some(measured) = LocalCluster::beside(arguments.run_file())?.into_iter().next() {
        return Ok(measured);
    }
    LocalCluster::named("--cluster", Path::new(ASSUMED))
}

/// The run on one rank, with another sparsity where one is given.
fn resolved(run: &RunTable, arguments: &PlanArguments, sparsity: Option<f64>) -> Result<Plan> {
    let path = arguments.run_file();
    let run_file = resolve(with_sparsity(run, path, sparsity)?, path)?;
    let facts = Dataset::facts_of(&run_file).map_err(Error::Data)?;
    Ok(Plan::new(run_file.single_rank(), facts).map_err(Error::Plan)?)
}

/// The run file at `path` with another sparsity where one is given.
fn with_sparsity(run: &RunTable, path: &Path, sparsity: Option<f64>) -> Result<RunFile> {
    let read = |run: &RunTable| run.read().map_err(|error| in_file(path, error));
    let written = read(run)?;
    Ok(match sparsity {
        None => written,
        Some(0.0) => RunFile { prune: None, ..written },
        Some(fraction) => {
            let mut pruned = run.clone();
            if written.prune.is_none() {
                pruned.set_method("random");
            }
            read(&pruned.with(&[Override::sparsity(fraction)]).map_err(Error::Plan)?)?
        }
    })
}

/// That a device without bf16 is planned by its fp16, which this program does not train in.
fn note_fp16(cluster: &Cluster, plan: &Plan, engine: &EngineProfile) {
    let device = &cluster.device;
    let halves = plan.storage.precision == Precision::Bf16 && device.bf16.is_none() && device.fp16.is_some();
    if halves && engine.is_ours() {
        print_err!(
            "note: {} has no bf16; times are by its fp16, in which espalier does not train",
            device.name
        );
    }
}

fn wrong(field: &str, expected: &str, got: &str, hint: Option<&str>) -> Error {
    let (expected, got, hint) = (expected.into(), format!("\"{got}\""), hint.map(String::from));
    Error::Plan(PlanError::Value { field: field.into(), expected, got, hint })
}

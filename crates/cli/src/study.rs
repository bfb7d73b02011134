//! `espalier study`: many runs as one measurement.

mod branch;
mod gap;
pub mod live;
mod progress;
mod single;
mod smoothness;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;
use clap::Args;
use espalier_plan::config::Override;
use espalier_plan::device::DeviceKind;
use espalier_report::serve;
use espalier_study::{
    Results, Study, StudyKind, StudySummary, TrialRunner, TrialSearch, TrialShard, WorkerPool, page,
};
use espalier_tensor::cuda::Cuda;
use espalier_train::Error;

use crate::device;
use crate::log::LogArguments;
use crate::output::{self, print_err, print_out};
use crate::run_file::{conflict, in_file, read, resolve};
use crate::setting::setting;
use crate::signals::{INTERRUPTED, StopSignal};
use progress::StudyProgressPrinter;

#[derive(Args)]
#[command(after_help = "Examples:
  espalier study studies/w3-small.toml
  espalier study studies/w3-small.toml --dry-run
  espalier study studies/w3-small.toml --serve
  espalier study studies/w3.toml --set search.trials=20 --set cells.batches=[16,64] --out out/w3-few
  espalier study studies/w3.toml --out /shared/w3 --shard 3/16
  espalier study studies/w3.toml --out /shared/w3 --widen --json
  espalier study studies/smoothness.toml
  espalier study studies/gap.toml --set gap.seeds=3
  espalier study studies/branch.toml --json")]
pub struct StudyArguments {
    /// The study file (TOML); docs/study.md lists its fields.
    study_file: PathBuf,
    /// Override a field of the study file, as in `--set search.trials=8`; `--set FIELD=` removes it. Paths
    /// are relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Study folder; an unfinished study there is resumed [default: `out/NAME`].
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run only the I-th of N parts of the trials, as in `2/8`; other processes, on any machine with access
    /// to the folder, run the others.
    #[arg(long, value_name = "I/N", value_parser = parse_shard, help_heading = "Trials")]
    shard: Option<TrialShard>,
    /// Extend a search range if the best trial is near its edge, and search there.
    #[arg(long, conflicts_with = "shard", help_heading = "Trials")]
    widen: bool,
    /// Number of concurrent trials [default: one per core, or 16 on a GPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Trials")]
    workers: Option<u32>,
    /// Serve a live page of the study over HTTP while it runs [default address: 127.0.0.1:8700]. For a study
    /// that was started without it: `espalier report DIR --serve`.
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = serve::ADDRESS,
          conflicts_with = "dry_run")]
    serve: Option<String>,
    /// Print what would run, then exit.
    #[arg(long)]
    dry_run: bool,
    /// Print the summary as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

/// Trials side by side on a GPU, where nobody says how many: small networks leave most of it idle.
const ON_A_GPU: usize = 16;

pub fn study(arguments: &StudyArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let path = &arguments.study_file;
    let kind = StudyKind::of(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    if kind != StudyKind::StepsToResult {
        single::refuse_others(arguments)?;
    }
    match kind {
        StudyKind::StepsToResult => steps_to_result(arguments),
        StudyKind::GeneralisationGap => gap::study(arguments),
        StudyKind::CriticalBatch => branch::study(arguments),
        StudyKind::Smoothness => smoothness::study(arguments),
    }
}

fn steps_to_result(arguments: &StudyArguments) -> Result<ExitCode> {
    let stop = StopSignal::listen()?;
    let path = &arguments.study_file;
    let study = Study::parse(&read(path)?, &arguments.overrides).map_err(|error| in_file(path, error))?;
    let workers = open_workers(arguments, &study)?;
    check_batches(&study, &workers)?;
    let folder = arguments.out.clone().unwrap_or_else(|| Path::new("out").join(&study.name));
    let shard = arguments.shard.unwrap_or(TrialShard::ALL);
    if arguments.dry_run {
        print_out!("{}", table::describe(&study, &workers, shard));
        let results = Results::open(&folder, &study)?;
        return output::answer(arguments.json, || StudySummary::of(&study, &results, Vec::new()));
    }
    let _lock = single::lock_folder(arguments, &folder)?;
    let mut results = Results::open(&folder, &study)?;
    for skipped in results.skipped() {
        print_err!("warning: {skipped}");
    }
    live::begin(arguments, &folder)?;
    print_err!("{}", table::describe(&study, &workers, shard));
    stop.begun.store(true, Ordering::SeqCst);
    let mut progress = StudyProgressPrinter::new();
    let (count, stop) = (workers.count(), &stop.requested);
    let search = TrialSearch { study: &study, runner: &workers, workers: count, stop };
    let mut ended = search.run_trials(&mut results, shard, &mut progress)?;
    if ended && arguments.widen {
        ended = search.widen_ranges(&mut results, &mut progress)?;
    }
    if ended && arguments.shard.is_none() {
        // Repeats are counted, and their time left is guessed, without the trials before.
        progress.finish();
        progress = StudyProgressPrinter::new();
        ended = search.repeat_best(&mut results, &mut progress)?;
    }
    progress.finish();
    results.refresh()?;
    let curves = match study.smoothness.filter(|_| ended) {
        Some(schedule) => smoothness::of_best(&study, &results, &workers, schedule)?,
        None => Vec::new(),
    };
    let measured = curves.iter().map(|curve| curve.trace.measured(curve.sparsity)).collect();
    let mut summary = StudySummary::of(&study, &results, measured);
    summary.report = Some(page::write(&study, &results, &summary, &curves)?);
    table::summarise(&summary);
    output::json(arguments.json, || &summary);
    if !ended {
        print_err!("interrupted: finished trials are saved; the same command resumes the study");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens the data once, and a device for each worker.
fn open_workers(arguments: &StudyArguments, study: &Study) -> Result<WorkerPool> {
    let path = &arguments.study_file;
    let run = resolve(study.common_run().map_err(|error| in_file(path, error))?, path)?;
    let on_gpu = match run.device.kind {
        DeviceKind::Cuda => true,
        DeviceKind::Auto => Cuda::probe().usable(),
        DeviceKind::Cpu => false,
    };
    let usual = if on_gpu { ON_A_GPU } else { std::thread::available_parallelism()?.get() };
    let count = arguments.workers.map_or(usual, |workers| workers as usize);
    let first = device::open(&run.device, 1).map_err(Error::Tensor)?;
    let mut devices = vec![first.clone()];
    while devices.len() < count {
        devices.push(first.another().map_err(Error::Tensor)?);
    }
    Ok(WorkerPool::open(&run, study.goal, &devices)?)
}

/// No batch can have more samples than there are to learn from.
fn check_batches(study: &Study, workers: &WorkerPool) -> Result<()> {
    let (largest, samples) = (study.largest_batch(), workers.training_samples());
    if largest > samples {
        let problem = format!("has {largest}, and there are {samples} training samples");
        return Err(conflict("cells.batches", &problem).into());
    }
    Ok(())
}

/// `2/8`
fn parse_shard(text: &str) -> Result<TrialShard, String> {
    let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
    match numbers {
        Some((index, of)) if (1..=of).contains(&index) => Ok(TrialShard { index, of }),
        _ => Err("expected I/N with I from 1 to N, as in 2/8".into()),
    }
}

//! `espalier train`: from a run file to a trained model in a run folder.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_comm::LaunchedProcess;
use espalier_data::DataSplit;
use espalier_plan::config::{self, Override};
use espalier_plan::device::DeviceKind;
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::parallel::launched::ProcessGroup;
use espalier_train::prune;
use espalier_train::run::{self, Launch, RunDir, RunOutcome, StartPoint};
use espalier_train::{Error, RunSummary, memory_check};
use serde::Serialize;
use tracing::info;

use crate::auto_layout::AutoLayout;
use crate::bench::busy::{MUCH, ProcessorUse};
use crate::layout_picture::LayoutPicture;
use crate::output::{self, print_err, print_out};
use crate::predicted::{PredictedMachine, predict};
use crate::prepared::{PreparedRun, prepare};
use crate::progress::{self, ProgressPrinter};
use crate::run_file::{conflict, in_file, open, replicas};
use crate::setting::setting;
use crate::signals::{INTERRUPTED, StopSignal};
use crate::{device, log, profile, ranks, restart, start};

#[derive(Args)]
#[command(after_help = "Examples:
  espalier train runs/hello.toml
  espalier train runs/hello.toml --set train.steps=50 --set optimizer.name=lamb
  espalier train runs/hello.toml --resume
  espalier train runs/hello.toml --resume --fresh
  espalier train runs/hello.toml --ranks 4
  espalier train runs/pipeline.toml --set parallel.schedule=zb-h1 \\
      --trace trace.json
  espalier train runs/hello.toml --ranks 4 --max-restarts 3 \\
      --set checkpoint.every=100
  espalier train runs/hello.toml --ranks 4 --log debug --log-file hello.log
  mpirun -n 4 espalier train runs/hello.toml
  torchrun --no-python --nproc-per-node 8 espalier train runs/hello.toml \\
      --set device.kind=cuda
  espalier train runs/hello.toml --from out/hello \\
      --set prune.method=magnitude --set prune.sparsity=0.9")]
pub struct TrainArguments {
    /// The run file (TOML); docs/run-file.md lists its fields.
    run_file: PathBuf,
    /// Override a field of the run file, as in `--set train.batch=16`; `--set FIELD=` removes it. Paths are
    /// relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Number of ranks, as threads of this process; sets parallel.data = N / (pipeline x tensor x spatial).
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Run folder [default: a new one under `out/`, named after the run file].
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume from the newest checkpoint of the run folder (without --out: of the newest run of this run file).
    #[arg(long, help_heading = "Resuming")]
    resume: bool,
    /// Allow this field (or section) of the run file to differ when resuming. May be repeated.
    #[arg(long, value_name = "FIELD", requires = "resume", help_heading = "Resuming")]
    allow: Vec<String>,
    /// With --resume: restart from step 0 in the same run folder; old checkpoints and metrics are moved to a
    /// subfolder.
    #[arg(long, requires = "resume", help_heading = "Resuming")]
    fresh: bool,
    /// Initialize weights (and masks) from a checkpoint, a run folder (its newest checkpoint), a Hugging Face
    /// checkpoint or a weights file (docs/models.md). With --resume it is needed only
    /// if that checkpoint was moved: its new path. With --resume --fresh: start from this one instead.
    #[arg(long, value_name = "CHECKPOINT", help_heading = "Resuming")]
    from: Option<PathBuf>,
    /// If the run crashes, restart it from the last good checkpoint, up to N times.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Resuming")]
    max_restarts: usize,
    /// This process is waited for by the one of this number, for --max-restarts.
    #[arg(long, value_name = "PROCESS", hide = true, conflicts_with = "max_restarts")]
    supervised: Option<i32>,
    /// Print the layout, memory and communication of the run, then exit.
    #[arg(long, help_heading = "Diagnostics")]
    dry_run: bool,
    /// Print GPU time by kind of kernel.
    #[arg(long, help_heading = "Diagnostics")]
    profile: bool,
    /// Write a timeline of all ranks for chrome://tracing or Perfetto; for short runs.
    #[arg(long, value_name = "FILE", help_heading = "Diagnostics")]
    trace: Option<PathBuf>,
    /// Print the summary as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: log::LogArguments,
}

pub fn train(arguments: &TrainArguments) -> Result<ExitCode> {
    let launched = LaunchedProcess::from_environment().map_err(Error::Comm)?;
    if arguments.max_restarts > 0 && !arguments.dry_run {
        // Of the processes of a launcher, rank 0 has the folder; the others learn of it from there.
        let is_rank0 = launched.is_none_or(|launched| launched.rank == 0);
        let lock = is_rank0.then(|| run_dir(arguments).lock()).transpose()?;
        let folder = lock.as_ref().map(|lock| lock.folder()).or(arguments.out.as_deref());
        let (first, again) = (arguments.supervised_in(folder, false), arguments.supervised_in(folder, true));
        return restart::supervise(arguments.max_restarts, lock.as_ref(), &first, &again);
    }
    arguments.log.start(launched.as_ref().map(|launched| launched.rank))?;
    match launched {
        None => train_here(arguments, None),
        Some(launched) => ranks::launched(launched.rank, || train_here(arguments, Some(&launched))),
    }
}

fn train_here(arguments: &TrainArguments, launched: Option<&LaunchedProcess>) -> Result<ExitCode> {
    let stop = StopSignal::listen()?;
    if let Some(parent) = arguments.supervised
        && !restart::stop_with_parent(parent)?
    {
        print_err!("the process that was to start this run again has ended: there is nothing to save");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    for field in &arguments.allow {
        config::check_name(field).map_err(Error::Plan)?;
    }
    let path = &arguments.run_file;
    let resumed = (arguments.resume && !arguments.fresh).then(|| run_dir(arguments).find());
    let recorded = match arguments.fresh && arguments.from.is_none() {
        true => StartPoint::read(&run_dir(arguments).find())?,
        false => None,
    };
    let from = arguments.from.as_deref().or(recorded.as_ref().map(StartPoint::path));
    let origin = start::Origin { checkpoint: from, resumed: resumed.as_deref() };
    // As they were given, to be said again where the run is interrupted.
    let mut given = arguments.overrides.clone();
    let mut run = open(path, &arguments.overrides)?;
    origin.complete(&mut run, path)?;
    let newest = resumed.as_deref().and_then(|folder| Checkpoints::of_run(folder).list().ok()?.pop());
    let checkpoint = newest.as_deref();
    let is_auto = run.leaves_layout().map_err(|error| in_file(path, error))?;
    let prepared = if is_auto {
        AutoLayout { run: &run, path, launched, ranks: arguments.ranks, resumed, checkpoint }.prepare()?
    } else {
        if let Some(ranks) = arguments.ranks {
            let data = Override::replicas(replicas(&run, path, ranks)?);
            run = run.with(std::slice::from_ref(&data)).map_err(Error::Plan)?;
            given.push(data);
        }
        prepare(&run, path, launched, checkpoint)?
    };
    let is_rank0 = launched.is_none_or(|launched| launched.rank == 0);
    if arguments.dry_run {
        if is_rank0 {
            dry_run(arguments, &prepared)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.supervised.is_some()
        && prepared.process_group.as_ref().is_some_and(|group| group.device_kind() == DeviceKind::Cpu)
    {
        let problem = "restarts ranks of one process or of NCCL; MPI ranks are restarted by their launcher, with --resume";
        return Err(conflict("--max-restarts", problem).into());
    }
    let device = prepared.open_device()?;
    let PreparedRun { plan, dataset, process_group } = prepared;
    let (ranks, opened) = (plan.mesh.size(), device::describe(&device));
    info!("the plan is resolved: {}, {} ranks, {opened}", plan.model.name, ranks);
    if is_rank0 {
        let transport = process_group.as_ref().map(ProcessGroup::transport);
        print_err!("{}", progress::describe(&plan, &dataset, &device::describe(&device), transport));
        progress::notes(&plan, &dataset);
    }
    memory_check::check(&plan, &device, process_group.as_ref())?;
    // Said now, not once the weights of a large model have been made. A run that goes on has its masks.
    if !arguments.resume {
        let ranks =
            process_group.as_ref().map_or(ranks, |group| group.ranks_per_device(Cuda::probe().gpus.len()));
        let scoring = plan.scoring(prune::memory_per_rank(&device, ranks)).map_err(Error::Plan)?;
        if is_rank0 && let Some(scoring) = scoring.as_ref().and_then(progress::scoring) {
            print_err!("{scoring}");
        }
    }

    let on_gpus = matches!(device, Device::Cuda(_));
    let predicted = is_rank0.then(|| predict(&plan, path, on_gpus, PredictedMachine::Local)).flatten();
    let run_dir = RunDir { predicted, ..run_dir(arguments) };
    // A bar would be drawn between the lines of a log.
    let mut observer =
        if arguments.log.is_on_standard_error() { ProgressPrinter::lines() } else { ProgressPrinter::new() };
    observer.flag_begin(stop.begun);
    if arguments.profile {
        observer.profile(&device);
    }
    let precision = plan.storage.precision;
    let launch =
        Launch { stop: stop.requested, process_group: process_group.as_ref(), abort: Some(ranks::abort) };
    let others = (!on_gpus && process_group.is_none()).then(ProcessorUse::begin).flatten();
    let RunOutcome { summary, interrupted } =
        run::run(plan, dataset, &device, &run_dir, &launch, &mut observer)?;
    if !is_rank0 {
        return Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS });
    }
    observer.finish();
    progress::summarise(&summary);
    let taken = others.and_then(|others| others.of_others()).filter(|taken| *taken >= MUCH);
    // Beside a prediction, of which it is no fault.
    if let Some(fraction) = taken.filter(|_| summary.predicted.is_some()) {
        print_err!("note: other processes used {:.0} % of the CPU meanwhile", 100.0 * fraction);
    }
    if arguments.profile {
        let steps = observer.steps_seen().saturating_sub(profile::WARM_UP);
        profile::report(&device, steps, precision, summary.step_ms)?;
    }
    output::json(arguments.json, || &summary);
    if interrupted {
        let set: String = given.iter().map(|o| format!(" --set '{o}'")).collect();
        print_err!(
            "interrupted and saved; resume with: espalier train {}{set} --out {} --resume",
            path.display(),
            summary.run.as_deref().unwrap_or_default()
        );
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what would run, on a machine that need not have what it would run on, and what would stop it.
fn dry_run(arguments: &TrainArguments, prepared: &PreparedRun) -> Result<()> {
    let PreparedRun { plan, dataset, process_group } = prepared;
    let (kind, device) = prepared.planned_device()?;
    print_out!(
        "{}",
        progress::describe(plan, dataset, &device, process_group.as_ref().map(ProcessGroup::transport))
    );
    progress::notes(plan, dataset);
    run::check(plan, dataset.len(DataSplit::Train), &run_dir(arguments), &mut ProgressPrinter::lines())?;
    // Whoever asks what a run would need may ask it of a smaller machine, or of one without the GPU.
    if kind == "cpu"
        && let Err(error) = memory_check::check(plan, &prepared.open_device()?, process_group.as_ref())
    {
        print_err!("note: {error}");
    }
    let memory = match kind {
        "cuda" => Cuda::probe().gpus.first().map(|gpu| gpu.memory as u64),
        _ => prune::memory_per_rank(&Device::cpu(1).map_err(Error::Tensor)?, plan.mesh.size()),
    };
    let scoring = if arguments.resume { None } else { plan.scoring(memory).map_err(Error::Plan)? };
    if let Some(scoring) = scoring.as_ref().and_then(progress::scoring) {
        print_out!("{scoring}");
    }
    let mut summary = RunSummary::planned(plan, kind);
    summary.scored(scoring);
    summary.predicted = predict(plan, &arguments.run_file, kind == "cuda", PredictedMachine::Planned);
    let picture = LayoutPicture::of(plan)?;
    if let Some(picture) = &picture {
        picture.print();
    }
    progress::summarise(&summary);
    output::json(arguments.json, || DryRunJson { summary: &summary, picture });
    Ok(())
}

impl TrainArguments {
    /// The arguments of a process that is started, and started `again`, to make this run in a folder.
    fn supervised_in(&self, folder: Option<&Path>, again: bool) -> Vec<OsString> {
        let mut command_line: Vec<OsString> = vec!["train".into()];
        let mut option = |name: &str, value: &OsStr| command_line.extend([name.into(), value.to_owned()]);
        option("--supervised", std::process::id().to_string().as_ref());
        if let Some(folder) = folder {
            option("--out", folder.as_os_str());
        }
        for change in &self.overrides {
            option("--set", change.to_string().as_ref());
        }
        for field in &self.allow {
            option("--allow", field.as_ref());
        }
        if let Some(ranks) = self.ranks {
            option("--ranks", ranks.to_string().as_ref());
        }
        if let Some(trace) = &self.trace {
            option("--trace", trace.as_os_str());
        }
        for (name, value) in self.log.options() {
            option(name, value);
        }
        // The run has written down what it started from.
        if let Some(from) = self.from.as_ref().filter(|_| !again) {
            option("--from", from.as_os_str());
        }
        for (name, set) in [
            ("--resume", self.resume || again),
            // What starts over, does so once.
            ("--fresh", self.fresh && !again),
            ("--profile", self.profile),
            ("--json", self.json),
        ] {
            command_line.extend(set.then(|| name.into()));
        }
        // Last, and marked as no option, whatever it is called.
        command_line.extend(["--".into(), self.run_file.clone().into()]);
        command_line
    }
}

/// What `--dry-run` prints as JSON.
#[derive(Serialize)]
struct DryRunJson<'a> {
    #[serde(flatten)]
    summary: &'a RunSummary,
    #[serde(skip_serializing_if = "Option::is_none")]
    picture: Option<LayoutPicture>,
}

/// Where the run lives: in the folder given, or in `out/NAME`, `out/NAME-2`, ...
fn run_dir(arguments: &TrainArguments) -> RunDir {
    let stem = arguments.run_file.file_stem().map_or("run".into(), |stem| stem.to_string_lossy());
    RunDir {
        folder: arguments.out.clone().unwrap_or_else(|| Path::new("out").join(&*stem)),
        numbered: arguments.out.is_none(),
        locked_by_parent: arguments.supervised.is_some(),
        resume: arguments.resume,
        fresh: arguments.fresh,
        allow: arguments.allow.clone(),
        from: arguments.from.clone(),
        trace: arguments.trace.clone(),
        predicted: None,
    }
}

//! `espalier train`: from a run file to a trained model in a run folder.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_comm::Launched;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_data::{Dataset, Split};
use espalier_plan::config::{self, RunFile};
use espalier_plan::device::DeviceKind;
use espalier_plan::{Axis, Plan};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::parallel::launched::Join;
use espalier_train::prune;
use espalier_train::run::{self, Outcome, RunDir, StartPoint, run_launched, run_or_give_up};
use espalier_train::{Error, Summary, hub, room};
use serde::Serialize;
use tracing::info;

use crate::auto::Auto;
use crate::picture::Picture;
use crate::predicted::predict;
use crate::progress::{self, Progress};
use crate::say::{self, answer, say};
use crate::setting::setting;
use crate::signals::{INTERRUPTED, Stop};
use crate::{device, log, profile, ranks, restart, start};

#[derive(Args)]
#[command(after_help = "Examples:
  espalier train runs/hello.toml
  espalier train runs/hello.toml --set train.steps=50 --set optimizer.name=lamb
  espalier train runs/hello.toml --resume
  espalier train runs/hello.toml --resume --fresh
  espalier train runs/hello.toml --ranks 4
  espalier train runs/pipeline.toml --set parallel.schedule=zb-h1 --trace trace.json
  espalier train runs/hello.toml --ranks 4 --max-restarts 3 --set checkpoint.every=100
  espalier train runs/hello.toml --ranks 4 --log debug --log-file hello.log
  mpirun -n 4 espalier train runs/hello.toml
  torchrun --no-python --nproc-per-node 8 espalier train runs/hello.toml --set device.kind=cuda
  espalier train runs/hello.toml --from out/hello --set prune.method=magnitude --set prune.sparsity=0.9")]
pub struct TrainArguments {
    /// The run file (TOML); docs/run-file.md lists its fields.
    run_file: PathBuf,
    /// Override a field of the run file, as in `--set train.batch=16`; `--set FIELD=` leaves it out. Paths are relative to the
    /// current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<String>,
    /// Train on so many ranks, threads of this process: `parallel.data` becomes what they leave beside the other axes.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// The run folder; otherwise a new one below `out/`, named after the run file.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on from the newest checkpoint in the run folder (the newest folder of this name without --out).
    #[arg(long, help_heading = "Resuming")]
    resume: bool,
    /// Go on although this field, or section, of the run file is not what it was and that makes another run. May be repeated.
    #[arg(long, value_name = "FIELD", requires = "resume", help_heading = "Resuming")]
    allow: Vec<String>,
    /// With --resume: start over in the run folder. Its checkpoints and metrics are put aside, in a folder there.
    #[arg(long, requires = "resume", help_heading = "Resuming")]
    fresh: bool,
    /// Start from the weights (and masks) of a checkpoint, or of the newest one of a run folder, of either precision; or from a
    /// folder of Hugging Face's, or a file of weights (docs/models.md). With --resume: where the weights that the run started
    /// from are by now, which must be the same; with --resume --fresh, others that it starts over from.
    #[arg(long, value_name = "CHECKPOINT", help_heading = "Resuming")]
    from: Option<PathBuf>,
    /// Start again from the last good checkpoint, up to so many times, where the run falls over.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Resuming")]
    max_restarts: usize,
    /// This process is waited for by the one of this number, for --max-restarts.
    #[arg(long, value_name = "PROCESS", hide = true, conflicts_with = "max_restarts")]
    supervised: Option<i32>,
    /// Say what would run and what it would need, then stop.
    #[arg(long, help_heading = "Looking closer")]
    dry_run: bool,
    /// Say where the card's time went, by family of kernels.
    #[arg(long, help_heading = "Looking closer")]
    profile: bool,
    /// Write what every rank did when, for chrome://tracing or Perfetto; meant for a few steps.
    #[arg(long, value_name = "FILE", help_heading = "Looking closer")]
    trace: Option<PathBuf>,
    /// Print the summary as one line of JSON, the last of standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: log::LogArguments,
}

/// A run file, resolved, with its data.
pub struct Prepared {
    pub plan: Plan,
    pub dataset: Dataset,
    /// How it becomes one of several ranks, where a launcher has started them.
    pub join: Option<Join>,
}

impl Prepared {
    /// Opens the device that the run computes on.
    pub fn open_device(&self) -> Result<Device> {
        let device = match &self.join {
            Some(join) => device::open_for(join, &self.wish(), self.threads()?),
            None => device::open(&self.wish(), self.threads()?),
        };
        Ok(device.map_err(Error::Tensor)?)
    }

    /// The kind of device that it would be, and that in a few words; nothing is opened.
    pub fn planned_device(&self) -> Result<(&'static str, String)> {
        let kind = self.join.as_ref().map_or(self.wish().kind, Join::device_kind);
        Ok(device::plan(kind, self.threads()?))
    }

    /// The device asked for, as far as it is not left to us.
    fn wish(&self) -> espalier_plan::device::Device {
        let mut wish = self.plan.device.clone();
        // Ranks of one process share its processor: where the choice is ours, that is it.
        if self.plan.mesh.size() > 1 && self.join.is_none() && wish.kind == DeviceKind::Auto {
            wish.kind = DeviceKind::Cpu;
        }
        wish
    }

    /// Threads of the processor.
    fn threads(&self) -> Result<usize> {
        let cores = std::thread::available_parallelism()?.get();
        let all = self.join.as_ref().map_or(cores, |join| join.threads(cores));
        Ok(device::threads(self.plan.device.threads, all)?)
    }
}

/// Reads the text of a run file, as if it stood at `path`, and the data that it names. A run that goes on from a `checkpoint`, or is judged
/// there, has its tokenizer in that folder where the one that it names is gone.
pub fn prepare_text(
    text: &str,
    path: &Path,
    overrides: &[String],
    launched: Option<&Launched>,
    checkpoint: Option<&Path>,
) -> Result<Prepared> {
    let started = launched.map(|launched| launched.size);
    let run_file = RunFile::parse_for(text, overrides, started).map_err(|error| in_file(path, error))?;
    let join = join(&run_file, launched)?;
    let mut run_file = resolve(run_file, path)?;
    if let Some(checkpoint) = checkpoint {
        hub::find_tokenizer(&mut run_file.data, checkpoint);
    }
    let dataset = Dataset::open(&run_file).map_err(Error::Data)?;
    let plan = Plan::new(run_file, dataset.facts()).map_err(Error::Plan)?;
    Ok(Prepared { plan, dataset, join })
}

/// How this process becomes one of the ranks that a launcher has started.
pub fn join(run_file: &RunFile, launched: Option<&Launched>) -> Result<Option<Join>> {
    let of = |launched: &Launched| {
        let gpus = || Cuda::probe().usable();
        Join::new(launched.clone(), run_file.device.kind, gpus, |name| std::env::var(name).ok())
    };
    Ok(launched.map(of).transpose()?)
}

/// A run file with the paths that it means, standing at `path`, and the schedule that it names.
pub fn resolve(mut run_file: RunFile, path: &Path) -> Result<RunFile> {
    let folder = std::path::absolute(path)?;
    run_file.resolve_paths(folder.parent().expect("a file that was read stands in a folder"));
    if let Some(path) = run_file.schedule_file().map(Path::to_owned) {
        let why = |why: io::Error| Error::of_io(&path, &why, format!("the schedule cannot be read: {why}"));
        run_file
            .bring_schedule(&regular_file::read_text(&path, SETTINGS).map_err(why)?)
            .map_err(Error::Plan)?;
    }
    Ok(run_file)
}

/// Runs the command.
pub fn train(arguments: &TrainArguments) -> Result<ExitCode> {
    let launched = Launched::from_environment().map_err(Error::Comm)?;
    if arguments.max_restarts > 0 && !arguments.dry_run {
        // Of the processes of a launcher, rank 0 has the folder; the others learn of it from there.
        let leads = launched.is_none_or(|launched| launched.rank == 0);
        let claim = leads.then(|| place(arguments).claim()).transpose()?;
        let folder = claim.as_ref().map(|claim| claim.folder()).or(arguments.out.as_deref());
        let (first, again) = (arguments.supervised_in(folder, false), arguments.supervised_in(folder, true));
        return restart::supervise(arguments.max_restarts, claim.as_ref(), &first, &again);
    }
    arguments.log.start(launched.as_ref().map(|launched| launched.rank))?;
    match launched {
        None => train_here(arguments, None),
        Some(launched) => ranks::launched(launched.rank, || train_here(arguments, Some(&launched))),
    }
}

fn train_here(arguments: &TrainArguments, launched: Option<&Launched>) -> Result<ExitCode> {
    let stop = Stop::listen()?;
    if let Some(parent) = arguments.supervised
        && !restart::stop_with_parent(parent)?
    {
        say!("the process that was to start this run again has ended: there is nothing to save");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    for field in &arguments.allow {
        config::check_name(field).map_err(Error::Plan)?;
    }
    let path = &arguments.run_file;
    let resumed = (arguments.resume && !arguments.fresh).then(|| place(arguments).find());
    let recorded = match arguments.fresh && arguments.from.is_none() {
        true => StartPoint::read(&place(arguments).find())?,
        false => None,
    };
    let from = arguments.from.as_deref().or(recorded.as_ref().map(StartPoint::path));
    let origin = start::Origin { checkpoint: from, resumed: resumed.as_deref() };
    // As they were given, to be said again where the run is interrupted.
    let mut said = arguments.overrides.clone();
    let (text, mut overrides) = origin.complete(&read(path)?, path, &arguments.overrides)?;
    let newest = resumed.as_deref().and_then(|folder| Checkpoints::of_run(folder).list().ok()?.pop());
    let checkpoint = newest.as_deref();
    let is_auto = RunFile::leaves_layout(&text, &overrides).map_err(|error| in_file(path, error))?;
    let prepared = if is_auto {
        let (text, overrides) = (&text, &overrides);
        Auto { text, path, overrides, launched, ranks: arguments.ranks, resumed, checkpoint }.prepare()?
    } else {
        if let Some(ranks) = arguments.ranks {
            let data = format!("parallel.data={}", replicas(&text, path, &overrides, ranks)?);
            said.push(data.clone());
            overrides.push(data);
        }
        prepare_text(&text, path, &overrides, launched, checkpoint)?
    };
    let leads = launched.is_none_or(|launched| launched.rank == 0);
    if arguments.dry_run {
        if leads {
            dry_run(arguments, &prepared)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.supervised.is_some()
        && prepared.join.as_ref().is_some_and(|join| join.device_kind() == DeviceKind::Cpu)
    {
        let problem = "restarts the ranks of one process, or those that NCCL joins; MPI's are for their launcher to start \
                       again, with --resume";
        return Err(conflict("--max-restarts", problem).into());
    }
    let device = prepared.open_device()?;
    let Prepared { plan, dataset, join } = prepared;
    let (ranks, opened) = (plan.mesh.size(), device::describe(&device));
    info!("the plan is resolved: {}, {} ranks, {opened}", plan.model.name, ranks);
    if leads {
        let transport = join.as_ref().map(Join::transport);
        say!("{}", progress::describe(&plan, &dataset, &device::describe(&device), transport));
        progress::notes(&plan, &dataset);
    }
    room::check(&plan, &device, join.as_ref())?;
    // Said now, not once the weights of a large model have been made. A run that goes on has its masks.
    if !arguments.resume {
        let ranks = join.as_ref().map_or(ranks, |join| join.sharing(Cuda::probe().gpus.len()));
        let scoring = plan.scoring(prune::memory(&device, ranks)).map_err(Error::Plan)?;
        if leads && let Some(scoring) = scoring.as_ref().and_then(progress::scoring) {
            say!("{scoring}");
        }
    }

    let on_cards = matches!(device, Device::Cuda(_));
    let predicted = leads.then(|| predict(&plan, path, on_cards)).flatten();
    let place = RunDir { predicted, ..place(arguments) };
    // A bar would be drawn between the lines of a log.
    let mut observer = if arguments.log.is_on_standard_error() { Progress::lines() } else { Progress::new() };
    observer.flag_begin(stop.begun);
    if arguments.profile {
        observer.profile(&device);
    }
    let precision = plan.storage.precision;
    let Outcome { summary, interrupted } = match &join {
        None => {
            run_or_give_up(Some(ranks::give_up), plan, dataset, &device, &place, &stop.asked, &mut observer)?
        }
        Some(join) => run_launched(join, plan, dataset, &device, &place, &stop.asked, &mut observer)?,
    };
    if !leads {
        return Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS });
    }
    observer.finish();
    progress::summarise(&summary);
    if arguments.profile {
        let steps = observer.steps_seen().saturating_sub(profile::WARM_UP);
        profile::report(&device, steps, precision, summary.step_ms)?;
    }
    print_json(arguments, &summary);
    if interrupted {
        let set: String = said.iter().map(|o| format!(" --set '{o}'")).collect();
        say!(
            "interrupted and saved; go on with: espalier train {}{set} --out {} --resume",
            path.display(),
            summary.run.as_deref().unwrap_or_default()
        );
        return Ok(ExitCode::from(INTERRUPTED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what would run, on a machine that need not have what it would run on, and what would stop it.
fn dry_run(arguments: &TrainArguments, prepared: &Prepared) -> Result<()> {
    let Prepared { plan, dataset, join } = prepared;
    let (kind, device) = prepared.planned_device()?;
    answer!("{}", progress::describe(plan, dataset, &device, join.as_ref().map(Join::transport)));
    progress::notes(plan, dataset);
    run::check(plan, dataset.len(Split::Train), &place(arguments), &mut Progress::lines())?;
    // Whoever asks what a run would need may ask it of a smaller machine, or of one without the card.
    if kind == "cpu"
        && let Err(error) = room::check(plan, &prepared.open_device()?, join.as_ref())
    {
        say!("note: {error}");
    }
    let memory = match kind {
        "cuda" => Cuda::probe().gpus.first().map(|gpu| gpu.memory as u64),
        _ => prune::memory(&Device::cpu(1).map_err(Error::Tensor)?, plan.mesh.size()),
    };
    let scoring = if arguments.resume { None } else { plan.scoring(memory).map_err(Error::Plan)? };
    if let Some(scoring) = scoring.as_ref().and_then(progress::scoring) {
        answer!("{scoring}");
    }
    let mut summary = Summary::planned(plan, kind);
    summary.scored(scoring);
    summary.predicted = predict(plan, &arguments.run_file, kind == "cuda");
    let picture = Picture::of(plan)?;
    if let Some(picture) = &picture {
        picture.say();
    }
    progress::summarise(&summary);
    print_json(arguments, &Planned { summary: &summary, picture });
    Ok(())
}

/// How many replicas of a run file's other axes so many ranks are.
pub fn replicas(text: &str, path: &Path, overrides: &[String], ranks: usize) -> Result<usize> {
    let extents = RunFile::replica(text, overrides).map_err(|error| in_file(path, error))?;
    let used = Axis::ALL.into_iter().filter(|axis| extents[*axis] > 1);
    let each = used.clone().fold(1, |product: usize, axis| product.saturating_mul(extents[axis]));
    if ranks > 0 && !ranks.is_multiple_of(each) {
        let fields: Vec<String> = used.map(|axis| format!("`parallel.{axis}` = {}", extents[axis])).collect();
        let product = if fields.len() == 1 { String::new() } else { format!(", {each} ranks together") };
        let problem = format!(
            "is {ranks}, but {}{product}: it must be a multiple of {}",
            fields.join(" and "),
            if fields.len() == 1 { "that".into() } else { each.to_string() },
        );
        return Err(conflict("--ranks", &problem).into());
    }
    Ok(ranks / each)
}

/// The text of a run file.
pub fn read(path: &Path) -> Result<String> {
    let why = |why: io::Error| Error::of_io(path, &why, format!("the run file cannot be read: {why}"));
    Ok(regular_file::read_text(path, SETTINGS).map_err(why)?)
}

/// The text of the run file in a run folder, which must be as the run wrote it.
pub fn read_run(path: &Path) -> Result<String> {
    let missing = || Error::File { path: path.to_owned(), why: "the run file is not there".into() };
    Ok(run::read_resolved(path)?.ok_or_else(missing)?)
}

/// An error of a run file's text; one that names only a line is told with the file.
pub fn in_file(path: &Path, error: espalier_plan::Error) -> Error {
    match error {
        espalier_plan::Error::Syntax { .. } => Error::File { path: path.to_owned(), why: error.to_string() },
        error => Error::Plan(error),
    }
}

/// An argument that contradicts another, or the run file.
pub fn conflict(field: &str, problem: &str) -> Error {
    Error::Plan(espalier_plan::Error::Conflict { field: field.into(), problem: problem.into() })
}

impl TrainArguments {
    /// The arguments of a process that is started, and started `again`, to make this run in a folder.
    fn supervised_in(&self, folder: Option<&Path>, again: bool) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["train".into()];
        let mut option = |name: &str, value: &OsStr| words.extend([name.into(), value.to_owned()]);
        option("--supervised", std::process::id().to_string().as_ref());
        if let Some(folder) = folder {
            option("--out", folder.as_os_str());
        }
        for change in &self.overrides {
            option("--set", change.as_ref());
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
            words.extend(set.then(|| name.into()));
        }
        // Last, and marked as no option, whatever it is called.
        words.extend(["--".into(), self.run_file.clone().into()]);
        words
    }
}

/// What `--dry-run` prints as JSON.
#[derive(Serialize)]
struct Planned<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    picture: Option<Picture>,
}

fn print_json(arguments: &TrainArguments, summary: &impl Serialize) {
    if arguments.json {
        say::json(&serde_json::to_string(summary).expect("a summary is plain data"));
    }
}

/// Where the run lives: in the folder given, or in `out/NAME`, `out/NAME-2`, ...
fn place(arguments: &TrainArguments) -> RunDir {
    let stem = arguments.run_file.file_stem().map_or("run".into(), |stem| stem.to_string_lossy());
    RunDir {
        folder: arguments.out.clone().unwrap_or_else(|| Path::new("out").join(&*stem)),
        numbered: arguments.out.is_none(),
        claimed: arguments.supervised.is_some(),
        resume: arguments.resume,
        fresh: arguments.fresh,
        allow: arguments.allow.clone(),
        from: arguments.from.clone(),
        trace: arguments.trace.clone(),
        predicted: None,
    }
}

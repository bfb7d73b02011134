//! What several tests use: runs of a run file with settings beside it, on any number of ranks.

mod assertions;
mod models;
mod observer;
mod saved;

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use espalier_data::Dataset;
use espalier_nn::layers::{GradientElements, GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_plan::config::{Override, RunFile};
use espalier_plan::data::DatasetSource;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::{Device, Tensor};
use espalier_train::infer::{Generator, Sampler, Sampling};
use espalier_train::parallel::on_threads;
use espalier_train::run::{Launch, Observer, RunDir, RunOutcome, run};
use espalier_train::trained::{EvalResult, EvalWindows, TrainedModel, on_ranks};
use espalier_train::trainer::{StepReport, Trainer};
use espalier_train::{Error, Result, RunSummary};

pub use self::assertions::*;
pub use self::models::*;
pub use self::observer::RecordingObserver;
pub use self::saved::*;

/// A run file with settings beside it.
#[derive(Clone)]
pub struct Base {
    text: Arc<str>,
    line: String,
}

impl Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl Base {
    /// More settings.
    pub fn set(&self, line: impl Display) -> Base {
        Base { text: self.text.clone(), line: format!("{} {line}", self.line) }
    }

    /// The same for so many steps,
    pub fn steps(&self, steps: impl Display) -> Base {
        self.set(format!("train.steps={steps}"))
    }

    /// or on so many replicas.
    pub fn replicas(&self, ranks: usize) -> Base {
        self.set(format!("parallel.data={ranks}"))
    }

    /// Fresh weights on a single rank.
    pub fn trainer(&self, threads: usize) -> Trainer {
        let (plan, dataset, device) = prepare(self, threads);
        Trainer::new(plan, dataset, &device).unwrap()
    }

    /// What a run of it comes to. Nobody could go on with it: at its end it saves nothing but in the long form.
    pub fn run(&self) -> RunSummary {
        self.set(format!("checkpoint.last={}", espalier_testing::long()))
            .run_in(tempfile::tempdir().unwrap().path())
    }

    /// The same in a folder; a run that is there goes on.
    pub fn run_in(&self, folder: &Path) -> RunSummary {
        let resume = folder.join("run.toml").exists();
        self.run_at(&RunDir { resume, ..RunDir::at(folder) }, &mut ()).unwrap().summary
    }

    /// How a run of it ends, and what its observer was called with.
    pub fn run_observed(&self) -> (Result<RunSummary>, RecordingObserver<'static>) {
        self.run_observed_at(&RunDir::at(tempfile::tempdir().unwrap().path()))
    }

    /// The same of a run as it is asked for.
    pub fn run_observed_at(&self, run_dir: &RunDir) -> (Result<RunSummary>, RecordingObserver<'static>) {
        let mut observer = RecordingObserver::default();
        let ended = self.run_at(run_dir, &mut observer);
        (ended.map(|outcome| outcome.summary), observer)
    }

    /// What an observer was called with by a run that goes on.
    pub fn resume_observed(&self, folder: &Path) -> (RunSummary, RecordingObserver<'static>) {
        let (ended, observer) = self.run_observed_at(&resumed(folder));
        (ended.unwrap(), observer)
    }

    /// How a run ends that is asked to stop after a step.
    pub fn run_stopped_after(&self, step: u64, run_dir: &RunDir) -> (RunOutcome, RecordingObserver<'static>) {
        let stop = Arc::<AtomicBool>::default();
        let asked = stop.clone();
        let mut observer = RecordingObserver::then(step, move || asked.store(true, Ordering::Relaxed));
        (self.run_until(&stop, run_dir, &mut observer).unwrap(), observer)
    }

    /// The hash of the weights that a run ends with,
    pub fn run_to_hash(&self, run_dir: &RunDir) -> String {
        hash(self.run_at(run_dir, &mut ()).unwrap().summary)
    }

    /// or why it fails.
    pub fn fails(&self, run_dir: &RunDir) -> Error {
        self.run_at(run_dir, &mut ()).unwrap_err()
    }

    /// A run as it is asked for, while somebody listens.
    pub fn run_at(&self, run_dir: &RunDir, observer: &mut (dyn Observer + Send)) -> Result<RunOutcome> {
        self.run_until(&Arc::default(), run_dir, observer)
    }

    /// The same, until it is to stop.
    pub fn run_until(
        &self,
        stop: &Arc<AtomicBool>,
        run_dir: &RunDir,
        observer: &mut (dyn Observer + Send),
    ) -> Result<RunOutcome> {
        let (plan, dataset, device) = prepare(self, 2);
        run(plan, dataset, &device, run_dir, &Launch { stop: stop.clone(), ..Launch::default() }, observer)
    }
}

/// Goes on with the run of a folder.
pub fn resumed(folder: &Path) -> RunDir {
    RunDir { resume: true, ..RunDir::at(folder) }
}

/// Opens what was trained.
pub fn open(path: &Path) -> TrainedModel {
    TrainedModel::open(path, |broken| panic!("{broken}")).unwrap()
}

/// How long a rank waits for another that generates with it.
pub const LIMIT: Duration = Duration::from_secs(60);

/// What a trained model does on the ranks of a layout.
pub fn generating<R: Send>(
    trained: &TrainedModel,
    set: &str,
    work: impl Fn(&mut Generator<'_>) -> Result<R> + Sync,
) -> R {
    let plan = trained.plan(&settings(set)).unwrap();
    on_ranks(trained, &plan, &Device::cpu(2).unwrap(), LIMIT, None, work).unwrap()
}

/// What a trained model scores under some settings: on a file, or on what its run held out.
pub fn scored(
    trained: &TrainedModel,
    path: Option<&Path>,
    set: &str,
    windows: EvalWindows,
) -> Result<EvalResult> {
    let overrides = settings(set);
    let dataset = trained.eval_dataset(path, &overrides)?;
    let plan = trained.plan_for(&dataset, &overrides)?;
    trained.evaluate(plan, dataset, windows, &Device::cpu(2)?, None)
}

/// The hash of a run's weights at its end.
pub fn hash(summary: RunSummary) -> String {
    summary.weights_hash.expect("a finished run has a hash")
}

/// A run file of its own.
pub fn base(text: &str) -> Base {
    Base { text: text.into(), line: String::new() }
}

/// The settings of a line, with spaces between them; those within brackets belong to a setting.
pub fn settings(line: impl Display) -> Vec<Override> {
    let mut depth = 0;
    let is_between = |c: char| {
        depth += i32::from("[{".contains(c)) - i32::from("]}".contains(c));
        depth == 0 && c.is_whitespace()
    };
    line.to_string().split(is_between).filter(|text| !text.is_empty()).map(Override::from).collect()
}

/// With nine weights of ten gone, and state of the others alone.
pub fn pruned(base: &Base) -> Base {
    base.set("prune.method=magnitude prune.sparsity=0.9 prune.state=compressed")
}

/// Dense, and with nine weights of ten gone.
pub fn dense_and_pruned(base: &Base) -> [Base; 2] {
    [base.clone(), pruned(base)]
}

/// Why a run file cannot be run on its data.
pub fn refused(base: &Base) -> String {
    let run_file = match RunFile::parse(&base.text, &settings(base)) {
        Ok(run_file) => run_file,
        Err(error) => return error.to_string(),
    };
    let facts = Dataset::facts_of(&run_file).unwrap();
    Plan::new(run_file, facts).unwrap_err().to_string()
}

/// The plan of a run file, without its data.
pub fn planned(base: &Base) -> Plan {
    let run_file = RunFile::parse(&base.text, &settings(base)).unwrap();
    let facts = Dataset::facts_of(&run_file).unwrap();
    Plan::new(run_file, facts).unwrap()
}

/// The data of a run file. Synthetic images, which take longer to draw than to learn, are drawn once; a GPU
/// keeps images with their dataset, so there each run has its own.
fn dataset(run_file: &RunFile) -> Arc<Dataset> {
    static DRAWN: Mutex<BTreeMap<String, Arc<Dataset>>> = Mutex::new(BTreeMap::new());
    static NO_GPU: LazyLock<bool> = LazyLock::new(|| !Cuda::probe().usable());
    let open = || Arc::new(Dataset::open(run_file).unwrap());
    if !matches!(run_file.data.source, DatasetSource::Shapes { .. }) || !*NO_GPU {
        return open();
    }
    let key = format!("{} {:?}", run_file.seed, run_file.data);
    DRAWN.lock().unwrap().entry(key).or_insert_with(open).clone()
}

/// Everything that a run needs, from a run file.
pub fn prepare(base: &Base, threads: usize) -> (Plan, Arc<Dataset>, Device) {
    let run_file = RunFile::parse(&base.text, &settings(base)).unwrap();
    let dataset = dataset(&run_file);
    let plan = Plan::new(run_file, dataset.facts()).unwrap();
    (plan, dataset, Device::cpu(threads).unwrap())
}

/// What the trainers of all ranks that a run file asks for show, as threads of this process.
pub fn on_every_rank<T: Send>(base: &Base, show: impl Fn(Trainer) -> Result<T> + Sync) -> Vec<T> {
    try_on_every_rank(base, show).unwrap()
}

/// The same where they may fail.
pub fn try_on_every_rank<T: Send>(base: &Base, show: impl Fn(Trainer) -> Result<T> + Sync) -> Result<Vec<T>> {
    let (plan, dataset, device) = prepare(base, 2);
    if plan.mesh.size() == 1 {
        return Ok(vec![show(Trainer::new(plan, dataset, &device)?)?]);
    }
    on_threads(&plan.mesh, &device, |ranks, device| {
        show(Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?)
    })
}

/// Takes so many steps.
pub fn take(trainer: &mut Trainer, steps: usize) -> Result<Vec<StepReport>> {
    (0..steps).map(|_| trainer.step()).collect()
}

/// The losses of so many steps.
pub fn losses(trainer: &mut Trainer, steps: usize) -> Result<Vec<f64>> {
    (0..steps).map(|_| Ok(trainer.step()?.loss)).collect()
}

/// What each rank's model writes after a step.
pub fn written(base: &Base) -> Vec<Vec<u32>> {
    on_every_rank(base, |mut trainer| {
        trainer.step()?;
        let mut sampler = Sampler::new(Sampling { seed: 3, ..Sampling::GREEDY });
        let mut generator = trainer.generator()?;
        Ok(generator.generate(&[1, 2, 3], 12, &mut sampler, &mut |_| true)?.tokens)
    })
}

/// Dense gradients, added up as they come.
#[derive(Default)]
pub struct Collected(pub HashMap<ParameterId, Tensor>);

impl GradientSink for Collected {
    fn accept(&mut self, ids: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        for (id, gradient) in ids.iter().zip(gradients.make(GradientElements::All)?) {
            match self.0.get_mut(id) {
                Some(sum) => add_into(sum, &gradient)?,
                None => drop(self.0.insert(*id, gradient)),
            }
        }
        Ok(())
    }
}

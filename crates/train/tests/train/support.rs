//! What several tests use.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use espalier_data::Dataset;
use espalier_nn::layers::{GradientElements, GradientSink, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_plan::config::{Override, RunFile};
use espalier_plan::data::DatasetSource;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::{Category, Device, Tensor};
use espalier_train::checkpoint::Checkpoints;
use espalier_train::infer::{Sampler, Sampling};
use espalier_train::parallel::on_threads;
use espalier_train::prune::PruneReport;
use espalier_train::run::{Launch, Observer, RunDir, RunOutcome, run};
use espalier_train::trained::TrainedModel;
use espalier_train::trainer::{Evaluation, StepReport, Trainer};
use espalier_train::{Error, Result, RunSummary, Throughput};
use tempfile::TempDir;

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

    /// What a run of it comes to.
    pub fn run(&self) -> RunSummary {
        self.run_in(tempfile::tempdir().unwrap().path())
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

/// A model on generated text.
fn on_text(model: &str, decay_steps: usize, line: impl Display) -> Base {
    const TASK: &str = r#"
        [data]
        kind = "arithmetic"
        count = 400
        [train]
        batch = 4
        eval_samples = 4
        [learning_rate]
        peak = 1e-2
        schedule = "cosine"
        warmup = 1
    "#;
    base(&format!("seed = 4\n[model]{model}{TASK}decay_steps = {decay_steps}")).set(line)
}

/// A GPT of a few thousand parameters on generated text.
pub fn tiny_gpt(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "gpt"
        layers = 2
        heads = 2
        width = 16
        context = 24
    "#;
    on_text(MODEL, 8, line)
}

/// Two layers of the Llama family with all that its members have: rotary positions that are scaled, grouped
/// keys, a head size apart from the width, biases, norms of queries and keys.
pub fn rotary_llama(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "llama"
        layers = 2
        heads = 4
        kv_heads = 2
        head_dim = 6
        width = 16
        inner = 20
        context = 24
        qkv_bias = true
        qk_norm = true
        rotary_base = 100.0
        rotary_scaling = "llama3"
        rotary_original = 16
    "#;
    on_text(MODEL, 40, line)
}

/// Two layers as Llama has them (RMS norm, separate queries, keys and values, grouped queries, SwiGLU, no
/// biases), written layer by layer; docs/run-file.md has the same at another width.
pub fn tiny_llama(line: impl Display) -> Base {
    const MODEL: &str = r#"
        name = "custom"
        context = 24
        layers = [
            { type = "embedding", width = 16 },
            { type = "position" },
            { type = "residual", branch = [
                { type = "rms_norm", eps = 1e-6 },
                { type = "branches", join = "concat", branches = [
                    [{ type = "linear", output = 16, bias = false }],
                    [{ type = "linear", output = 8, bias = false }],
                    [{ type = "linear", output = 8, bias = false }],
                ] },
                { type = "attention", heads = 4, kv_heads = 2 },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "rms_norm", eps = 1e-6 },
                { type = "branches", join = "product", branches = [
                    [{ type = "linear", output = 44, bias = false }, { type = "silu" }],
                    [{ type = "linear", output = 44, bias = false }],
                ] },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "layer_norm", bias = false },
                { type = "linear", output = 24, bias = false },
                { type = "attention", heads = 4, kv_heads = 1 },
                { type = "linear", output = 16, bias = false },
            ] },
            { type = "residual", branch = [
                { type = "rms_norm" },
                { type = "branches", join = "product", branches = [
                    [{ type = "linear", output = 44 }, { type = "gelu" }],
                    [{ type = "linear", output = 44 }],
                ] },
                { type = "linear", output = 16 },
            ] },
            { type = "rms_norm" },
            { type = "linear", bias = false },
        ]
    "#;
    on_text(MODEL, 40, line)
}

/// A convolutional network with batch norm and a residual branch on synthetic shapes.
pub fn tiny_cnn(line: impl Display) -> Base {
    const TEXT: &str = r#"
        seed = 4
        [model]
        name = "custom"
        layers = [
            { type = "conv", output = 8, kernel = 3, padding = 1, bias = false },
            { type = "batch_norm" },
            { type = "relu" },
            { type = "max_pool", kernel = 2 },
            { type = "residual", branch = [{ type = "conv", output = 8, kernel = 3, padding = 1 }, { type = "relu" }] },
            { type = "global_avg_pool" },
            { type = "linear", output = 10 },
        ]
        [data]
        kind = "shapes"
        count = 200
        size = 16
        [train]
        batch = 8
        eval_samples = 8
        [optimizer]
        name = "momentum"
        [learning_rate]
        peak = 0.02
        schedule = "constant"
    "#;
    base(TEXT).set(line)
}

/// A few synthetic shapes of 32 x 32, for a model to be named.
pub fn images() -> Base {
    base("[data]\nkind = \"shapes\"\ncount = 16\n[train]\nbatch = 4")
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

/// The most bytes of some categories that each rank has in so many steps: measured, and as the plan says.
pub fn peaks<const N: usize>(base: &Base, steps: usize, of: [Category; N]) -> [Vec<[u64; N]>; 2] {
    let plan = planned(base);
    let measured = on_every_rank(base, |mut trainer| {
        take(&mut trainer, steps)?;
        let device = trainer.device().clone();
        drop(trainer);
        // Of several ranks, another may still have a message.
        assert!(plan.mesh.size() > 1 || device.ledger().total() == 0, "something is left");
        Ok(of.map(|category| device.ledger().peak(category) as u64))
    });
    let predicted = |rank| {
        let memory = serde_json::to_value(plan.rank(rank).unwrap().memory).unwrap();
        of.map(|category| memory[category.name()].as_u64().expect("it is predicted"))
    };
    let predicted = (0..measured.len()).map(predicted).collect();
    [measured, predicted]
}

/// Both are the same on every rank.
#[track_caller]
pub fn assert_peaks<const N: usize>(base: &Base, steps: usize, of: [Category; N]) {
    let [measured, predicted] = peaks(base, steps, of);
    assert_eq!(measured, predicted, "{base}: {of:?} of every rank");
}

/// A run has measured what the plan says of some categories.
pub fn assert_predicted(of: &RunSummary, categories: &[&str], what: impl Display) {
    for category in categories {
        let bytes = of.memory[*category];
        assert_eq!(bytes.predicted, bytes.measured.map(|b| b as u64), "{what}: {category}");
    }
}

/// A run that goes on from its middle ends as it did without a stop.
#[track_caller]
pub fn assert_goes_on(base: &Base, [middle, steps]: [u64; 2]) {
    let base = base.steps(steps).set(format!("checkpoint.every={middle} checkpoint.keep=2"));
    let folder = tempfile::tempdir().unwrap();
    let expected = hash(base.run_in(folder.path()));
    fs::remove_dir_all(folder.path().join(format!("checkpoints/step-{steps:06}"))).unwrap();
    let (again, observer) = base.resume_observed(folder.path());
    assert_eq!((hash(again), observer.resumed_after), (expected, Some(middle)), "{base}");
}

/// Opens the newest checkpoints of a folder for a run file's model.
pub fn checkpoints(base: &Base, folder: &Path) -> Checkpoints {
    let plan = planned(base);
    Checkpoints::new(folder, 1, &plan.model.name, plan.storage.precision.name())
}

/// An observer that records what it is called with.
#[derive(Default)]
pub struct RecordingObserver<'a> {
    /// The steps done, as `started` was called.
    pub resumed_after: Option<u64>,
    /// All warnings,
    pub warnings: Vec<String>,
    /// and all notes.
    pub notes: Vec<String>,
    /// Of every step.
    pub losses: Vec<f64>,
    /// Losses of held-out data, each with its step.
    pub evaluations: Vec<(u64, f64)>,
    /// Step, prompt and text of every sample.
    pub samples: Vec<(u64, String, String)>,
    /// When something was pruned, what is kept, and of how many.
    pub prunings: Vec<(u64, u64, u64)>,
    /// What is done after each step.
    then: Option<Box<dyn Fn(u64) + Send + 'a>>,
}

impl<'a> RecordingObserver<'a> {
    /// One that does something after each step,
    pub fn each(then: impl Fn(u64) + Send + 'a) -> RecordingObserver<'a> {
        RecordingObserver { then: Some(Box::new(then)), ..RecordingObserver::default() }
    }

    /// or after one of them.
    pub fn then(step: u64, then: impl Fn() + Send + 'a) -> RecordingObserver<'a> {
        RecordingObserver::each(move |now| {
            if now == step {
                then()
            }
        })
    }
}

impl Observer for RecordingObserver<'_> {
    fn started(&mut self, done: u64, _: u64) {
        self.resumed_after = Some(done);
    }

    fn step(&mut self, report: &StepReport, _: Throughput, _: usize) {
        self.losses.push(report.loss);
        if let Some(then) = &self.then {
            then(report.step);
        }
    }

    fn evaluated(&mut self, step: u64, evaluation: Evaluation) {
        self.evaluations.push((step, evaluation.loss));
    }

    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        self.samples.push((step, prompt.into(), text.into()));
    }

    fn pruned(&mut self, step: u64, report: &PruneReport) {
        self.prunings.push((step, report.kept, report.of));
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }

    fn warning(&mut self, text: &str) {
        self.warnings.push(text.into());
    }
}

/// A model on one rank after some steps, saved.
pub fn saved(base: &Base, steps: usize) -> TempDir {
    let (folder, mut trainer) = (tempfile::tempdir().unwrap(), base.trainer(2));
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
    trainer.save(&checkpoints(base, folder.path())).unwrap();
    folder
}

/// A checkpoint as it comes through layouts, each of which loads what the one before saved.
pub fn passed_on(from: &Path, layouts: impl IntoIterator<Item = Base>) -> TempDir {
    let mut last: Option<TempDir> = None;
    for layout in layouts {
        let to = tempfile::tempdir().unwrap();
        save_again(&layout, last.as_ref().map_or(from, TempDir::path), to.path());
        last = Some(to);
    }
    last.expect("a layout")
}

/// Names of what is in a folder, in order.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files of a folder.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |name: String| {
        let bytes = fs::read(folder.join(&name)).unwrap();
        (name, bytes)
    };
    names(folder).into_iter().map(file).collect()
}

/// What the only checkpoint of a folder holds.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    contents(&folder.join(names(folder).first().expect("a checkpoint")))
}

/// Loads the newest checkpoint of a folder as one layout, and saves it elsewhere.
pub fn save_again(base: &Base, from: &Path, to: &Path) {
    let [from, to] = [from, to].map(|folder| checkpoints(base, folder));
    on_every_rank(base, |mut trainer| {
        trainer.load(&from, |broken| panic!("{broken}"))?.expect("a checkpoint is there");
        trainer.save(&to)
    });
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

//! Small pieces that several tests use.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use espalier_data::Dataset;
use espalier_nn::layers::{GradientSink, Wanted, WeightGradients};
use espalier_nn::weights::ParameterId;
use espalier_plan::Plan;
use espalier_plan::config::{Override, RunFile};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::{Device, Tensor};
use espalier_train::Result;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::parallel::on_threads;
use espalier_train::run::Observer;
use espalier_train::trainer::Trainer;

/// A run file with overrides.
#[derive(Clone)]
pub struct Base {
    text: &'static str,
    overrides: Vec<Override>,
}

impl Base {
    /// One more override.
    pub fn set(&self, change: impl ToString) -> Base {
        let mut base = self.clone();
        base.overrides.push(change.to_string().into());
        base
    }
}

/// A run file of its own.
pub fn base(text: &'static str, overrides: &[&str]) -> Base {
    Base { text, overrides: overrides.iter().map(|&text| text.into()).collect() }
}

/// A GPT of a few thousand parameters on generated text.
pub fn tiny_gpt(overrides: &[&str]) -> Base {
    const TEXT: &str = r#"
        seed = 4
        [model]
        name = "gpt"
        layers = 2
        heads = 2
        width = 16
        context = 24
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
        decay_steps = 8
    "#;
    base(TEXT, overrides)
}

/// Two layers as Llama has them (RMS norm, separate queries, keys and values, grouped queries, SwiGLU, no biases), written layer by
/// layer; docs/run-file.md has the same at another width.
pub fn tiny_llama(overrides: &[&str]) -> Base {
    const TEXT: &str = r#"
        seed = 4
        [model]
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
        decay_steps = 40
    "#;
    base(TEXT, overrides)
}

/// A convolutional network with batch norm and a residual branch on drawn shapes.
pub fn tiny_cnn(overrides: &[&str]) -> Base {
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
    base(TEXT, overrides)
}

/// A few drawn shapes of 32 x 32, for a model to be named.
pub fn images() -> Base {
    base("[data]\nkind = \"shapes\"\ncount = 16\n[train]\nbatch = 4", &[])
}

/// Why a run file cannot be run on its data.
pub fn refused(base: &Base) -> String {
    let run_file = match RunFile::parse(base.text, &base.overrides) {
        Ok(run_file) => run_file,
        Err(error) => return error.to_string(),
    };
    let facts = Dataset::open(&run_file).unwrap().facts();
    Plan::new(run_file, facts).unwrap_err().to_string()
}

/// Everything that a run needs, from a run file.
pub fn prepare(base: &Base, threads: usize) -> (Plan, Dataset, Device) {
    let run_file = RunFile::parse(base.text, &base.overrides).unwrap();
    let dataset = Dataset::open(&run_file).unwrap();
    let plan = Plan::new(run_file, dataset.facts()).unwrap();
    (plan, dataset, Device::cpu(threads).unwrap())
}

/// What the trainers of all ranks that a run file asks for show, as threads of this process.
pub fn on_every_rank<T: Send>(base: &Base, show: impl Fn(Trainer) -> Result<T> + Sync) -> Vec<T> {
    let (plan, dataset, device) = prepare(base, 2);
    let mesh = plan.mesh;
    if mesh.size() == 1 {
        return vec![show(Trainer::new(plan, dataset, &device).unwrap()).unwrap()];
    }
    let dataset = Arc::new(dataset);
    let all = on_threads(&mesh, &device, |ranks, device| {
        show(Trainer::among(plan.clone(), dataset.clone(), device, ranks)?)
    });
    all.unwrap()
}

/// An observer that remembers.
#[derive(Default)]
pub struct Heard {
    /// What `started` was told.
    pub resumed_after: Option<u64>,
    /// All warnings.
    pub warnings: Vec<String>,
}

impl Observer for Heard {
    fn started(&mut self, done: u64, _: u64) {
        self.resumed_after = Some(done);
    }

    fn warning(&mut self, text: &str) {
        self.warnings.push(text.into());
    }
}

/// Loads the newest checkpoint of a folder as one layout, and saves it elsewhere.
pub fn save_again(base: &Base, from: &Path, to: &Path) {
    let (plan, dataset, device) = prepare(base, 2);
    let (mesh, dataset) = (plan.mesh, Arc::new(dataset));
    let at = |folder: &Path| Checkpoints::new(folder, 1, &plan.model.name, plan.storage.precision.name());
    on_threads(&mesh, &device, |ranks, device| {
        let mut trainer = Trainer::among(plan.clone(), dataset.clone(), device, ranks)?;
        trainer.load(&at(from), |broken| panic!("{broken}"))?.expect("a checkpoint is there");
        trainer.save(&at(to))
    })
    .unwrap();
}

/// Dense gradients, added up as they come.
#[derive(Default)]
pub struct Collected(pub HashMap<ParameterId, Tensor>);

impl GradientSink for Collected {
    fn accept(&mut self, ids: &[ParameterId], gradients: WeightGradients) -> espalier_nn::Result<()> {
        for (id, gradient) in ids.iter().zip(gradients.make(Wanted::All)?) {
            match self.0.get_mut(id) {
                Some(sum) => add_into(sum, &gradient)?,
                None => drop(self.0.insert(*id, gradient)),
            }
        }
        Ok(())
    }
}

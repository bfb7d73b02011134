//! What all trials of a study share: a run file, and its data, opened once.
//!
//! A trial is the run of that file with a batch size, a sparsity, a seed and some fields of its own. The data
//! are those of the file's own seed, whatever the trial's: with another seed a trial starts from other
//! weights, meets the samples in another order and so is pruned otherwise, and is evaluated on the same
//! samples.

use std::sync::Arc;

use espalier_data::{DataSplit, Dataset};
use espalier_plan::config::RunTable;
use espalier_plan::pruning::PruneMethod;
use espalier_plan::spec::Input;
use espalier_plan::{Error, Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::Result;
use espalier_train::shared_scores::{ScoresOfRun, SharedScores};

/// Samples that run at a time, unless the run file says how many: on a processor so few that what a layer
/// makes of them stays in the second-level cache (simple-cnn's first layer makes 74 KB of each image).
const CPU_BATCH: usize = 16;

/// The same on a GPU, which is waited for after each of them.
const GPU_BATCH: usize = 1000;

/// A run file and its data on a device. Clones share the data; they and their trials may be on different
/// threads.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The resolved file, which trials put their settings into.
    run: Arc<RunTable>,
    dataset: Arc<Dataset>,
    device: Device,
    goal: Option<f64>,
    /// What trials with the same seed are pruned by.
    scores: Arc<SharedScores>,
}

/// What tells a trial from the others.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialSettings {
    /// `train.batch`
    pub batch: usize,
    /// `prune.sparsity`; at 0 the file's `[prune]` is left out.
    pub sparsity: f64,
    /// `seed`
    pub seed: u64,
    /// Other fields of the run file by their full names, as in `learning_rate.peak`. An integer is
    /// written as one.
    pub fields: Vec<(String, f64)>,
}

/// Whether a field of the run file says how a network is pruned.
pub(crate) fn of_pruning(field: &str) -> bool {
    field.starts_with("prune.")
}

impl Workload {
    /// Opens the data of a run file; where the device is a GPU they are kept there. An error where nothing of
    /// it is held out, since trials are evaluated on that.
    pub fn open(run: &RunFile, device: &Device) -> Result<Workload> {
        let dataset = Dataset::open(run)?;
        if dataset.is_empty(DataSplit::Validation) {
            let problem = "leaves no validation split, which trials are evaluated on".into();
            return Err(Error::Conflict { field: "data.validation".into(), problem }.into());
        }
        dataset.keep_on(device)?;
        Ok(Workload {
            run: Arc::new(RunTable::of(run)?),
            dataset: Arc::new(dataset),
            device: device.clone(),
            goal: None,
            scores: Arc::default(),
        })
    }

    /// The same data for trials on another device: each thread that runs trials beside others has one of its
    /// own, as [`Device::another`] makes them.
    pub fn on_device(&self, device: &Device) -> Workload {
        Workload { device: device.clone(), ..self.clone() }
    }

    /// The same for trials of which one only asks whether their error is at most `goal`. A check that has
    /// seen more wrong predictions than that allows leaves the other samples out: its error is of those seen,
    /// and above the goal too.
    pub fn with_goal(&self, goal: f64) -> Workload {
        Workload { goal: Some(goal), ..self.clone() }
    }

    /// What a trial with these settings does: `plan.record().to_toml()` is its run file. How many samples run
    /// at a time is chosen for the device where the file leaves it open; that changes no more than rounding.
    pub fn plan(&self, settings: &TrialSettings) -> Result<Plan> {
        let mut run = RunTable::clone(&self.run).with(&settings.overrides())?.read()?;
        if settings.sparsity == 0.0 {
            run.prune = None;
        }
        let forward_batch = match self.device {
            Device::Cpu(_) => CPU_BATCH,
            Device::Cuda(_) => GPU_BATCH,
        };
        if run.train.eval_batch == 0 {
            run.train.eval_batch = forward_batch;
        }
        if let Some(prune) = &mut run.prune
            && let PruneMethod::Snip { score_batch, .. } | PruneMethod::Grasp { score_batch, .. } =
                &mut prune.method
            && *score_batch == 0
        {
            *score_batch = forward_batch;
        }
        let mut plan = Plan::new(run.clone(), self.dataset.facts())?;
        // What batch norms see would change with it.
        if matches!(self.device, Device::Cpu(_))
            && run.train.micro_batches == 1
            && plan.model.buffers().is_empty()
        {
            run.train.micro_batches = micro_batches_of(settings.batch);
            plan = Plan::new(run, self.dataset.facts())?;
        }
        if plan.mesh.size() > 1 {
            let problem = format!("asks for {} ranks, and a trial runs on one", plan.mesh.size());
            return Err(Error::Conflict { field: "parallel".into(), problem }.into());
        }
        Ok(plan)
    }

    /// What trials with the same initial weights and samples are pruned by: the seed decides, and whatever else
    /// is searched but how steps are taken. Batch norms measure the samples of a batch when they are scored.
    pub(crate) fn scores(&self, settings: &TrialSettings, plan: &Plan) -> ScoresOfRun {
        let of_steps = |field: &str| field.starts_with("learning_rate.") || field.starts_with("optimizer.");
        let fields: Vec<_> = settings.fields.iter().filter(|(field, _)| !of_steps(field)).collect();
        let batch = (!plan.model.buffers().is_empty()).then_some(settings.batch);
        ScoresOfRun { shared: self.scores.clone(), run: format!("{} {batch:?} {fields:?}", settings.seed) }
    }

    /// What trials compute on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What they are trained and evaluated on.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// The most wrong predictions of a check that reaches the goal, where there is one.
    pub(crate) fn max_wrong(&self, plan: &Plan) -> Option<usize> {
        let held_out = self.dataset.len(DataSplit::Validation);
        let samples = plan.intervals.eval_samples.map_or(held_out, |samples| samples.min(held_out));
        let predictions = match plan.model.input {
            Input::Image { .. } => samples,
            Input::Tokens { seq, .. } => samples * seq,
        };
        let reaches = |wrong: usize, goal| wrong as f64 / predictions as f64 <= goal;
        self.goal.map(|goal| {
            // The product may be rounded either way.
            let near = (goal * predictions as f64) as usize;
            (near.saturating_sub(1)..=near + 1).rev().find(|wrong| reaches(*wrong, goal)).unwrap_or(0)
        })
    }
}

/// Into how many micro-batches a step is split on a processor: the fewest of a size that it can hold at hand,
/// or one where none divides the batch well.
fn micro_batches_of(batch: usize) -> usize {
    let fits = |micro_batch: &usize| batch.is_multiple_of(*micro_batch);
    (CPU_BATCH / 2..=CPU_BATCH).rev().find(fits).map_or(1, |micro_batch| batch / micro_batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_split_into_micro_batches_that_divide_them() {
        assert_eq!([1, 2, 16, 64, 16384].map(micro_batches_of), [1, 1, 1, 4, 1024]);
        assert_eq!([40, 24, 17].map(micro_batches_of), [4, 2, 1], "of 10, of 12, and all of it");
    }
}

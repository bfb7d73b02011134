//! A run file with its data, ready to be run, evaluated or measured: the plan, the samples and the device that
//! it asks for.

use std::path::Path;

use anyhow::Result;
use espalier_comm::LaunchedProcess;
use espalier_data::Dataset;
use espalier_plan::config::{RunFile, RunTable};
use espalier_plan::device::DeviceChoice;
use espalier_plan::{DataFacts, Plan};
use espalier_tensor::Device;
use espalier_tensor::cuda::Cuda;
use espalier_train::parallel::launched::ProcessGroup;
use espalier_train::trained::TrainedModel;
use espalier_train::{Error, hub};

use crate::device;
use crate::output::print_err;
use crate::read_progress::ReadProgress;
use crate::run_file::{in_file, resolve};

/// Opens a trained model; of a run, its newest checkpoint that is intact.
pub fn open_trained(path: &Path) -> Result<TrainedModel, Error> {
    TrainedModel::open(path, passed_over)
}

/// Says that a checkpoint cannot be used.
pub fn passed_over(broken: &Error) {
    print_err!("warning: {broken}; the one before it is used");
}

/// A run file, resolved, with its data.
pub struct PreparedRun {
    pub plan: Plan,
    pub dataset: Dataset,
    /// How it becomes one of several ranks, where a launcher has started them.
    pub process_group: Option<ProcessGroup>,
}

impl PreparedRun {
    /// Opens the device that the run computes on.
    pub fn open_device(&self) -> Result<Device> {
        let device = match &self.process_group {
            Some(group) => device::open_for(group, &self.asked_device(), self.threads()?),
            None => device::open(&self.asked_device(), self.threads()?),
        };
        Ok(device.map_err(Error::Tensor)?)
    }

    /// The kind of device that it would be, and that in a few words; nothing is opened.
    pub fn planned_device(&self) -> Result<(&'static str, String)> {
        let kind = self.process_group.as_ref().map_or(self.asked_device().kind, ProcessGroup::device_kind);
        Ok(device::plan(kind, self.threads()?))
    }

    /// The device asked for, as far as it is not left to us.
    fn asked_device(&self) -> DeviceChoice {
        let ranks = if self.process_group.is_some() { 1 } else { self.plan.mesh.size() };
        device::shared(&self.plan.device, ranks)
    }

    /// Threads of the processor.
    fn threads(&self) -> Result<usize> {
        let cores = std::thread::available_parallelism()?.get();
        let all = self.process_group.as_ref().map_or(cores, |group| group.threads(cores));
        Ok(device::threads(self.plan.device.threads, all)?)
    }
}

/// Reads a run file, as if it stood at `path`, and the data that it names. A run that goes on from a
/// `checkpoint`, or is evaluated there, has its tokenizer in that folder where the one that it names is gone.
pub fn prepare(
    run: &RunTable,
    path: &Path,
    launched: Option<&LaunchedProcess>,
    checkpoint: Option<&Path>,
) -> Result<PreparedRun> {
    let started = launched.map(|launched| launched.size);
    let run_file = run.read_for(started).map_err(|error| in_file(path, error))?;
    prepare_with(run_file, path, launched, checkpoint, |run_file, _, _| Ok(run_file))
}

/// The same of a run file whose layout may still be open: `lay_out` completes it, knowing what the data are
/// and who runs it.
pub fn prepare_with(
    run_file: RunFile,
    path: &Path,
    launched: Option<&LaunchedProcess>,
    checkpoint: Option<&Path>,
    lay_out: impl FnOnce(RunFile, DataFacts, Option<&ProcessGroup>) -> Result<RunFile>,
) -> Result<PreparedRun> {
    let process_group = process_group(&run_file, launched)?;
    let mut run_file = resolve(run_file, path)?;
    if let Some(checkpoint) = checkpoint {
        hub::find_tokenizer(&mut run_file.data, checkpoint);
    }
    let mut progress = ReadProgress::new();
    let dataset = Dataset::open_with_progress(&run_file, &mut |read, all| progress.update(read, all));
    progress.finish();
    let dataset = dataset.map_err(Error::Data)?;
    let run_file = lay_out(run_file, dataset.facts(), process_group.as_ref())?;
    let plan = Plan::new(run_file, dataset.facts()).map_err(Error::Plan)?;
    Ok(PreparedRun { plan, dataset, process_group })
}

/// How this process becomes one of the ranks that a launcher has started.
fn process_group(run_file: &RunFile, launched: Option<&LaunchedProcess>) -> Result<Option<ProcessGroup>> {
    let of = |launched: &LaunchedProcess| {
        let gpus = || Cuda::probe().usable();
        ProcessGroup::new(launched.clone(), run_file.device.kind, gpus, |name| std::env::var(name).ok())
    };
    Ok(launched.map(of).transpose()?)
}

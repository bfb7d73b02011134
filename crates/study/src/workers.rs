//! The runner of real trials: a workload for each worker, over one set of data.

use std::path::Path;

use espalier_data::DataSplit;
use espalier_plan::config::RunFile;
use espalier_tensor::Device;
use espalier_train::Result;

use crate::file::Goal;
use crate::running_trial::RunningTrial;
use crate::trial::{ResumedTrial, Trial, TrialCheck, TrialRecord, TrialRunner};
use crate::workload::{TrialSettings, Workload};

/// Workloads that share their data, each on a device of its own: threads that run trials side by side do not
/// wait for each other.
#[derive(Debug)]
pub struct WorkerPool {
    workloads: Vec<Workload>,
}

impl WorkerPool {
    /// Opens the data of a run file for a worker on each of these devices.
    pub fn open(run: &RunFile, goal: Goal, devices: &[Device]) -> Result<WorkerPool> {
        let first = devices.first().expect("there is a worker");
        let mut workload = Workload::open(run, first)?;
        if let Goal::Error(error) = goal {
            workload = workload.with_goal(error);
        }
        Ok(WorkerPool { workloads: devices.iter().map(|device| workload.on_device(device)).collect() })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.workloads.len()
    }

    /// What they compute on.
    pub fn device(&self) -> &Device {
        self.first().device()
    }

    /// How many there are and what they compute on, in a few words.
    pub fn describe(&self) -> String {
        let (count, on) =
            (self.count(), if matches!(self.device(), Device::Cpu(_)) { "a thread each" } else { "one GPU" });
        match count {
            1 => "one trial at a time".into(),
            _ => format!("{count} trials at a time on {on}"),
        }
    }

    /// What one of them runs trials of.
    pub fn first(&self) -> &Workload {
        &self.workloads[0]
    }
}

impl TrialRunner for WorkerPool {
    fn begin<'a>(&'a self, worker: usize, settings: &TrialSettings) -> Result<Box<dyn Trial + Send + 'a>> {
        Ok(Box::new(RunningTrial::begin(&self.workloads[worker], settings)?))
    }

    fn resume<'a>(
        &'a self,
        worker: usize,
        settings: &TrialSettings,
        folder: &Path,
    ) -> Result<Option<ResumedTrial<'a>>> {
        let resumed = RunningTrial::resume(&self.workloads[worker], settings, folder)?;
        Ok(resumed.map(|(running, record)| (Box::new(running) as Box<dyn Trial + Send>, record)))
    }

    fn chance_level(&self, goal: Goal) -> f64 {
        let facts = self.first().dataset().facts();
        let answers = facts.classes.or(facts.vocab).unwrap_or(2).max(2) as f64;
        match goal {
            Goal::Error(_) => 1.0 - 1.0 / answers,
            Goal::Loss(_) => answers.ln(),
        }
    }

    fn training_samples(&self) -> usize {
        self.first().dataset().len(DataSplit::Train)
    }
}

impl Trial for RunningTrial {
    fn advance(&mut self, step: u64) -> Result<TrialCheck> {
        RunningTrial::advance(self, step)
    }

    fn advance_to_goal(&mut self, step: u64) -> Result<Option<TrialCheck>> {
        RunningTrial::advance_to_goal(self, step)
    }

    fn save(&mut self, folder: &Path, record: &TrialRecord) -> Result<()> {
        RunningTrial::save(self, folder, record)
    }
}

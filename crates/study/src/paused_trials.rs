//! Paused trials on disk: a study that is killed resumes them where they stood.
//!
//! A trial that has come to where trials are compared is written to `waiting/` in the study's folder, as the
//! checkpoint of a run with its record beside the tensors, so that both are of one step or absent. Its line
//! of results is written after that. Killed in between, the study finds it further than its line says, and
//! resumes from there: a bracket gets the record that it would have got then. What has ended is removed.
//!
//! Writing takes a few milliseconds and the disk; steps that took less than [`TrialRunner::min_unsaved_time`]
//! since the trial was saved last are rather taken again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use espalier_train::Error;

use crate::trial::{Trial, TrialRecord, TrialRunner};
use crate::workload::TrialSettings;

/// A trial before its first step, or resumed with its record.
pub type StartedTrial<'a> = (Box<dyn Trial + Send + 'a>, Option<TrialRecord>);

/// The folder of a study's paused trials.
#[derive(Debug)]
pub struct PausedTrialStore {
    folder: PathBuf,
    min_unsaved: Duration,
}

impl PausedTrialStore {
    /// Those of the study in a folder. Nothing is made there before the first one is saved.
    pub fn of(study: &Path, min_unsaved: Duration) -> PausedTrialStore {
        PausedTrialStore { folder: study.join("waiting"), min_unsaved }
    }

    /// A trial as it was saved, or before its first step: the same seed gives the same trial.
    pub fn begin<'a>(
        &self,
        runner: &'a dyn TrialRunner,
        worker: usize,
        settings: &TrialSettings,
    ) -> Result<StartedTrial<'a>, Error> {
        let folder = self.trial_folder(settings.batch, settings.sparsity, settings.seed);
        if folder.is_dir()
            && let Some((trial, record)) = runner.resume(worker, settings, &folder)?
        {
            return Ok((trial, Some(record)));
        }
        runner.begin(worker, settings).map(|trial| (trial, None))
    }

    /// Saves a trial where its steps since it was saved last are worth that; returns what they took that is
    /// not saved. A disk that cannot hold it is no reason to end the study: it costs steps if somebody kills
    /// it.
    pub fn save(&self, trial: &mut dyn Trial, record: &TrialRecord, unsaved: Duration) -> Duration {
        if record.status.is_final() || unsaved < self.min_unsaved {
            return unsaved;
        }
        let folder = self.trial_folder(record.batch, record.sparsity, record.trial.into());
        match trial.save(&folder, record) {
            Ok(()) => Duration::ZERO,
            Err(_) => unsaved,
        }
    }

    /// Removes what is saved of a trial that has ended, and the folder with the last of them.
    pub fn remove(&self, record: &TrialRecord) {
        let folder = self.trial_folder(record.batch, record.sparsity, record.trial.into());
        // What was never saved is not there; what cannot be removed is never read again.
        if fs::remove_dir_all(folder).is_ok() {
            let _ = fs::remove_dir(&self.folder);
        }
    }

    fn trial_folder(&self, batch: usize, sparsity: f64, trial: u64) -> PathBuf {
        self.folder.join(format!("batch-{batch}-sparsity-{sparsity}-trial-{trial}"))
    }
}

//! Trials that wait, on disk: a study that is killed goes on with them where they stood.
//!
//! A trial that has come to where trials are compared is written to `waiting/` in the study's folder, as the checkpoint of a run with its record beside the tensors, so that both are of one step or absent. Its
//! line of results is written after that. Killed in between, the study finds it further than its line says, and goes on from there: a race hears the same of it as it would have heard then. What has ended is removed.
//!
//! Writing takes a few milliseconds and the disk; steps that took less than [`Runner::worth_keeping`] since the trial was written last are rather taken again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use espalier_train::Error;

use crate::trial::{Record, Runner, Trial};
use crate::workload::Settings;

/// A trial on its way, with what is known of it.
pub type Begun<'a> = (Box<dyn Trial + Send + 'a>, Option<Record>);

/// Where the trials of a study wait.
#[derive(Debug)]
pub struct Waiting {
    folder: PathBuf,
    worth: Duration,
}

impl Waiting {
    /// Those of the study in a folder. Nothing is made there before the first one waits.
    pub fn of(study: &Path, worth: Duration) -> Waiting {
        Waiting { folder: study.join("waiting"), worth }
    }

    /// A trial as it was kept, or before its first step: the same seed gives the same trial.
    pub fn begin<'a>(
        &self,
        runner: &'a dyn Runner,
        worker: usize,
        settings: &Settings,
    ) -> Result<Begun<'a>, Error> {
        let place = self.place(settings.batch, settings.sparsity, settings.seed);
        if place.is_dir()
            && let Some((trial, record)) = runner.resume(worker, settings, &place)?
        {
            return Ok((trial, Some(record)));
        }
        runner.begin(worker, settings).map(|trial| (trial, None))
    }

    /// Keeps a trial where its steps since it was kept last are worth that; returns what they took that is not kept. A disk that cannot hold it is no reason to end the study: it costs steps if somebody kills it.
    pub fn keep(&self, trial: &mut dyn Trial, record: &Record, unkept: Duration) -> Duration {
        if record.status.is_final() || unkept < self.worth {
            return unkept;
        }
        let place = self.place(record.batch, record.sparsity, record.trial.into());
        match trial.keep(&place, record) {
            Ok(()) => Duration::ZERO,
            Err(_) => unkept,
        }
    }

    /// Removes what is kept of a trial that has ended, and the folder with the last of them.
    pub fn forget(&self, record: &Record) {
        let place = self.place(record.batch, record.sparsity, record.trial.into());
        // What was never kept is not there; what cannot be removed is never looked at again.
        if fs::remove_dir_all(place).is_ok() {
            let _ = fs::remove_dir(&self.folder);
        }
    }

    fn place(&self, batch: usize, sparsity: f64, trial: u64) -> PathBuf {
        self.folder.join(format!("batch-{batch}-sparsity-{sparsity}-trial-{trial}"))
    }
}

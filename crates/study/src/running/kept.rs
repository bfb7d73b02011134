//! A trial on disk while it waits: a checkpoint as any run writes it, with the trial's record beside the tensors.

use std::path::Path;

use espalier_data::regular_file::{self, RECORDS};
use espalier_train::checkpoint::{Checkpoints, Companion};
use espalier_train::parallel::Ranks;
use espalier_train::{Error, Result};

use super::Running;
use crate::trial::Record;
use crate::workload::{Settings, Workload};

/// The record, in the checkpoint's folder.
const RECORD: &str = "record.json";

impl Running {
    /// Writes a checkpoint to a folder, with the record, and removes the one that was there before.
    pub fn keep(&mut self, folder: &Path, record: &Record) -> Result<()> {
        let bytes = serde_json::to_vec(record).expect("a record is plain data");
        let beside = Companion { name: RECORD.into(), bytes, needs_whole_weights: false };
        let checkpoints = self.checkpoints(folder).beside(vec![beside]);
        let device = self.trainer.device().clone();
        device.enter(|| self.trainer.save(&checkpoints))?;
        // What stays costs room, and nothing else.
        checkpoints.remove_old(self.trainer.progress().step, |_| ());
        Ok(())
    }

    /// A trial as it was kept, and its record; none where nothing whole is there, or what is there is another's.
    pub fn resume(
        workload: &Workload,
        settings: &Settings,
        folder: &Path,
    ) -> Result<Option<(Running, Record)>> {
        let mut running = Running::begin(workload, settings)?;
        let whole = match running.checkpoints(folder).latest(&Ranks::alone(), |_| ()) {
            Ok(Some(whole)) => whole,
            // A disk that does not answer says nothing about what is there.
            Err(error @ Error::Disk { .. }) => return Err(error),
            Ok(None) | Err(_) => return Ok(None),
        };
        let text = regular_file::read(&whole.path().join(RECORD), RECORDS).unwrap_or_default();
        let is_its = |record: &Record| {
            record.steps == whole.progress().step
                && (record.cell(), u64::from(record.trial)) == (settings.cell(), settings.seed)
                && record.fields == settings.fields
        };
        let Some(record) = serde_json::from_slice(&text).ok().filter(is_its) else { return Ok(None) };
        let device = running.trainer.device().clone();
        let restored = device.enter(|| running.trainer.restore(&whole));
        Ok(restored.is_ok().then_some((running, record)))
    }

    fn checkpoints(&self, folder: &Path) -> Checkpoints {
        Checkpoints::new(folder, 1, &self.model, self.precision)
    }
}

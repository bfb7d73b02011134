//! A paused trial on disk: a checkpoint as any run writes it, with the trial's record beside the tensors.

use std::path::Path;

use espalier_data::regular_file::{self, RECORDS};
use espalier_train::checkpoint::{Checkpoints, SidecarFile};
use espalier_train::parallel::Ranks;
use espalier_train::{Error, Result};

use super::RunningTrial;
use crate::trial::TrialRecord;
use crate::workload::{TrialSettings, Workload};

/// The record, in the checkpoint's folder.
const RECORD: &str = "record.json";

impl RunningTrial {
    /// Writes a checkpoint to a folder, with the record, and removes the one that was there before.
    pub fn save(&mut self, folder: &Path, record: &TrialRecord) -> Result<()> {
        let bytes = serde_json::to_vec(record).expect("a record is plain data");
        let sidecar = SidecarFile { name: RECORD.into(), bytes, needs_unsharded_weights: false };
        let checkpoints = self.checkpoints(folder).with_sidecar_files(vec![sidecar]);
        let device = self.trainer.device().clone();
        device.enter(|| self.trainer.save(&checkpoints))?;
        // What stays costs room, and nothing else.
        checkpoints.remove_old(self.trainer.progress().step, |_| ());
        Ok(())
    }

    /// A trial as it was saved, and its record; none where nothing complete is there, or what is there is
    /// another's.
    pub fn resume(
        workload: &Workload,
        settings: &TrialSettings,
        folder: &Path,
    ) -> Result<Option<(RunningTrial, TrialRecord)>> {
        let mut running = RunningTrial::begin(workload, settings)?;
        let checkpoint = match running.checkpoints(folder).latest(&Ranks::single(), |_| ()) {
            Ok(Some(checkpoint)) => checkpoint,
            // A disk that does not answer says nothing about what is there.
            Err(error @ Error::Disk { .. }) => return Err(error),
            Ok(None) | Err(_) => return Ok(None),
        };
        let text = regular_file::read(&checkpoint.path().join(RECORD), RECORDS).unwrap_or_default();
        let is_its = |record: &TrialRecord| {
            record.steps == checkpoint.progress().step
                && (record.cell(), u64::from(record.trial)) == (settings.cell(), settings.seed)
                && record.fields == settings.fields
        };
        let Some(record) = serde_json::from_slice(&text).ok().filter(is_its) else { return Ok(None) };
        let device = running.trainer.device().clone();
        let restored = device.enter(|| running.trainer.restore(&checkpoint));
        Ok(restored.is_ok().then_some((running, record)))
    }

    fn checkpoints(&self, folder: &Path) -> Checkpoints {
        Checkpoints::new(folder, 1, &self.model, self.precision)
    }
}

//! What a run started from (`--from`): which weights these were, written down in `start.json`.
//!
//! Until its first checkpoint a run has nothing else to go back to. A run that is killed before then starts
//! again from the same weights, or is refused where these are gone or are others by now: otherwise it would
//! go on from random ones, and nobody would know.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use espalier_data::Fingerprint;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::Plan;
use espalier_plan::pruning::PruneMethod;
use serde::{Deserialize, Serialize};

use super::{Observer, RunDir, refuse_zeros_of_nothing, write};
use crate::checkpoint::{Checkpoint, retry};
use crate::parallel::{Ranks, from_rank0};
use crate::trainer::Trainer;
use crate::{Error, Result, hub};

/// What a run started from, where that was anything but its seed.
pub(super) const START_FILE: &str = "start.json";

/// The fraction of zeros from which on somebody is likely to have pruned what a run starts from.
const MANY_ZEROS: f64 = 0.5;

/// The weights that a run started from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartPoint {
    path: PathBuf,
    /// What their files held; of a checkpoint of ours its manifest, which has the hashes of all others.
    weights: Fingerprint,
    /// Steps that the run counts as done before its own: those of a checkpoint that was pruned, which it goes
    /// on behind.
    #[serde(default)]
    step: u64,
}

impl StartPoint {
    /// What the run in a folder started from; none where it was its seed, or an older program that did not
    /// write it down.
    pub fn read(folder: &Path) -> Result<Option<StartPoint>> {
        let path = folder.join(START_FILE);
        let text = match retry(|| regular_file::read(&path, SETTINGS)) {
            Err(why) if why.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|why| Error::unread(&path, why))?,
        };
        let damaged =
            |why| Error::file(&path, format!("it does not record what the run started from: {why}"));
        serde_json::from_slice(&text).map(Some).map_err(damaged)
    }

    /// Where the weights were.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Steps that were done when the run began in its folder: 0, unless it goes on behind a checkpoint that
    /// was pruned.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// That of a run which begins behind so many steps.
    pub(super) fn of(checkpoint: &Checkpoint, step: u64) -> Result<StartPoint> {
        let path = checkpoint.path();
        let path = fs::canonicalize(path).map_err(|why| Error::unread(path, why))?;
        Ok(StartPoint { path, weights: Fingerprint::of_paths(&checkpoint.identifying_files())?, step })
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("paths and hashes are plain data");
        write(folder, START_FILE, &text)
    }

    /// Opens what a run is to start from, as `run_dir` says and `recorded` was; none where it starts from its
    /// seed, or `resumes` from a checkpoint of its own. An error where these are not the weights that it
    /// started from. All ranks must.
    pub(super) fn find(
        run_dir: &RunDir,
        folder: &Path,
        resumes: bool,
        ranks: &Ranks,
        observer: &mut dyn Observer,
    ) -> Result<Option<(Checkpoint, StartPoint)>> {
        let recorded = match run_dir.resume {
            true => from_rank0(ranks, || StartPoint::read(folder))?,
            false => None,
        };
        let refuse = |why: String| Error::file(folder.join(START_FILE), why);
        let path = match (&run_dir.from, &recorded) {
            (Some(from), None) if run_dir.resume && !run_dir.fresh => {
                return Err(Error::file(
                    folder,
                    format!(
                        "this run did not start from other weights, and --from {} would make it a different run; \
                         --resume --fresh restarts from them",
                        from.display()
                    ),
                ));
            }
            (Some(from), _) => from,
            (None, Some(recorded)) if !resumes => &recorded.path,
            (None, _) => return Ok(None),
        };
        let is_gone = from_rank0(ranks, || Ok(!path.exists()))?;
        if is_gone && run_dir.from.is_none() {
            return Err(refuse(format!(
                "the run started from {}, which is gone, and has no checkpoint yet: put it back, or give its new path \
                 with --from",
                path.display()
            )));
        }
        let passed_over = |broken: &Error| observer.warning(&format!("{broken}; the one before it is used"));
        let checkpoint = hub::find(path, ranks, passed_over)?;
        let found = from_rank0(ranks, || StartPoint::of(&checkpoint, 0))?;
        let started = recorded.as_ref().filter(|_| run_dir.from.is_none() || !run_dir.fresh);
        if let Some(change) = started.and_then(|started| found.weights.change_since(&started.weights)) {
            return Err(refuse(format!(
                "the run did not start from {} as it is now: its files {change}; --resume --fresh --from restarts from other \
                 weights",
                path.display()
            )));
        }
        Ok(Some((checkpoint, found)))
    }

    /// Gives a trainer the weights that its run is to start from, as [`StartPoint::find`] says; where these
    /// were. All ranks must.
    pub(super) fn start(
        trainer: &mut Trainer,
        plan: &Plan,
        run_dir: &RunDir,
        folder: &Path,
        resumes: bool,
        observer: &mut dyn Observer,
    ) -> Result<Option<(PathBuf, StartPoint)>> {
        let found = StartPoint::find(run_dir, folder, resumes, trainer.ranks(), observer)?;
        if resumes {
            return Ok(None);
        }
        let Some((checkpoint, start)) = found else {
            refuse_zeros_of_nothing(plan)?;
            return Ok(None);
        };
        hub::check_tokens(&checkpoint, plan)?;
        trainer.start_from(&checkpoint)?;
        let pruning = plan.pruning.as_ref();
        let is_kept = pruning.is_some_and(|pruning| pruning.method == PruneMethod::Keep);
        let zeros = if is_kept { 0.0 } else { trainer.zeros()? };
        if zeros >= MANY_ZEROS {
            let keeps =
                if pruning.is_some() { "`train.keep_zeros` = true" } else { "`prune.method` = \"keep\"" };
            observer.note(&format!(
                "{:.0} % of the prunable weights that it starts from are zero, and training changes them: {keeps} keeps these zeros",
                100.0 * zeros
            ));
        }
        if run_dir.from.is_none() {
            observer.note(&format!("the run starts from the weights of {} again", start.path.display()));
        }
        Ok(Some((checkpoint.path().to_owned(), start)))
    }
}

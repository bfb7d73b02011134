//! Checkpoints: a folder per step, complete or not there at all, written by all ranks at once.
//!
//! ```text
//! checkpoints/step-000300/manifest.json          what it is, and a hash of every other file
//!                         model.safetensors      weights and running statistics under their public names
//!                         optimizer.safetensors  master weights and moments, as master/NAME, moment0/NAME; of a pruned
//!                                                parameter those of its kept weights
//!                         masks.safetensors      where something is pruned: bit i % 32 of word i / 32 of NAME says
//!                                                whether its weight i is kept
//!                         pruner.safetensors     what the pruning method remembers
//!                         config.json ..         what other programs want beside the weights (`hub`)
//! ```
//!
//! Of several ranks each writes files of its own, in the form that Hugging Face's tools know:
//! `model-00001-of-00004.safetensors`, with `model.safetensors.index.json`. Which tensors a rank writes is
//! said in `write`; reading (`read`) joins whatever files there are, so that any number of ranks in any
//! layout can go on from what any other number left. Where ranks hold shards of tensors, their files hold
//! shards (`sharded`), and say in the description that the format leaves to its users which they are. Full
//! tensors are in files as PyTorch has them (`plan::filters`).
//!
//! A checkpoint is written under a temporary name, synced and renamed. Rank 0 writes the manifest last, when
//! all ranks have reported that their files are on the disk, and renames. Loading checks every hash and every
//! shape before the first weight is touched; a damaged checkpoint is reported and the one before it is used,
//! one that cannot be read ends the run (`fault`). A damaged one is never removed or written over: a run that
//! goes on from the one before it gives it another name (`retention`).

mod checkpoint_tensor;
mod convert;
mod exact;
mod fault;
mod files;
mod manifest;
mod nonzero;
mod open;
mod params;
mod read;
mod retention;
mod safetensors_file;
mod sharded;
mod start;
mod tensor_entry;
mod write;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::parallel::{Ranks, from_rank0};
use crate::state::NoiseScale;
use crate::{Error, Result};

pub use checkpoint_tensor::{CheckpointTensor, NamedTensors};
pub(crate) use convert::convert;
pub(crate) use fault::{ReadFault, retry};
pub(crate) use files::file_name;
pub use open::Checkpoint;
pub(crate) use params::{
    first_not_finite, load_requests, state_to_save, weights_load_request, weights_to_save,
};
pub use read::{LoadRequest, LoadTarget};
pub use retention::set_aside;
pub(crate) use safetensors_file::{is_finite, write_tensors};
pub use write::SidecarFile;

pub(crate) const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 2;
/// Weights and running statistics.
pub const MODEL: &str = "model.safetensors";
/// Master weights and moments.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// Of each pruned parameter, which weights are kept.
pub const MASKS: &str = "masks.safetensors";
/// What the pruning method remembers.
pub const PRUNER: &str = "pruner.safetensors";

/// Where a run stands, apart from its tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunProgress {
    /// Steps tried, also those skipped for a bad gradient: fixes the position in the data.
    pub step: u64,
    /// Steps taken by the optimizer since its state was fresh.
    pub updates: u64,
    /// Bad steps in a row up to now.
    pub bad_steps: u64,
    /// The best validation loss so far.
    pub best_validation: Option<f64>,
    /// What is known of the gradient noise scale, where it is measured.
    #[serde(default)]
    pub noise: NoiseScale,
    /// An evaluation after this step was begun and interrupted: a run that goes on does it first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evaluation_due: bool,
}

/// The checkpoints of a run.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    model: String,
    precision: String,
    sidecar_files: Vec<SidecarFile>,
}

impl Checkpoints {
    /// Those in `folder`, of which the last `keep` stay. Model and precision are written down and compared.
    pub fn new(folder: impl Into<PathBuf>, keep: usize, model: &str, precision: &str) -> Checkpoints {
        let (model, precision) = (model.into(), precision.into());
        Checkpoints { folder: folder.into(), keep, model, precision, sidecar_files: Vec::new() }
    }

    /// The same, each with these files beside its tensors.
    pub fn with_sidecar_files(self, sidecar_files: Vec<SidecarFile>) -> Checkpoints {
        Checkpoints { sidecar_files, ..self }
    }

    /// Those of a run folder, to be read.
    pub fn of_run(folder: &Path) -> Checkpoints {
        Checkpoints::new(folder.join("checkpoints"), usize::MAX, "", "")
    }

    /// The step of a checkpoint, by its folder's name.
    pub fn step_of(path: &Path) -> Option<u64> {
        path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
    }

    /// What bears the name of a checkpoint, damaged or not, oldest first.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        Ok(self.numbered()?.into_iter().map(|(_, path)| path).collect())
    }

    /// The same, each with its step.
    pub fn numbered(&self) -> Result<Vec<(u64, PathBuf)>> {
        let read = || -> io::Result<Vec<PathBuf>> {
            fs::read_dir(&self.folder)?.map(|entry| Ok(entry?.path())).collect()
        };
        let paths = match retry(read) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|why| Error::unread(&self.folder, why))?,
        };
        let step = |path: PathBuf| Some((Self::step_of(&path)?, path));
        let mut found: Vec<(u64, PathBuf)> = paths.into_iter().filter_map(step).collect();
        found.sort();
        Ok(found)
    }

    /// The newest intact checkpoint; `report` hears of those that are not. All ranks must call it.
    ///
    /// A checkpoint of another model or precision is an error, not a broken checkpoint.
    pub fn latest(&self, ranks: &Ranks, mut report: impl FnMut(&Error)) -> Result<Option<Checkpoint>> {
        let Some(checkpoint) = self.newest(ranks, |broken| report(&broken))? else { return Ok(None) };
        for (what, theirs, ours) in [
            ("model", &checkpoint.manifest().model, &self.model),
            ("precision", &checkpoint.manifest().precision, &self.precision),
        ] {
            if theirs != ours {
                return Err(
                    checkpoint.refuse(format!("it holds {what} {theirs}, and this run trains {what} {ours}"))
                );
            }
        }
        Ok(Some(checkpoint))
    }

    /// The newest intact one of what rank 0 sees in the folder: all must check the same checkpoints in the same order.
    fn newest(&self, ranks: &Ranks, mut damaged: impl FnMut(Error)) -> Result<Option<Checkpoint>> {
        for path in from_rank0(ranks, || self.list())?.into_iter().rev() {
            match Checkpoint::read(&path, ranks) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(broken @ Error::Checkpoint { .. }) => damaged(broken),
                Err(other) => return Err(other),
            }
        }
        Ok(None)
    }
}

fn refuse(path: &Path, why: impl ToString) -> Error {
    Error::Checkpoint { path: path.into(), why: why.to_string() }
}

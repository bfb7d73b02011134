//! `[train]` and `[checkpoint]`: how long, in what portions, how exactly.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::reader::Section;
use super::{Error, Override, fields, overrides};
use crate::intervals::{CheckpointPolicy, RunLength};
use crate::spec::{Precision, RecomputeMode};

/// `[train]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// `steps` or `epochs`.
    #[serde(flatten)]
    pub length: RunLength,
    /// Samples in a step, over all ranks.
    pub batch: usize,
    /// Gradient-accumulation steps: so many micro-batches of a rank's slice of the batch run one after the other.
    pub micro_batches: usize,
    /// What weights, gradients and activations are stored in.
    pub precision: Precision,
    /// What is computed twice to save memory.
    pub recompute: RecomputeMode,
    /// Gradients longer than this are scaled down to it; 0: never.
    pub clip: f64,
    /// So many steps in a row without a finite gradient end the run.
    pub max_bad_steps: usize,
    /// Steps between validations; 0: only at the end.
    pub eval_every: usize,
    /// Validation samples used each time; 0: all.
    pub eval_samples: usize,
    /// Validation samples that run at a time; 0: as many as in training.
    pub eval_batch: usize,
    /// Steps between lines of the log.
    pub log_every: usize,
    /// Whether to estimate the gradient noise scale from the micro-batches.
    pub noise_scale: bool,
    /// Samples over which batch norm takes its statistics; 0: all of a micro-batch.
    pub batch_norm_group: usize,
    /// Whether prunable weights that are zero in what the run starts from stay zero.
    pub keep_zeros: bool,
}

impl Train {
    pub(super) fn read(section: &mut Section) -> Result<Train, Error> {
        let mut values = section.read(fields::TRAIN)?;
        match (section.has("steps"), section.has("epochs")) {
            (true, true) => {
                let problem = "and `train.steps` exclude each other: write one of them (`--set train.steps=` leaves the other out)";
                return Err(section.conflict("epochs", problem));
            }
            (false, false) => values.set("steps", 100),
            _ => {}
        }
        let train: Train = values.all();
        if !train.batch.is_multiple_of(train.micro_batches) {
            let problem =
                format!("is {}, which does not divide `train.batch` = {}", train.micro_batches, train.batch);
            return Err(section.conflict("micro_batches", problem));
        }
        Ok(train)
    }

    /// Takes out of the file's table the length that an override in the other unit takes the place of, and
    /// says so.
    pub(super) fn drop_moot(table: &mut Table, overrides: &[Override]) -> Option<String> {
        let is_set = |key: &str| overrides::value_of(overrides, &format!("train.{key}")).is_some();
        let (set, moot) = match (is_set("steps"), is_set("epochs")) {
            (true, false) => ("steps", "epochs"),
            (false, true) => ("epochs", "steps"),
            _ => return None,
        };
        let Some(Value::Table(train)) = table.get_mut("train") else { return None };
        train.remove(moot)?;
        Some(format!("`train.{moot}` of the run file is ignored: `train.{set}` replaces it"))
    }
}

impl CheckpointPolicy {
    pub(super) fn read(section: &mut Section) -> Result<CheckpointPolicy, Error> {
        let checkpoint: CheckpointPolicy = section.read(fields::CHECKPOINT)?.all();
        if checkpoint.every == 0 && checkpoint.keep != 3 {
            return Err(section.no_effect("keep", "with `checkpoint.every` = 0: there is one, at the end"));
        }
        Ok(checkpoint)
    }
}

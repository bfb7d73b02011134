//! `[train]`, `[checkpoint]`, `[device]`: how long, in what portions, how exactly, and where.

use serde::Serialize;
use toml::{Table, Value};

use super::reader::{Choice, LARGEST, MOST, Section};
use super::{Error, Override, overrides};
use crate::device::{Device, DeviceKind};
use crate::spec::{Precision, Recompute};
use crate::timetable::{Checkpoint, Length};

/// `[train]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// `steps` or `epochs`.
    #[serde(flatten)]
    pub length: Length,
    /// Samples in a step, over all ranks.
    pub batch: usize,
    /// Portions of a rank's part of the batch that run one after the other; they divide it.
    pub micro_batches: usize,
    /// What weights, gradients and activations are stored in.
    pub precision: Precision,
    /// What is computed twice to save memory.
    pub recompute: Recompute,
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

impl Choice for Precision {
    const ALL: &'static [(&'static str, Self)] = &[("f32", Precision::F32), ("bf16", Precision::Bf16)];
}

impl Choice for Recompute {
    const ALL: &'static [(&'static str, Self)] =
        &[("none", Recompute::None), ("attention", Recompute::Attention), ("block", Recompute::Block)];
}

impl Train {
    pub(super) fn read(section: &mut Section) -> Result<Train, Error> {
        let steps = section.optional_whole("steps", 0, MOST)?;
        let epochs = section.optional_whole("epochs", 1, MOST)?;
        let length = match (steps, epochs) {
            (Some(_), Some(_)) => {
                let problem =
                    "and `train.steps` exclude each other: write one of them (`--set train.steps=` leaves the other out)"
                        .into();
                return Err(Error::Conflict { field: section.field("epochs"), problem });
            }
            (None, Some(epochs)) => Length::Epochs(epochs),
            (steps, None) => Length::Steps(steps.unwrap_or(100)),
        };
        let train = Train {
            length,
            batch: section.whole("batch", 32, 1, LARGEST)?,
            micro_batches: section.whole("micro_batches", 1, 1, LARGEST)?,
            precision: section.choice("precision", Precision::F32)?,
            recompute: section.choice("recompute", Recompute::None)?,
            clip: section.number("clip", 0.0, "a number of at least 0 (0: off)", |x| x >= 0.0)?,
            max_bad_steps: section.whole("max_bad_steps", 5, 1, MOST)?,
            eval_every: section.whole("eval_every", 0, 0, MOST)?,
            eval_samples: section.whole("eval_samples", 0, 0, MOST)?,
            eval_batch: section.whole("eval_batch", 0, 0, LARGEST)?,
            log_every: section.whole("log_every", 10, 1, MOST)?,
            noise_scale: section.boolean("noise_scale", false)?,
            batch_norm_group: section.whole("batch_norm_group", 0, 0, LARGEST)?,
            keep_zeros: section.boolean("keep_zeros", false)?,
        };
        if !train.batch.is_multiple_of(train.micro_batches) {
            let problem =
                format!("is {}, which does not divide `train.batch` = {}", train.micro_batches, train.batch);
            return Err(Error::Conflict { field: section.field("micro_batches"), problem });
        }
        section.finish()?;
        Ok(train)
    }
}

impl Train {
    /// Takes out of the file's table the length that an override in the other unit takes the place of, and says so.
    pub(super) fn drop_moot(table: &mut Table, overrides: &[Override]) -> Option<String> {
        let is_set = |key: &str| overrides::value_of(overrides, &format!("train.{key}")).is_some();
        let (set, moot) = match (is_set("steps"), is_set("epochs")) {
            (true, false) => ("steps", "epochs"),
            (false, true) => ("epochs", "steps"),
            _ => return None,
        };
        let Some(Value::Table(train)) = table.get_mut("train") else { return None };
        train.remove(moot)?;
        Some(format!("`train.{moot}` of the run file is left aside: `train.{set}` takes its place"))
    }
}

impl Checkpoint {
    pub(super) fn read(section: &mut Section) -> Result<Checkpoint, Error> {
        let standard = 3;
        let checkpoint = Checkpoint {
            every: section.whole("every", 0, 0, MOST)?,
            keep: section.whole("keep", standard, 1, MOST)?,
            last: section.boolean("last", true)?,
        };
        if checkpoint.every == 0 && checkpoint.keep != standard {
            let why = "with `checkpoint.every` = 0: there is one, at the end".into();
            return Err(Error::NoEffect { field: section.field("keep"), why });
        }
        section.finish()?;
        Ok(checkpoint)
    }
}

impl Choice for DeviceKind {
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", DeviceKind::Auto), ("cpu", DeviceKind::Cpu), ("cuda", DeviceKind::Cuda)];
}

impl Device {
    pub(super) fn read(section: &mut Section) -> Result<Device, Error> {
        let device = Device {
            kind: section.choice("kind", DeviceKind::Auto)?,
            threads: section.whole("threads", 0, 0, 4096)?,
            tf32: section.boolean("tf32", true)?,
            check_memory: section.boolean("check_memory", true)?,
        };
        section.finish()?;
        Ok(device)
    }
}

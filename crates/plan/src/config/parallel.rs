//! `[parallel]`: over how many ranks a run is spread, and what they share.

use serde::Serialize;

use crate::mesh::PerAxis;

use super::reader::{Choice, LARGEST, Section};
use super::{Error, Pipeline, Train};

/// `[parallel]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parallel {
    /// Ranks that each hold the whole model and take a part of every batch.
    pub data: usize,
    /// Over which samples batch norm takes its statistics.
    pub batch_norm: BatchNorm,
    /// How the model is cut into stages, where it is.
    #[serde(flatten)]
    pub pipeline: Option<Pipeline>,
}

/// The samples that a batch norm sees at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchNorm {
    /// A rank's own micro-batch; running statistics are the mean over ranks.
    #[default]
    Local,
    /// The micro-batches of all ranks, as if one had them all.
    Synchronised,
}

impl Choice for BatchNorm {
    const ALL: &'static [(&'static str, Self)] =
        &[("local", BatchNorm::Local), ("synchronised", BatchNorm::Synchronised)];
}

impl Parallel {
    pub(super) fn read(section: &mut Section) -> Result<Parallel, Error> {
        let parallel = Parallel {
            data: section.whole("data", 1, 1, LARGEST)?,
            batch_norm: section.choice("batch_norm", BatchNorm::Local)?,
            pipeline: Pipeline::read(section)?,
        };
        section.finish()?;
        Ok(parallel)
    }

    /// Ranks that hold consecutive parts of the model.
    pub fn stages(&self) -> usize {
        self.pipeline.as_ref().map_or(1, |pipeline| pipeline.stages)
    }

    /// Ranks along each axis.
    pub fn extents(&self) -> PerAxis {
        PerAxis { data: self.data, pipeline: self.stages(), ..PerAxis::ONES }
    }

    /// That every rank gets the same number of micro-batches of the same size.
    pub(super) fn check(&self, train: &Train) -> Result<(), Error> {
        let portions = self.data * train.micro_batches;
        if train.batch.is_multiple_of(portions) {
            return Ok(());
        }
        let problem = format!(
            "is {}, but `train.batch` = {} cannot be cut into {portions} equal parts ({} ranks with \
             `train.micro_batches` = {})",
            self.data, train.batch, self.data, train.micro_batches
        );
        Err(Error::Conflict { field: "parallel.data".into(), problem })
    }
}

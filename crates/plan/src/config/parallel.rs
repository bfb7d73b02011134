//! `[parallel]`: over how many ranks a run is spread, and what they share.

use serde::Serialize;

use super::reader::{Choice, LARGEST, Section};
use super::{Error, Train};

/// The seconds of a week: whoever waits longer waits for nobody.
const WEEK: usize = 7 * 24 * 3600;

/// `[parallel]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Parallel {
    /// Ranks that each hold the whole model and take a part of every batch.
    pub data: usize,
    /// Over which samples batch norm takes its statistics.
    pub batch_norm: BatchNorm,
    /// Seconds that a rank waits for another at most.
    pub timeout_s: usize,
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
    /// `started` is the number of ranks that a launcher has started, where one has: they are all there is, so that
    /// what is left out follows from it.
    pub(super) fn read(section: &mut Section, started: Option<usize>) -> Result<Parallel, Error> {
        let written = section.optional_whole("data", 1, LARGEST)?;
        let parallel = Parallel {
            data: written.or(started).unwrap_or(1),
            batch_norm: section.choice("batch_norm", BatchNorm::Local)?,
            timeout_s: section.whole("timeout_s", 600, 1, WEEK)?,
        };
        section.finish()?;
        match started {
            Some(started) if started != parallel.data => {
                let problem = format!(
                    "is {}, but the launcher started {started} ranks: start {} of them, or leave it out",
                    parallel.data, parallel.data
                );
                Err(Error::Conflict { field: section.field("data"), problem })
            }
            _ => Ok(parallel),
        }
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

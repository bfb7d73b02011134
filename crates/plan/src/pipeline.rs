//! The stages of a model, and the order in which they work. A model on one rank is a pipeline of one stage.

use crate::error::Error;
use crate::schedule::{Schedule, ScheduleName, ScheduleOptions, Updates};

/// A model's stages and their order of work.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelinePlan {
    /// Pipeline stages: ranks that hold consecutive blocks of the model.
    pub stages: usize,
    /// Micro-batches of a batch that pass through them.
    pub micro_batches: usize,
    /// In which order they do.
    pub order: ScheduleSource,
    /// Steps after which one that never flushes runs empty, besides those after which it is evaluated or saved.
    pub drain: u64,
}

/// Where the order of work comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum ScheduleSource {
    /// A built-in schedule, by its name.
    Named {
        /// The name that a run file gives it.
        name: ScheduleName,
        /// Virtual stages on a rank, for interleaving.
        chunks: Option<usize>,
        /// Copies of the model, for Chimera.
        pipelines: Option<usize>,
    },
    /// The user's own, for one batch.
    Given(Box<Schedule>),
}

impl ScheduleSource {
    /// What a person calls it.
    pub fn name(&self) -> String {
        match self {
            ScheduleSource::Named { name, .. } => name.to_string(),
            ScheduleSource::Given(schedule) => schedule.name.clone(),
        }
    }

    /// When weights change.
    pub fn updates(&self) -> Updates {
        match self {
            ScheduleSource::Named { name, .. } => name.updates(),
            ScheduleSource::Given(schedule) => schedule.updates,
        }
    }

    /// The lists of so many stages for some batches in a row.
    pub fn schedule(&self, stages: usize, micro_batches: usize, batches: usize) -> Result<Schedule, Error> {
        match self {
            ScheduleSource::Given(schedule) => Ok((**schedule).clone()),
            &ScheduleSource::Named { name, chunks, pipelines } => {
                let options = ScheduleOptions {
                    batches,
                    chunks,
                    pipelines,
                    ..ScheduleOptions::new(stages, micro_batches)
                };
                name.schedule(&options).map_err(|error| Error::Ranks(error.to_string()))
            }
        }
    }
}

impl PipelinePlan {
    /// What the ranks of a pipeline do for so many batches in a row.
    pub fn schedule(&self, batches: usize) -> Result<Schedule, Error> {
        self.order.schedule(self.stages, self.micro_batches, batches)
    }

    /// When weights change.
    pub fn updates(&self) -> Updates {
        self.order.updates()
    }

    /// Whether a batch begins before the one before it has ended.
    pub fn is_asynchronous(&self) -> bool {
        self.updates() != Updates::Flush
    }

    /// What a person calls its order; none where there is one stage.
    pub fn name(&self) -> Option<String> {
        (self.stages > 1).then(|| self.order.name())
    }
}

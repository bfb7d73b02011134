//! At which steps the smoothness of a training is measured, and over how much.

use std::fmt;

use espalier_plan::Error;
use espalier_plan::config::reader::{MOST, Section};
use serde::Serialize;

/// `[smoothness]`: how a training is looked at, in this kind of study and in steps-to-result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Look {
    /// The first step that is measured, from 1.
    pub from: u64,
    /// Steps between two measures.
    pub every: u64,
    /// Training samples that gradients are over; none: all.
    pub samples: Option<usize>,
}

impl Look {
    /// Reads its fields of the section.
    pub fn read(section: &mut Section) -> Result<Look, Error> {
        let from = section.whole("from", 1, 1, MOST)? as u64;
        let every = section.whole("every", 16, 1, MOST)? as u64;
        let samples = section.whole("samples", 0, 0, MOST)?;
        Ok(Look { from, every, samples: Some(samples).filter(|samples| *samples > 0) })
    }

    /// Whether a step is one of those that are measured.
    pub(crate) fn has(self, step: u64) -> bool {
        step >= self.from && (step - self.from).is_multiple_of(self.every)
    }
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Look { from, every, samples } = self;
        write!(f, "step {from} and every {every}th from there over {samples:?}")
    }
}

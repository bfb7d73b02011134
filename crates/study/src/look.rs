//! At which steps the smoothness of a training is measured, and over how much.

use std::fmt;

use espalier_plan::config::reader::Values;
use espalier_plan::field::{Field, MOST, whole};
use serde::Serialize;

/// The fields of a [`Look`].
pub const LOOK: [Field; 3] =
    [whole("from", 1, 1, MOST), whole("every", 16, 1, MOST), whole("samples", 0, 0, MOST)];

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
    /// What its fields say.
    pub fn of(values: &Values) -> Look {
        let samples = Some(values.get("samples")).filter(|samples| *samples > 0);
        Look { from: values.get("from"), every: values.get("every"), samples }
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

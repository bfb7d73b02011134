//! At which steps the smoothness of a training is measured, and over how much.

use std::fmt;

use espalier_plan::config::reader::FieldValues;
use espalier_plan::field::{Field, MOST, integer};
use serde::Serialize;

/// The fields of a [`MeasureSchedule`].
pub(crate) const MEASURE_FIELDS: [Field; 3] =
    [integer("from", 1, 1, MOST), integer("every", 16, 1, MOST), integer("samples", 0, 0, MOST)];

/// `[smoothness]`: how the smoothness of a training is measured, in this kind of study and in steps-to-result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeasureSchedule {
    /// The first step that is measured, from 1.
    pub from: u64,
    /// Steps between two measures.
    pub every: u64,
    /// Training samples that gradients are over; none: all.
    pub samples: Option<usize>,
}

impl MeasureSchedule {
    /// What its fields say.
    pub fn of(values: &FieldValues) -> MeasureSchedule {
        let samples = Some(values.get("samples")).filter(|samples| *samples > 0);
        MeasureSchedule { from: values.get("from"), every: values.get("every"), samples }
    }

    /// Whether a step is one of those that are measured.
    pub(crate) fn measures(self, step: u64) -> bool {
        step >= self.from && (step - self.from).is_multiple_of(self.every)
    }
}

impl fmt::Display for MeasureSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MeasureSchedule { from, every, samples } = self;
        // Results that were kept before the first loss was measured by itself are not taken for these.
        let first = if *from > 1 { "the loss before the first step, " } else { "" };
        write!(f, "{first}step {from} and every {every}th from there over {samples:?}")
    }
}

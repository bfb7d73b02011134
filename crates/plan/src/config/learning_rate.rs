//! `[learning_rate]`: how large a step is. The schedule decides which other fields there are.

use super::Error;
use super::fields;
use super::reader::Section;
use crate::learning_rate::LearningRate;

impl LearningRate {
    pub(super) fn read(section: &mut Section, usual: f64) -> Result<LearningRate, Error> {
        let mut values = section.read_variant(fields::LEARNING_RATE, "cosine")?;
        values.set_left_out("peak", usual);
        let rate: LearningRate = values.all();
        if rate.warmup_from.is_some() && rate.warmup == 0 {
            return Err(section.no_effect("warmup_from", "with `learning_rate.warmup` = 0"));
        }
        Ok(rate)
    }
}

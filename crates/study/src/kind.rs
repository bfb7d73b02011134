//! What a study file asks for: its top field `kind`, by which the rest of the file is read.

use espalier_plan::Error;
use espalier_plan::config::reader::Section;
use espalier_plan::config::{self, Override};
use espalier_plan::field::word;
use serde::Deserialize;

/// The kinds of study.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StudyKind {
    /// How many steps a result takes, over batch sizes and sparsities.
    StepsToResult,
    /// How well large batches generalise, by what is done about them.
    GeneralisationGap,
    /// The largest batch that trains on from a checkpoint as well as the run's own.
    CriticalBatch,
    /// How fast the gradient turns along training, by sparsity.
    Smoothness,
}

impl StudyKind {
    /// The kind of a study file; without the field, steps-to-result.
    pub fn of(text: &str, overrides: &[Override]) -> Result<StudyKind, Error> {
        const KINDS: &[&str] = &["steps-to-result", "generalisation-gap", "critical-batch", "smoothness"];
        let kind = word("kind", KINDS[0], KINDS);
        let kind = Section::foreign("", &config::table(text, overrides)?).read_field(&kind)?;
        Ok(kind.expect("it has a default").try_into().expect("one of the words"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_there_is_not_is_met_with_the_nearest() {
        assert_eq!(StudyKind::of("name = \"x\"", &[]).unwrap(), StudyKind::StepsToResult);
        assert_eq!(StudyKind::of("kind = \"critical-batch\"", &[]).unwrap(), StudyKind::CriticalBatch);
        let message = StudyKind::of("kind = \"generalization-gap\"", &[]).unwrap_err().to_string();
        assert!(message.contains("did you mean `generalisation-gap`?"), "{message}");
    }
}

//! The study file of smoothness along training.

use espalier_plan::Error;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::field::any;

use crate::measure_schedule::{MEASURE_FIELDS, MeasureSchedule};
use crate::study_table::{StudyTable, in_run, missing, read_sparsities, refuse_given};

/// Which run is measured, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct SmoothnessStudy {
    /// What it is called, on pages and in folders.
    pub name: String,
    run: RunTable,
    pub sparsities: Vec<f64>,
    /// How often, and over how many samples.
    pub schedule: MeasureSchedule,
}

impl SmoothnessStudy {
    /// Reads a study file's text after putting in overrides of the form `a.b=c`.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<SmoothnessStudy, Error> {
        let file = StudyTable::parse(text, overrides, &["smoothness"])?;
        let run = file.run()?;
        let mut section = file.section("smoothness")?;
        let schedule = MeasureSchedule::of(&section.read(&[
            any("sparsities"),
            MEASURE_FIELDS[0],
            MEASURE_FIELDS[1],
            MEASURE_FIELDS[2],
        ])?);
        let sparsities = read_sparsities(&mut section)?;
        refuse_given(&run, &[("prune.sparsity", "`smoothness.sparsities`")])?;
        let study = SmoothnessStudy { name: file.name.clone(), run, sparsities, schedule };
        for &sparsity in &study.sparsities {
            study.run_file(sparsity)?;
        }
        Ok(study)
    }

    /// The run at a sparsity. What is dense is not pruned, whatever method the study names.
    pub fn run_file(&self, sparsity: f64) -> Result<RunFile, Error> {
        let run = self.run.clone();
        if sparsity == 0.0 {
            return run.dense().read().map_err(in_run);
        }
        if !run.has("prune") {
            return Err(missing("run.prune", &format!("a method for the sparsity of {sparsity}")));
        }
        run.with(&[Override::sparsity(sparsity)]).and_then(|run| run.read()).map_err(in_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        kind = "smoothness"
        name = "small"
        [run.model]
        name = "mlp"
        [run.data]
        kind = "shapes"
        [run.prune]
        method = "snip"
        [smoothness]
        sparsities = [0, 0.9]
        every = 4
    "#;

    fn with(overrides: &[&str]) -> Result<SmoothnessStudy, Error> {
        SmoothnessStudy::parse(TEXT, &overrides.iter().map(|&text| text.into()).collect::<Vec<_>>())
    }

    #[test]
    fn a_run_is_taken_at_every_sparsity() {
        let study = with(&[]).unwrap();
        assert_eq!(
            (&study.sparsities[..], study.schedule),
            (&[0.0, 0.9][..], MeasureSchedule { from: 1, every: 4, samples: None })
        );
        assert!(study.run_file(0.0).unwrap().prune.is_none());
        assert_eq!(study.run_file(0.9).unwrap().prune.unwrap().sparsity, 0.9);
        assert_eq!(with(&["smoothness.samples=10"]).unwrap().schedule.samples, Some(10));
    }

    #[test]
    fn what_is_wrong_is_said_with_the_field_as_the_file_has_it() {
        let message = |overrides: &[&str]| with(overrides).unwrap_err().to_string();
        let cases = [
            (
                &["smoothness.sparsities=[1.0]"][..],
                "`smoothness.sparsities` must be a list of numbers in [0, 1)",
            ),
            (&["smoothness.every=0"], "`smoothness.every` must be"),
            (&["smoothness.from=0"], "`smoothness.from` must be"),
            (&["smoothness.sample=3"], "did you mean `smoothness.samples`?"),
            (&["run.prune.sparsity=0.5"], "`run.prune.sparsity` has no effect in a study"),
            (&["run.model.nam=x"], "run.model.nam"),
        ];
        for (overrides, expected) in cases {
            assert!(message(overrides).contains(expected), "{overrides:?}: {}", message(overrides));
        }
        let dense = TEXT.replace("[run.prune]", "").replace("method = \"snip\"", "");
        let message = SmoothnessStudy::parse(&dense, &[]).unwrap_err().to_string();
        assert!(message.contains("run.prune"), "{message}");
    }
}

//! The study file of smoothness along training.

use espalier_plan::Error;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::field::{any, integer};

use crate::measure_schedule::{MEASURE_FIELDS, MeasureSchedule};
use crate::study_table::{StudyTable, in_run, missing, read_sparsities, refuse_given};

/// Which run is measured, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct SmoothnessStudy {
    /// What it is called, on pages and in folders.
    pub name: String,
    run: RunTable,
    pub sparsities: Vec<f64>,
    /// Runs of each, from the run's own seed on.
    pub seeds: u64,
    /// How often, and over how many samples.
    pub schedule: MeasureSchedule,
}

impl SmoothnessStudy {
    /// Reads a study file's text after putting in overrides of the form `a.b=c`.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<SmoothnessStudy, Error> {
        let file = StudyTable::parse(text, overrides, &["smoothness"])?;
        let run = file.run()?;
        let mut section = file.section("smoothness")?;
        let [from, every, samples] = MEASURE_FIELDS;
        let values =
            section.read(&[any("sparsities"), integer("seeds", 1, 1, 1000), from, every, samples])?;
        let sparsities = read_sparsities(&mut section)?;
        refuse_given(&run, &[("prune.sparsity", "`smoothness.sparsities`")])?;
        let (seeds, schedule) = (values.get("seeds"), MeasureSchedule::of(&values));
        let study = SmoothnessStudy { name: file.name.clone(), run, sparsities, seeds, schedule };
        for &sparsity in &study.sparsities {
            study.run_file(sparsity, 0)?;
        }
        Ok(study)
    }

    /// The run at a sparsity, with the seed so far behind its own. What is dense is not pruned, whatever
    /// method the study names.
    pub fn run_file(&self, sparsity: f64, number: u64) -> Result<RunFile, Error> {
        let mut run = self.run.clone();
        if sparsity == 0.0 {
            run = run.dense();
        } else if !run.has("prune") {
            return Err(missing("run.prune", &format!("a method for the sparsity of {sparsity}")));
        } else {
            run = run.with(&[Override::sparsity(sparsity)]).map_err(in_run)?;
        }
        let run = run.read().map_err(in_run)?;
        let seed = run.seed.wrapping_add(number);
        run.with(|run| run.seed = seed).map_err(in_run)
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
        assert!(study.run_file(0.0, 0).unwrap().prune.is_none());
        assert_eq!(study.run_file(0.9, 0).unwrap().prune.unwrap().sparsity, 0.9);
        let seeded = with(&["smoothness.seeds=3", "run.seed=7"]).unwrap();
        assert_eq!((study.seeds, seeded.seeds), (1, 3));
        assert_eq!([0, 2].map(|number| seeded.run_file(0.9, number).unwrap().seed), [7, 9]);
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
            (&["smoothness.seeds=0"], "`smoothness.seeds` must be"),
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

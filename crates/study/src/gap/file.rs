//! The study file of a generalisation gap.

use espalier_plan::Error;
use espalier_plan::config::reader::show;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::field::{Field, MOST, POSITIVE, any, integer, number, optional_number};
use toml::Value;

use crate::study_table::{StudyTable, in_run, missing, read_batches, refuse_given};

const GAP: &[Field] = &[
    any("batches"),
    integer("seeds", 1, 1, 1000),
    integer("samples", 1000, 1, MOST),
    number("epsilon", 1e-3, ("a number in (0, 1]", |x| x > 0.0 && x <= 1.0)),
    optional_number("loss", POSITIVE),
    integer("eval_every", 16, 1, MOST),
];

/// What an arm may say that is no field of the run file.
const TO_END: &str = "to_end";

/// What is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct GapStudy {
    /// What it is called, on pages and in folders.
    pub name: String,
    run: RunTable,
    pub batches: Vec<usize>,
    /// Changes of the run, the first of them usually none.
    pub arms: Vec<Arm>,
    /// Runs of each arm at each batch, which differ in their seed alone.
    pub seeds: u64,
    /// The training loss at which every run ends; none: each at the end of its own.
    pub loss: Option<f64>,
    /// Steps between two looks at it.
    pub eval_every: u64,
    /// Training samples that it and sharpness are measured over.
    pub samples: usize,
    /// The box that it is measured in.
    pub epsilon: f64,
}

/// Something that is done about large batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Arm {
    /// What it is called.
    pub name: String,
    /// Fields of the run file.
    pub changes: Vec<Override>,
    /// Whether it goes on to the end of its run, whatever its training loss.
    pub to_end: bool,
}

impl GapStudy {
    /// Reads a study file's text after putting in overrides of the form `a.b=c`.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<GapStudy, Error> {
        let file = StudyTable::parse(text, overrides, &["gap", "arms"])?;
        let run = file.run()?;
        let arms = read_arms(&file)?;
        let mut section = file.section("gap")?;
        let values = section.read(GAP)?;
        let study = GapStudy {
            name: file.name.clone(),
            run,
            arms,
            batches: read_batches(&mut section, "a list of batch sizes, such as [32, 1024]")?,
            seeds: values.get("seeds"),
            loss: values.find("loss"),
            eval_every: values.get("eval_every"),
            samples: values.get("samples"),
            epsilon: values.get("epsilon"),
        };
        study.check()?;
        Ok(study)
    }

    /// How many runs there are in all.
    pub fn runs(&self) -> usize {
        self.batches.len() * self.arms.len() * self.seeds as usize
    }

    /// The run file of an arm at a batch.
    pub fn run_file(&self, batch: usize, arm: &Arm, seed: u64) -> Result<RunFile, Error> {
        let overrides = [&[Override::batch(batch), Override::seed(seed)], &arm.changes[..]].concat();
        let arm_error = |error| match error {
            // What an arm writes is below its name.
            Error::UnknownField { field, hint } if arm.writes(&field) => {
                Error::UnknownField { field: format!("arms.{}.{field}", arm.name), hint }
            }
            Error::Value { field, expected, got, hint } if arm.writes(&field) => {
                Error::Value { field: format!("arms.{}.{field}", arm.name), expected, got, hint }
            }
            other => in_run(other),
        };
        self.run.clone().with(&overrides).and_then(|run| run.read()).map_err(arm_error)
    }

    /// Every arm at every batch must be a run.
    fn check(&self) -> Result<(), Error> {
        refuse_given(&self.run, &[("seed", "`gap.seeds`"), ("train.batch", "`gap.batches`")])?;
        if let (None, Some(arm)) = (self.loss, self.arms.iter().find(|arm| arm.to_end)) {
            let field = format!("arms.{}.{TO_END}", arm.name);
            let why = "without `gap.loss`: every run goes on to its end".into();
            return Err(Error::NoEffect { field, why });
        }
        for &batch in &self.batches {
            for arm in &self.arms {
                self.run_file(batch, arm, 0)?;
            }
        }
        Ok(())
    }
}

impl Arm {
    fn writes(&self, field: &str) -> bool {
        self.changes.iter().any(|change| change.field() == field)
    }
}

/// `[arms.NAME]`: of each a table of run-file fields, in sections or as quoted names.
fn read_arms(file: &StudyTable) -> Result<Vec<Arm>, Error> {
    let expected = "sections `[arms.NAME]` of run-file fields; an empty one is the run as it is";
    let arms = match file.get("arms") {
        Some(Value::Table(arms)) if !arms.is_empty() => arms,
        Some(other) => {
            let (field, expected, got) = ("arms".into(), expected.into(), show(other));
            return Err(Error::Value { field, expected, got, hint: None });
        }
        None => return Err(missing("arms", expected)),
    };
    let arm = |(name, value): (&String, &Value)| {
        let Value::Table(fields) = value else {
            let (field, got) = (format!("arms.{name}"), show(value));
            let expected = "a section of run-file fields".into();
            return Err(Error::Value { field, expected, got, hint: None });
        };
        let mut fields = fields.clone();
        let to_end = match fields.remove(TO_END) {
            None => false,
            Some(Value::Boolean(to_end)) => to_end,
            Some(other) => {
                let (field, got) = (format!("arms.{name}.{TO_END}"), show(&other));
                return Err(Error::Value { field, expected: "true or false".into(), got, hint: None });
            }
        };
        Ok(Arm { name: name.clone(), changes: Override::all_of(&fields), to_end })
    };
    arms.iter().map(arm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        kind = "generalisation-gap"
        name = "small"
        [run.model]
        name = "mlp"
        [run.data]
        kind = "shapes"
        [run.train]
        epochs = 2
        [run.optimizer]
        name = "momentum"
        [gap]
        batches = [32, 256]
        [arms.as-it-is]
        [arms.linear]
        learning_rate.scale_from_batch = 32
        [arms.lars]
        "optimizer.name" = "lars"
        [arms.longer]
        train.steps = 500
    "#;

    fn with(overrides: &[&str]) -> Result<GapStudy, Error> {
        GapStudy::parse(TEXT, &overrides.iter().map(|&text| text.into()).collect::<Vec<_>>())
    }

    #[test]
    fn an_arm_is_a_change_of_fields() {
        let gap = with(&[]).unwrap();
        let names: Vec<_> = gap.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["as-it-is", "lars", "linear", "longer"]);
        let run = |arm: usize| gap.run_file(256, &gap.arms[arm], 3).unwrap();
        assert_eq!((run(0).seed, run(0).train.batch), (3, 256));
        assert_eq!(run(2).to_toml().unwrap().matches("scale_from_batch = 32").count(), 1);
        let longer = run(3).to_toml().unwrap();
        assert!(longer.contains("steps = 500") && !longer.contains("epochs"), "{longer}");
        let gap = with(&["gap.loss=0.1", "arms.longer.to_end=true"]).unwrap();
        assert_eq!((gap.loss, gap.arms.iter().filter(|arm| arm.to_end).count()), (Some(0.1), 1));
        assert_eq!(gap.run_file(256, &gap.arms[3], 3).unwrap(), run(3), "no field of the run");
    }

    #[test]
    fn what_is_wrong_is_said_with_the_field_as_the_file_has_it() {
        let message = |overrides: &[&str]| with(overrides).unwrap_err().to_string();
        let cases = [
            (&["gap.batches=[]"][..], "`gap.batches` must be a list of batch sizes"),
            (&["gap.batches=[32,32]"], "`gap.batches` has 32 twice"),
            (&["gap.epsilon=0"], "`gap.epsilon` must be a number in (0, 1]"),
            (&["gap.seed=3"], "did you mean `gap.seeds`?"),
            (&["arms.linear.learning_rate.scale_from=3"], "arms.linear.learning_rate.scale_from"),
            (&["arms.lars.optimizer.trust=-1"], "arms.lars.optimizer.trust"),
            (&["gap.loss=0"], "`gap.loss` must be a number above 0"),
            (&["arms.longer.to_end=true"], "`arms.longer.to_end` has no effect without `gap.loss`"),
            (&["gap.loss=1", "arms.longer.to_end=3"], "`arms.longer.to_end` must be true or false, got 3"),
            (&["arms=3"], "`arms` must be sections `[arms.NAME]`"),
            (&["run.train.batch=3"], "`run.train.batch` has no effect in a study: `gap.batches` decides it"),
            (&["run.model.nam=x"], "run.model.nam"),
        ];
        for (overrides, expected) in cases {
            assert!(message(overrides).contains(expected), "{overrides:?}: {}", message(overrides));
        }
    }
}

//! The study file of branches.

use std::path::PathBuf;

use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::field::{Field, MOST, NOT_NEGATIVE, any, integer, number, optional_integer, text, word};
use espalier_plan::intervals::RunLength;
use espalier_plan::learning_rate::{LearningRate, RateDecay};
use espalier_plan::optimizer::OptimizerRule;
use espalier_plan::{Error, Plan};
use serde::Deserialize;
use toml::Table;

use crate::study_table::{StudyTable, in_run, positive_integer, read_list};

const BRANCH: &[Field] = &[
    text("from", "the folder of a checkpoint, or of a run"),
    any("at"),
    any("factors"),
    optional_integer("samples", 1, MOST),
    integer("seeds", 1, 1, 1000),
    word("rate", "", &["linear", "sqrt"]),
    number("tolerance", 0.01, NOT_NEGATIVE),
];

/// What is branched from where.
#[derive(Debug, Clone, PartialEq)]
pub struct BranchStudy {
    /// What it is called, on pages and in folders.
    pub name: String,
    run: RunTable,
    /// A checkpoint that branches begin at, or a run folder, whose newest is meant: the base run is not
    /// trained then, and `run` changes fields of its run file.
    pub from: Option<PathBuf>,
    /// Steps of the base run after which branches begin, ascending; none where a checkpoint says it.
    pub at: Vec<u64>,
    /// How many times the base run's batch a branch has, ascending from 1.
    pub factors: Vec<usize>,
    /// Samples that every branch sees; none: sixteen steps of the largest batch.
    samples: Option<usize>,
    /// How often each branch is trained, over samples in another order each time.
    pub seeds: u64,
    /// How the rate grows with the batch; none: as suits the optimizer.
    pub scaling: Option<Scaling>,
    /// How far above the loss of the base run's own batch that of another may be.
    pub tolerance: f64,
}

/// How a rate grows with the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Scaling {
    /// As the batch: for SGD, whose step is the gradient.
    #[serde(rename = "linear")]
    Linear,
    /// As its root: for Adam, whose step is the gradient over its noise.
    #[serde(rename = "sqrt")]
    Root,
}

impl Scaling {
    /// What suits a plan's optimizer.
    pub fn of(plan: &Plan) -> Scaling {
        match plan.optimization.optimizer.rule {
            OptimizerRule::Adam { .. } | OptimizerRule::AdamW { .. } | OptimizerRule::Lamb { .. } => {
                Scaling::Root
            }
            OptimizerRule::Sgd
            | OptimizerRule::Momentum { .. }
            | OptimizerRule::Nesterov { .. }
            | OptimizerRule::Lars { .. } => Scaling::Linear,
        }
    }

    /// What a rate is multiplied by.
    pub fn times(self, factor: usize) -> f64 {
        match self {
            Scaling::Linear => factor as f64,
            Scaling::Root => (factor as f64).sqrt(),
        }
    }

    /// As the file has it.
    pub fn name(self) -> &'static str {
        match self {
            Scaling::Linear => "linear",
            Scaling::Root => "sqrt",
        }
    }
}

impl BranchStudy {
    /// Reads a study file's text after putting in overrides of the form `a.b=c`.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<BranchStudy, Error> {
        let file = StudyTable::parse(text, overrides, &["branch"])?;
        let mut section = file.section("branch")?;
        let values = section.read(BRANCH)?;
        let from: Option<PathBuf> = values.find("from");
        let run = match (&from, file.run()) {
            (Some(_), Err(_)) => Table::new().into(),
            (_, run) => run?,
        };
        let mut at = match (&from, section.has("at")) {
            (Some(_), true) => {
                let why = "with `branch.from`: branches begin where the checkpoint is".into();
                return Err(Error::NoEffect { field: "branch.at".into(), why });
            }
            (Some(_), false) => Vec::new(),
            (None, _) => read_list(&mut section, "at", "a list of steps, such as [100, 1000]", |value| {
                positive_integer(value, MOST).map(|at| at as u64)
            })?,
        };
        let mut factors = read_list(
            &mut section,
            "factors",
            "a list of multiples of the batch with 1 among them, such as [1, 2, 4]",
            |value| positive_integer(value, 1 << 20),
        )?;
        at.sort_unstable();
        factors.sort_unstable();
        if factors[0] != 1 {
            let problem = "has no 1: branches are compared with the one at the base run's own batch".into();
            return Err(Error::Conflict { field: "branch.factors".into(), problem });
        }
        let study = BranchStudy {
            name: file.name.clone(),
            run,
            from,
            at,
            factors,
            samples: values.find("samples"),
            seeds: values.get("seeds"),
            scaling: values.find("rate"),
            tolerance: values.get("tolerance"),
        };
        if study.from.is_none() {
            study.base_run_file(None)?;
        }
        Ok(study)
    }

    /// The run file of the base run: the study's own, or that of its checkpoint's run with what the study
    /// changes.
    pub(crate) fn base_run_file(&self, of_checkpoint: Option<&str>) -> Result<RunFile, Error> {
        let base = match of_checkpoint {
            None => self.run.read(),
            Some(text) => RunFile::parse(text, &Override::all_of(self.run.fields())),
        };
        let base = base.map_err(in_run)?;
        let samples = self.samples(base.train.batch);
        let mut batches = self.factors.iter().map(|factor| base.train.batch * factor);
        if let Some(batch) = batches.find(|batch| !samples.is_multiple_of(*batch)) {
            let problem = format!("is {samples}, no whole number of batches of {batch} samples");
            return Err(Error::Conflict { field: "branch.samples".into(), problem });
        }
        Ok(base)
    }

    /// Points of the base run that branches leave.
    pub fn points(&self) -> usize {
        self.at.len().max(1)
    }

    /// Samples that every branch of a base run of this batch sees.
    pub fn samples(&self, batch: usize) -> usize {
        self.samples.unwrap_or(16 * batch * self.factors.last().expect("there is a 1"))
    }

    /// The run file of a branch from a base run that begins after so many steps: its rate is that of the base
    /// run there, scaled and constant.
    pub fn branch(
        &self,
        base: &RunFile,
        factor: usize,
        after: u64,
        rate: f64,
        seed: u64,
    ) -> Result<RunFile, Error> {
        let batch = factor * base.train.batch;
        base.with(|run| {
            let steps = after as usize + self.samples(base.train.batch) / batch;
            (run.seed, run.train.batch, run.train.length) = (seed, batch, RunLength::Steps(steps));
            run.learning_rate = LearningRate {
                peak: rate,
                warmup: 0,
                warmup_from: None,
                scale_from_batch: None,
                by_density: 0.0,
                schedule: RateDecay::Constant,
            };
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        kind = "critical-batch"
        name = "small"
        [run.model]
        name = "mlp"
        [run.data]
        kind = "shapes"
        [run.train]
        batch = 8
        steps = 100
        [run.learning_rate]
        peak = 0.01
        warmup = 10
        [branch]
        at = [40, 20]
        factors = [4, 1, 2]
        samples = 64
    "#;

    fn with(overrides: &[&str]) -> Result<BranchStudy, Error> {
        BranchStudy::parse(TEXT, &overrides.iter().map(|&text| text.into()).collect::<Vec<_>>())
    }

    #[test]
    fn a_branch_is_the_run_at_another_batch_and_a_constant_rate() {
        let study = with(&[]).unwrap();
        assert_eq!((&study.at[..], &study.factors[..]), (&[20, 40][..], &[1, 2, 4][..]));
        let base = study.base_run_file(None).unwrap();
        let branch = study.branch(&base, 4, 20, 0.02, 7).unwrap();
        assert_eq!((branch.train.batch, branch.seed), (32, 7));
        let text = branch.to_toml().unwrap();
        assert!(text.contains("steps = 22") && text.contains("peak = 0.02"), "{text}");
        assert!(text.contains("schedule = \"constant\"") && text.contains("warmup = 0"), "{text}");
        assert_eq!(with(&["branch.samples=96"]).unwrap().samples(8), 96);
        let usual = TEXT.replace("samples = 64", "");
        assert_eq!(BranchStudy::parse(&usual, &[]).unwrap().samples(8), 16 * 32);
        assert_eq!((study.seeds, study.points()), (1, 2));
    }

    #[test]
    fn a_checkpoints_run_is_taken_with_what_the_study_changes() {
        let text = r#"
            kind = "critical-batch"
            name = "small"
            [branch]
            from = "out/hello"
            factors = [1, 2]
            samples = 64
        "#;
        let study = BranchStudy::parse(text, &["run.train.micro_batches=2".into()]).unwrap();
        assert_eq!((study.from.as_deref(), study.points()), (Some(std::path::Path::new("out/hello")), 1));
        let run_toml = "[model]\nname = \"mlp\"\n[data]\nkind = \"shapes\"\n[train]\nbatch = 8\nsteps = 10";
        let base = study.base_run_file(Some(run_toml)).unwrap();
        assert_eq!((base.train.batch, base.train.micro_batches), (8, 2));
        let large =
            study.base_run_file(Some(&run_toml.replace("batch = 8", "batch = 48"))).unwrap_err().to_string();
        assert!(
            large.contains("`branch.samples` is 64, no whole number of batches of 48 samples"),
            "{large}"
        );
    }

    #[test]
    fn rates_grow_as_suits_the_optimizer() {
        assert_eq!((Scaling::Root.times(4), Scaling::Linear.times(4)), (2.0, 4.0));
        let facts = espalier_plan::DataFacts { vocab: None, image: Some((16, 16, 3)), classes: Some(10) };
        let of = |optimizer: &str| {
            let run =
                with(&[&format!("run.optimizer.name={optimizer}")]).unwrap().base_run_file(None).unwrap();
            Scaling::of(&Plan::new(run, facts).unwrap()).name()
        };
        assert_eq!(
            ["sgd", "momentum", "lars", "adam", "adamw", "lamb"].map(of),
            ["linear", "linear", "linear", "sqrt", "sqrt", "sqrt"]
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_the_field_as_the_file_has_it() {
        let message = |overrides: &[&str]| with(overrides).unwrap_err().to_string();
        let cases = [
            (&["branch.at=[]"][..], "`branch.at` must be a list of steps"),
            (&["branch.at=[0]"], "`branch.at` must be a list of steps"),
            (&["branch.factors=[2,4]"], "`branch.factors` has no 1"),
            (&["branch.samples=100"], "`branch.samples` is 100, no whole number of batches of 8 samples"),
            (&["branch.rate=cubic"], "`branch.rate` must be \"linear\" or \"sqrt\""),
            (&["branch.tolerance=-1"], "`branch.tolerance` must be a number of at least 0"),
            (&["branch.from=out/hello"], "`branch.at` has no effect with `branch.from`"),
            (&["branch.seeds=0"], "`branch.seeds` must be"),
            (&["branch.tolerence=1"], "did you mean `branch.tolerance`?"),
            (&["run.model.nam=x"], "run.model.nam"),
        ];
        for (overrides, expected) in cases {
            assert!(message(overrides).contains(expected), "{overrides:?}: {}", message(overrides));
        }
    }
}

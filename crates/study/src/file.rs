//! The study file: an ordinary run file without what the study varies, the batch sizes and sparsities, the
//! goal, and where hyperparameters are searched.
//!
//! Read with the machinery of run files, so mistakes get the same sentences. Nothing here touches the disk.
//! `docs/study.md` has a line for each field.

use espalier_plan::Error;
use espalier_plan::config::reader::Section;
use espalier_plan::config::{Override, RunFile, RunTable};
use espalier_plan::field::{
    Field, MOST, POSITIVE, any, flag, integer, optional_integer, optional_number, word,
};
use serde::{Deserialize, Serialize};
use toml::Value;

use crate::measure_schedule::{MEASURE_FIELDS, MeasureSchedule};
use crate::range::{self, SearchRange};
use crate::sobol;
use crate::study_table::{StudyTable, in_run, missing, read_batches, read_sparsities, refuse_given};
use crate::workload::{TrialSettings, of_pruning};

/// Fields that a study gives each of its runs, and the field of the study that says what.
const GIVEN: [(&str, &str); 6] = [
    ("seed", "the trial's number"),
    ("train.batch", "`cells.batches`"),
    ("train.steps", "`search.steps`"),
    ("train.epochs", "`search.steps`"),
    ("train.eval_every", "`search.eval_every`"),
    ("prune.sparsity", "`cells.sparsities`"),
];

/// A best trial is repeated less often than this.
pub(crate) const MOST_SEEDS: u32 = 32;

const CELLS: &[Field] = &[any("batches"), any("sparsities")];

const GOAL: &[Field] = &[
    optional_number("error", ("an error rate, in (0, 1)", |x| x > 0.0 && x < 1.0)),
    optional_number("loss", POSITIVE),
];

const SEARCH: &[Field] = &[
    word("method", "sobol", &["sobol", "halving"]),
    flag("cut", true),
    integer("trials", 100, 1, 1 << 20),
    optional_integer("steps", 1, MOST).or_missing("the most steps of a trial"),
    integer("eval_every", 16, 1, MOST),
    integer("seeds", 0, 0, MOST_SEEDS as usize - 1),
    integer("finalists", 1, 1, 1 << 20),
    any("ranges"),
];

/// What is measured, over which cells, and how it is searched.
#[derive(Debug, Clone, PartialEq)]
pub struct Study {
    /// What it is called, on pages and in folders.
    pub name: String,
    /// The run file of its trials, without what it varies.
    run: RunTable,
    /// Every batch size with every sparsity, sparsity by sparsity.
    pub cells: Vec<Cell>,
    /// What a trial must reach.
    pub goal: Goal,
    /// How hyperparameters are found.
    pub search: SearchConfig,
    /// How the smoothness of the best trials is measured once they are known, where it is.
    pub smoothness: Option<MeasureSchedule>,
}

/// A batch size at a sparsity: what has a K*.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cell {
    /// Samples in a step.
    pub batch: usize,
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
}

/// A value of validation that counts as the result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// A fraction of samples that are answered wrongly.
    Error(f64),
    /// A mean loss.
    Loss(f64),
}

/// `[search]`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchConfig {
    /// Whether every trial runs until nothing can come of it any more, or the slow ones are stopped.
    pub method: SearchMethod,
    /// Whether a trial that has taken as many steps as the best of its cell is left there, which changes no K*.
    pub cut: bool,
    /// Trials of each cell.
    pub trials: u32,
    /// Steps after which a trial is incomplete.
    pub steps: u64,
    /// Steps between validations: what K* is a multiple of.
    pub eval_every: u64,
    /// How often a finalist is run again, each time with another seed.
    pub seeds: u32,
    /// How many of the first trials of each cell are.
    pub finalists: u32,
    /// The hyperparameters.
    pub ranges: Vec<SearchRange>,
}

/// How the trials of a cell are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SearchMethod {
    /// All of them, each until it reaches the goal, has spent its steps, or cannot lower K* any more.
    Sobol,
    /// All of them side by side, and on the way to the goal fewer and fewer (see [`crate::bracket`]).
    Halving,
}

impl Goal {
    /// The number to reach.
    pub fn value(self) -> f64 {
        match self {
            Goal::Error(value) | Goal::Loss(value) => value,
        }
    }

    /// `error` or `loss`.
    pub fn name(self) -> &'static str {
        match self {
            Goal::Error(_) => "error",
            Goal::Loss(_) => "loss",
        }
    }
}

impl Study {
    /// Reads a study file's text after putting in overrides of the form `a.b=c`.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<Study, Error> {
        let file = StudyTable::parse(text, overrides, &["cells", "goal", "search", "smoothness"])?;
        let study = Study {
            run: file.run()?,
            cells: read_cells(&mut file.section("cells")?)?,
            goal: read_goal(&mut file.section("goal")?)?,
            search: read_search(&mut file.section("search")?)?,
            smoothness: match file.get("smoothness") {
                Some(_) => Some(MeasureSchedule::of(&file.section("smoothness")?.read(&MEASURE_FIELDS)?)),
                None => None,
            },
            name: file.name,
        };
        study.check()?;
        Ok(study)
    }

    /// The run file of a trial. Its errors name fields as the study file has them. What is dense is not
    /// pruned, whatever method the study names.
    pub fn run_file(&self, settings: &TrialSettings) -> Result<RunFile, Error> {
        let mut run = self.run.clone();
        if settings.sparsity == 0.0 {
            run = run.dense();
        }
        let mut overrides = settings.overrides();
        overrides.push(Override::steps(self.search.steps));
        run.with(&overrides).and_then(|run| run.read()).map_err(in_run)
    }

    /// The run file that all trials have in common: what they are of, and how long they may take.
    pub fn common_run(&self) -> Result<RunFile, Error> {
        let steps = [Override::steps(self.search.steps)];
        self.run.clone().with(&steps).and_then(|run| run.read()).map_err(in_run)
    }

    /// The hyperparameters of a cell's trial, of which the seed is the number.
    pub fn settings(&self, cell: Cell, number: u32, ranges: &[SearchRange]) -> TrialSettings {
        let point = sobol::point(number, ranges.len());
        let searched = |range: &SearchRange| cell.sparsity > 0.0 || !of_pruning(&range.field);
        let fields = ranges.iter().zip(point).filter(|(range, _)| searched(range));
        let fields = fields.map(|(range, at)| (range.field.clone(), range.at(at)));
        TrialSettings {
            batch: cell.batch,
            sparsity: cell.sparsity,
            seed: number.into(),
            fields: fields.collect(),
        }
    }

    pub fn largest_batch(&self) -> usize {
        self.cells.iter().map(|cell| cell.batch).max().unwrap_or(0)
    }

    /// The sparsities, each once, in the order of the file.
    pub fn sparsities(&self) -> Vec<f64> {
        let mut sparsities = Vec::new();
        for cell in &self.cells {
            if !sparsities.contains(&cell.sparsity) {
                sparsities.push(cell.sparsity);
            }
        }
        sparsities
    }

    /// What makes results comparable, as a hash: all but the names, how many trials and cells there are, and
    /// what computes them. So a study can be given more of both, and go on elsewhere.
    pub fn fingerprint(&self) -> String {
        let mut run = self.run.fields().clone();
        run.remove("device");
        let SearchConfig { method, cut, steps, eval_every, ranges, .. } = &self.search;
        let mut same = serde_json::json!({
            "run": run.to_string(), "goal": self.goal, "method": method, "steps": steps, "eval_every": eval_every, "ranges": ranges,
        });
        // A trial that was cut has come to its end, and would not be run out by a study that wants all of them.
        if !cut {
            same["cut"] = false.into();
        }
        blake3::hash(same.to_string().as_bytes()).to_hex()[..16].to_string()
    }

    /// What no section can see alone: the run file must do without what the study gives, and every trial of
    /// it must be a run.
    fn check(&self) -> Result<(), Error> {
        refuse_given(&self.run, &GIVEN)?;
        if self.run.has("parallel") {
            let problem =
                "is not allowed in a study: a trial runs on one rank, and trials run concurrently".into();
            return Err(Error::Conflict { field: "run.parallel".into(), problem });
        }
        if let Some(cell) = self.cells.iter().find(|cell| cell.sparsity > 0.0)
            && !self.run.has("prune")
        {
            let expected = format!("a method for the sparsity of {} in `cells.sparsities`", cell.sparsity);
            return Err(missing("run.prune", &expected));
        }
        for range in &self.search.ranges {
            if self.run.has(&range.field) {
                let why = format!("in a study that searches it: `search.ranges.{}` decides it", range.field);
                return Err(Error::NoEffect { field: format!("run.{}", range.field), why });
            }
        }
        // Both ends of every range, in every cell: what a run file refuses is refused now.
        for &cell in &self.cells {
            for corner in [0.0, 1.0] {
                let fields = self.search.ranges.iter().map(|range| (range.field.clone(), range.at(corner)));
                let fields = fields.collect();
                self.run_file(&TrialSettings {
                    batch: cell.batch,
                    sparsity: cell.sparsity,
                    seed: 1,
                    fields,
                })?;
            }
        }
        Ok(())
    }
}

fn read_cells(section: &mut Section) -> Result<Vec<Cell>, Error> {
    section.read(CELLS)?;
    let batches = read_batches(section, "a list of batch sizes, such as [16, 64]")?;
    let sparsities = read_sparsities(section)?;
    let with = |&sparsity: &f64| {
        let cell = move |&batch: &usize| Cell { batch, sparsity };
        batches.iter().map(cell).collect::<Vec<_>>()
    };
    Ok(sparsities.iter().flat_map(with).collect())
}

fn read_goal(section: &mut Section) -> Result<Goal, Error> {
    let values = section.read(GOAL)?;
    match (values.find("error"), values.find("loss")) {
        (Some(error), None) => Ok(Goal::Error(error)),
        (None, Some(loss)) => Ok(Goal::Loss(loss)),
        (None, None) => Err(missing("goal.error", "the validation error to reach (or `goal.loss`)")),
        (Some(_), Some(_)) => {
            let problem = "and `goal.error` exclude each other: a study has one goal".into();
            Err(Error::Conflict { field: "goal.loss".into(), problem })
        }
    }
}

fn read_search(section: &mut Section) -> Result<SearchConfig, Error> {
    let values = section.read(SEARCH)?;
    let (steps, eval_every) = (values.get("steps"), values.get("eval_every"));
    if eval_every > steps {
        let problem = format!("is {eval_every}, above `search.steps` = {steps}: no trial would be measured");
        return Err(Error::Conflict { field: "search.eval_every".into(), problem });
    }
    let ranges = match section.get("ranges") {
        Some(Value::Table(ranges)) => range::read_all("search.ranges", ranges)?,
        Some(other) => return Err(section.wrong("ranges", "a section, `[search.ranges]`", other)),
        None => Vec::new(),
    };
    if ranges.is_empty() {
        return Err(missing(
            "search.ranges",
            "the hyperparameters to search, as in \"learning_rate.peak\" = { log = [1e-4, 1.0] }",
        ));
    }
    for (index, range) in ranges.iter().enumerate() {
        if ranges[..index].iter().any(|before| before.field == range.field) {
            let problem = format!("has `{}` twice, in quotes and as a section", range.field);
            return Err(Error::Conflict { field: "search.ranges".into(), problem });
        }
    }
    if ranges.len() > sobol::DIMENSIONS {
        let problem =
            format!("has {} fields, and points are known for {} at most", ranges.len(), sobol::DIMENSIONS);
        return Err(Error::Conflict { field: "search.ranges".into(), problem });
    }
    let (method, cut, trials) = (values.get("method"), values.get("cut"), values.get("trials"));
    let (seeds, finalists): (u32, u32) = (values.get("seeds"), values.get("finalists"));
    if finalists > 1 && seeds == 0 {
        let problem = "is how many trials are run again with other seeds, and `search.seeds` is 0".into();
        return Err(Error::Conflict { field: "search.finalists".into(), problem });
    }
    Ok(SearchConfig { method, cut, trials, steps, eval_every, seeds, finalists, ranges })
}

#[cfg(test)]
mod tests;

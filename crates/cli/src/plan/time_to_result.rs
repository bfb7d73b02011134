//! `espalier plan --study`, `--steps-to-result` and `--tokens`: how long a result takes, on how many GPUs, at
//! which batch and pruned how far. The steps are a study's or a person's, the time of a step is the search's.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use clap::Args;
use espalier_plan::Plan;
use espalier_plan::config::{RunFile, RunTable};
use espalier_plan::search::LayoutSearch;
use espalier_plan::simulate::{Estimate, Simulation};
use espalier_plan::spec::Input;
use espalier_plan::time_to_result::{ConvergenceCurve, ResultChoice, ResultTimes};
use espalier_study::StudyFolder;
use espalier_study::summary::CellSummary;
use espalier_train::Error;
use rayon::prelude::*;
use serde_json::Value;

use super::ranges::{amount, doublings, sparsities};
use super::{PlanArguments, PlanRequest, with_sparsity, wrong};
use crate::output::{on_standard_output, print_err};
use crate::run_file::{conflict, in_file, resolve};
use crate::spinner::Spinner;
use crate::time_to_result;

/// GPUs that are considered of a cluster of any size, unless somebody says how many.
const MOST_GPUS: usize = 1024;

/// Fields of the run file that a study's steps depend on beside the network, which must be the same.
const NOTED: [&str; 4] = ["data.", "optimizer.name", "train.precision", "prune.method"];

#[derive(Args)]
pub struct ResultArguments {
    /// Time to the result of a study: its steps times the time of a step, for every batch size, sparsity and
    /// number of GPUs. A folder that `espalier study` wrote; without a run file its own is planned.
    #[arg(long, value_name = "DIR", help_heading = "Time to result")]
    study: Option<PathBuf>,
    /// The same for c1/B + c2 steps at a batch B; may be repeated, once for each sparsity [default sparsity:
    /// that of the run file].
    #[arg(long, value_name = "C1,C2[,SPARSITY]", conflicts_with = "study", help_heading = "Time to result")]
    steps_to_result: Vec<String>,
    /// The same for so many tokens, as in 300B, whatever the batch.
    #[arg(long, value_name = "N", conflicts_with_all = ["study", "steps_to_result"], help_heading = "Time to result")]
    tokens: Option<String>,
    /// Batch sizes, as in `256,512` or, for powers of two, `64..4096` [default: from those of the study to 16
    /// times the critical batch; that of the run file where there is none].
    #[arg(long, value_name = "N[,N...]|A..B", help_heading = "Time to result")]
    batches: Option<String>,
    /// Price of an hour of a GPU [default: that of the cluster file].
    #[arg(long, value_name = "PRICE", help_heading = "Time to result")]
    pub price_per_gpu_hour: Option<f64>,
    /// Save the answer in a folder, of which `espalier report` makes a page.
    #[arg(long, value_name = "DIR", help_heading = "Time to result")]
    pub save: Option<PathBuf>,
}

impl ResultArguments {
    /// Whether it is asked for.
    pub fn is_asked(&self) -> bool {
        self.study.is_some() || !self.steps_to_result.is_empty() || self.tokens.is_some()
    }

    /// The folder of the study.
    pub fn study(&self) -> Option<&Path> {
        self.study.as_deref()
    }

    /// Refuses what is for a time to a result alone, and what is for one layout, each where it is for nothing.
    pub fn check(&self, arguments: &PlanArguments) -> Result<()> {
        if let Some(price) = self.price_per_gpu_hour.filter(|price| !(price.is_finite() && *price >= 0.0)) {
            let expected = "a number of at least 0";
            return Err(wrong("--price-per-gpu-hour", expected, &price.to_string(), None).into());
        }
        let given = match self.is_asked() {
            false => vec![
                ("--batches", self.batches.is_some()),
                ("--price-per-gpu-hour", self.price_per_gpu_hour.is_some()),
                ("--save", self.save.is_some()),
            ],
            true => vec![
                ("--fits", arguments.fits.is_some()),
                ("--compare", !arguments.compare.is_empty()),
                ("--apply", arguments.apply.is_some()),
                ("--trace", arguments.trace.is_some()),
                ("--explain-memory", arguments.explain_memory),
                ("--engine", arguments.engine.len() > 1),
            ],
        };
        let Some((option, _)) = given.into_iter().find(|(_, given)| *given) else { return Ok(()) };
        let problem = match self.is_asked() {
            false => "is for a time to result: add --study, --steps-to-result or --tokens",
            true if option == "--engine" => "is a list, and a time to result is of one training system",
            true => "is for one batch and one sparsity, and not for a time to result",
        };
        Err(conflict(option, problem).into())
    }
}

/// The run of a study, where no run file is named.
pub fn study_run(folder: &Path) -> Result<RunTable> {
    let (run, _) = open_study(folder)?;
    Ok(RunTable::of(&run).map_err(Error::Plan)?)
}

fn open_study(folder: &Path) -> Result<(RunFile, espalier_study::StudySummary)> {
    let mut study = StudyFolder::open(folder)?;
    let opened = study.steps_to_result()?;
    let problem = format!("is {}, of another kind than steps-to-result: it has no K*", study.name());
    Ok(opened.ok_or_else(|| conflict("--study", &problem))?)
}

/// What is known of the steps.
struct KnownSteps {
    curves: Vec<ConvergenceCurve>,
    notes: Vec<String>,
}

/// Searches, prints, writes.
pub fn answer(request: &PlanRequest) -> Result<Value> {
    let arguments = &request.arguments.result;
    let KnownSteps { curves, mut notes } = known_steps(request)?;
    let gpus = gpus(request)?;
    let chosen = arguments.batches.as_deref().map(|text| doublings("--batches", text)).transpose()?;
    let mut runs = Vec::new();
    for curve in &curves {
        let path = request.arguments.run_file();
        let run = with_sparsity(&request.run, path, Some(curve.sparsity))?;
        let run = resolve(run, path)?.single_rank();
        let batches = chosen.clone().or_else(|| curve.batches());
        let batches = batches.unwrap_or_else(|| vec![request.plan.batch.samples]);
        runs.extend(batches.into_iter().map(|batch| BatchSearch { curve, run: run.clone(), batch }));
    }
    let spinner = Mutex::new(Spinner::new(runs.len()));
    let search = |search: &BatchSearch| {
        let what =
            format!("searching layouts for batch {}, sparsity {}", search.batch, search.curve.sparsity);
        spinner.lock().unwrap_or_else(PoisonError::into_inner).next(&what);
        search.run(request, &gpus)
    };
    let found: Vec<_> = runs.par_iter().map(search).collect();
    drop(spinner);
    let mut result = ResultTimes {
        model: request.plan.model.name.clone(),
        cluster: request.cluster.name.clone(),
        device: request.cluster.device.name.clone(),
        engine: request.engine.name.into(),
        curves: curves.clone(),
        points: Vec::new(),
        notes: Vec::new(),
    };
    let mut misses: Vec<(usize, Error)> = Vec::new();
    for (search, found) in runs.iter().zip(found) {
        for (number, estimate) in gpus.iter().zip(found) {
            match estimate {
                Ok(best) => result.points.push(ResultChoice::new(
                    search.curve,
                    search.batch,
                    *number,
                    &best,
                    &request.cluster,
                )),
                Err(why) => misses.push((*number, why)),
            }
        }
    }
    result.sort();
    for &number in &gpus {
        // The last is that of the largest batch, which most GPUs can split.
        let why = misses.iter().rev().find(|(gpus, _)| *gpus == number);
        if let Some((_, why)) = why.filter(|_| result.points.iter().all(|point| point.gpus != number)) {
            notes.push(format!("nothing runs on {}: {why}", time_to_result::devices(number)));
        }
    }
    if result.points.is_empty() {
        let (_, why) = misses.pop().expect("nothing was found because of something");
        return Err(why.into());
    }
    result.notes = notes;
    show(request, &result)
}

/// Prints and writes what was found.
fn show(request: &PlanRequest, result: &ResultTimes) -> Result<Value> {
    for note in &result.notes {
        print_err!("note: {note}");
    }
    on_standard_output(time_to_result::text(result));
    let value = time_to_result::value(result);
    if let Some(output) = &request.outputs.svg {
        output.finish(&time_to_result::figure(result).svg())?;
        print_err!("figure: {}", output.file().display());
    }
    if let (Some(output), Some(folder)) = (&request.outputs.save, &request.arguments.result.save) {
        output.finish(&format!("{value}\n"))?;
        let folder = folder.display();
        print_err!("{folder} has the answer; `espalier report {folder}` makes a page of it");
    }
    Ok(value)
}

/// A batch at a sparsity, for all numbers of GPUs.
struct BatchSearch<'a> {
    curve: &'a ConvergenceCurve,
    /// The run at that sparsity, on one rank.
    run: RunFile,
    batch: usize,
}

impl BatchSearch<'_> {
    /// The fastest layout that fits for each number of GPUs, or why there is none.
    fn run(&self, request: &PlanRequest, gpus: &[usize]) -> Vec<Result<Estimate, Error>> {
        let edited = self.run.with(|run| (run.train.batch, run.train.micro_batches) = (self.batch, 1));
        let plan = match edited.and_then(|run| Plan::new(run, request.plan.facts)) {
            Ok(plan) => plan,
            Err(why) => return gpus.iter().map(|_| Err(why.clone().into())).collect(),
        };
        let job = Simulation::new(&plan, &request.cluster, request.engine);
        let search = |&devices: &usize| {
            let found = LayoutSearch { job: &job, devices, fixed: &request.fixed, rows: 1 }.run()?;
            found.ranked.into_iter().next().ok_or_else(|| {
                let needed = found.smallest.map_or(String::new(), |smallest| {
                    format!(": at least {:.1} GB are needed", smallest.memory as f64 / 1e9)
                });
                let gb = request.cluster.memory() as f64 / 1e9;
                conflict("model", &format!("does not fit on {devices} devices of {gb:.1} GB{needed}"))
            })
        };
        gpus.iter().map(search).collect()
    }
}

/// Numbers of GPUs: those that were asked for, or powers of two up to the size of the cluster.
fn gpus(request: &PlanRequest) -> Result<Vec<usize>> {
    let arguments = request.arguments;
    if arguments.sweep.is_some() || !arguments.gpus.is_empty() {
        return request.devices();
    }
    let node = request.cluster.node.devices;
    let size = match (request.cluster.network, request.cluster.nodes) {
        (None, _) => Some(node),
        (Some(_), nodes) => nodes.map(|nodes| nodes.saturating_mul(node)),
    };
    let most = size.unwrap_or(MOST_GPUS.max(node));
    let doubled = std::iter::successors(Some(1usize), |number| number.checked_mul(2));
    let mut all: Vec<usize> = doubled.take_while(|number| *number <= most).collect();
    all.extend(size.filter(|size| all.last() != Some(size)));
    Ok(all)
}

/// The steps of what was asked for, at the sparsities that were asked for.
fn known_steps(request: &PlanRequest) -> Result<KnownSteps> {
    let arguments = &request.arguments.result;
    let own = request.plan.pruning.as_ref().map_or(0.0, |pruning| pruning.sparsity);
    let mut known = match (&arguments.study, &arguments.tokens) {
        (Some(folder), _) => of_study(request, folder)?,
        (None, Some(tokens)) => {
            let Input::Tokens { seq, .. } = request.plan.model.input else {
                return Err(conflict("--tokens", "counts tokens, and this run learns from images").into());
            };
            let samples = amount("--tokens", tokens)? / seq as f64;
            KnownSteps { curves: vec![ConvergenceCurve::given(own, samples, 0.0)], notes: Vec::new() }
        }
        (None, None) => {
            let given = arguments.steps_to_result.iter().map(|text| constants(text, own));
            KnownSteps { curves: given.collect::<Result<_>>()?, notes: Vec::new() }
        }
    };
    for (index, curve) in known.curves.iter().enumerate() {
        if known.curves[..index].iter().any(|before| before.sparsity == curve.sparsity) {
            let problem = format!("has two curves for a sparsity of {}", curve.sparsity);
            return Err(conflict("--steps-to-result", &problem).into());
        }
    }
    if let Some(text) = request.arguments.sparsity.as_deref().filter(|_| arguments.study.is_some()) {
        let wanted = sparsities(text)?;
        let all: Vec<String> = known.curves.iter().map(|curve| curve.sparsity.to_string()).collect();
        known.curves.retain(|curve| wanted.contains(&curve.sparsity));
        if known.curves.is_empty() {
            let expected = format!("one that the study has: {}", all.join(", "));
            return Err(wrong("--sparsity", &expected, text, None).into());
        }
    }
    Ok(known)
}

/// `36230,158` or `104910,298,0.9`
fn constants(text: &str, own: f64) -> Result<ConvergenceCurve> {
    let refuse = |expected: &str| wrong("--steps-to-result", expected, text, None);
    let numbers: Option<Vec<f64>> =
        text.split(',').map(|number| number.trim().parse().ok().filter(|x: &f64| x.is_finite())).collect();
    let (c1, c2, sparsity) = match numbers.as_deref() {
        Some([c1, c2]) => (*c1, *c2, own),
        Some([c1, c2, sparsity]) => (*c1, *c2, *sparsity),
        _ => return Err(refuse("C1,C2 or C1,C2,SPARSITY, as in 36230,158,0.9").into()),
    };
    if c1 < 0.0 || c2 < 0.0 || c1 + c2 == 0.0 {
        return Err(refuse("two numbers of at least 0, not both 0: steps are c1/B + c2").into());
    }
    if !(0.0..1.0).contains(&sparsity) {
        return Err(refuse("a sparsity in [0, 1)").into());
    }
    Ok(ConvergenceCurve::given(sparsity, c1, c2))
}

/// The curves of a study, and what of it is missing.
fn of_study(request: &PlanRequest, folder: &Path) -> Result<KnownSteps> {
    let (studied, summary) = open_study(folder)?;
    let mut notes = differences(request, &studied)?;
    let names = |cells: &[&CellSummary]| {
        let name = |cell: &&CellSummary| format!("batch {} at sparsity {}", cell.batch, cell.sparsity);
        cells.iter().map(name).collect::<Vec<_>>().join(", ")
    };
    let running: Vec<_> = summary.cells.iter().filter(|cell| cell.running > 0).collect();
    if !running.is_empty() {
        notes.push(format!("the study is not finished; steps may still become fewer at {}", names(&running)));
    }
    let missed = |cell: &&CellSummary| cell.running == 0 && cell.k_star.is_none();
    let missed: Vec<_> = summary.cells.iter().filter(missed).collect();
    if !missed.is_empty() {
        notes.push(format!("no trial reached the goal at {}, which no curve knows", names(&missed)));
    }
    let missed_goal = |cell: &CellSummary| cell.seeds.iter().filter(|steps| steps.is_none()).count();
    let lost: usize = summary.cells.iter().map(missed_goal).sum();
    if lost > 0 {
        let repeats: usize = summary.cells.iter().map(|cell| cell.seeds.len()).sum();
        notes.push(format!(
            "{lost} of {repeats} repeats of best trials did not reach the goal; they count as slower than those that did"
        ));
    }
    let unlikely: Vec<_> = summary
        .cells
        .iter()
        .filter(|cell| cell.seeds.len() > 1 && 2 * missed_goal(cell) >= cell.seeds.len())
        .collect();
    if !unlikely.is_empty() {
        notes.push(format!(
            "half of the repeats or more did not reach the goal at {}, so that no median is known there",
            names(&unlikely)
        ));
    }
    let mut curves = Vec::new();
    for fit in &summary.fits {
        let of_fit = |cell: &&CellSummary| cell.sparsity == fit.sparsity;
        let cells = summary.cells.iter().filter(of_fit);
        let cells = cells.filter_map(|cell| Some([cell.batch as f64, cell.k_star? as f64])).collect();
        let (c1, c2) = (fit.fit.curve.c1, fit.fit.curve.c2);
        if c2 == 0.0 {
            notes.push(format!(
                "sparsity {}: twice the batch took half the steps or fewer, so that no critical batch is known: larger \
                 batches than those of the study are left out",
                fit.sparsity
            ));
        }
        if c1 == 0.0 {
            notes.push(format!("sparsity {}: a larger batch took no fewer steps", fit.sparsity));
        }
        curves.push(ConvergenceCurve { sparsity: fit.sparsity, c1, c2, cells, repeats: fit.fit.repeats });
    }
    let mut without: Vec<f64> = summary.cells.iter().map(|cell| cell.sparsity).collect();
    without.dedup();
    without.retain(|sparsity| curves.iter().all(|curve| curve.sparsity != *sparsity));
    if curves.is_empty() {
        let problem = format!(
            "has no K* yet at two batch sizes of one sparsity ({} of {} trials are finished)",
            summary.finished, summary.trials
        );
        return Err(conflict("--study", &problem).into());
    }
    for sparsity in without {
        notes.push(format!("sparsity {sparsity} has K* at fewer than two batch sizes, and is left out"));
    }
    Ok(KnownSteps { curves, notes })
}

/// What else than the network differs from the runs that were studied; an error where the network does.
fn differences(request: &PlanRequest, studied: &RunFile) -> Result<Vec<String>> {
    let path = request.arguments.run_file();
    let run = request.run.read().map_err(|error| in_file(path, error))?;
    let run = resolve(run, path)?;
    let changes = run.changes(studied, |a, b| a == b).map_err(Error::Plan)?;
    let name = changes.iter().find(|change| change.field == "model.name");
    if let Some(change) = name.or(changes.iter().find(|change| change.field.starts_with("model."))) {
        let problem = format!(
            "is of another network: {change}; steps that were measured elsewhere can be given as --steps-to-result"
        );
        return Err(conflict("--study", &problem).into());
    }
    let is_noted = |field: &str| NOTED.iter().any(|noted| field.starts_with(noted));
    // A run that says nothing of pruning is pruned as its study was, as far as a step is concerned.
    let noted = changes.iter().filter(|change| is_noted(&change.field) && change.is.is_some());
    Ok(noted.map(|change| format!("the study is of other runs than this one: {change}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_two_numbers_and_a_sparsity() {
        assert_eq!(constants("36230,158", 0.5).unwrap(), ConvergenceCurve::given(0.5, 36_230.0, 158.0));
        assert_eq!(constants("1e5, 298, 0.9", 0.5).unwrap(), ConvergenceCurve::given(0.9, 1e5, 298.0));
        for text in ["5", "5,-1", "-5,1", "0,0", "5,1,1", "5,x", "5,inf", "1,2,0.5,3", ""] {
            assert!(constants(text, 0.0).is_err(), "{text}");
        }
    }
}

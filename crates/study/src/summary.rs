//! A study in numbers: K* of every cell, the curves through them, what sparsity costs. What `--json` prints,
//! and what the page shows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use crate::file::{Cell, Goal, Study};
use crate::finalists;
use crate::fit::{self, CellSteps, Fit};
use crate::results::Results;
use crate::theory::{CoefficientRatios, MeasuredConstants};
use crate::trial::{TrialRecord, TrialStatus};
use crate::widen;

/// Everything that a study has found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StudySummary {
    pub name: String,
    /// What trials were to reach.
    pub goal: Goal,
    /// By sparsity and batch, as the study has them.
    pub cells: Vec<CellSummary>,
    /// One for each sparsity with two cells or more.
    pub fits: Vec<SparsityFit>,
    /// What sparsity costs at each batch size.
    pub ratios: Vec<StepsRatio>,
    /// Of each sparsity where it was measured.
    pub smoothness: Vec<MeasuredConstants>,
    /// Steps of all trials together.
    pub steps: u64,
    /// Trials that have come to their end.
    pub finished: usize,
    /// Trials of the study, with those beyond the ends of ranges.
    pub trials: usize,
    /// The page, once it is written.
    pub report: Option<PathBuf>,
}

/// What is known of a cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CellSummary {
    /// Samples in a step.
    pub batch: usize,
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
    /// The fewest steps to the goal; none where no trial reached it.
    pub k_star: Option<u64>,
    /// Trials that reached the goal.
    pub complete: usize,
    /// Trials that spent their steps.
    pub incomplete: usize,
    /// Trials that diverged.
    pub infeasible: usize,
    /// Trials that were left when they had passed the best one.
    pub cut: usize,
    /// Trials that were stopped as too far behind.
    pub stopped: usize,
    /// Trials that have not come to their end.
    pub running: usize,
    /// Steps of all of them.
    pub steps: u64,
    /// The hyperparameters of the best trial, by field; a learning rate also as `lr`.
    pub best: BTreeMap<String, f64>,
    /// Its number.
    pub best_trial: Option<u32>,
    /// The same of the trial that takes the fewest steps for a success with other seeds, where best trials were
    /// run with any.
    pub steadiest: BTreeMap<String, f64>,
    /// Its number.
    pub steadiest_trial: Option<u32>,
    /// Its steps to the goal with each of these seeds; none where it was not reached.
    pub seeds: Vec<Option<u64>>,
    /// Fields whose range may be too narrow: the best trial lies in its outer tenth.
    pub at_edge: Vec<String>,
}

/// The curve of a sparsity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SparsityFit {
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
    /// K* = c1/B + c2.
    #[serde(flatten)]
    pub fit: Fit,
}

/// Steps of a sparse network over those of the dense one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepsRatio {
    /// Samples in a step.
    pub batch: usize,
    /// The fraction of the candidates that is pruned.
    pub sparsity: f64,
    /// K* over K* at sparsity 0.
    pub measured: f64,
    /// The same by theory, from what was measured of both networks.
    pub predicted: Option<f64>,
}

impl StudySummary {
    /// Adds up what is known of a study.
    pub fn of(study: &Study, results: &Results, smoothness: Vec<MeasuredConstants>) -> StudySummary {
        let cells: Vec<CellSummary> = study.cells.iter().map(|&cell| of_cell(study, results, cell)).collect();
        let fits: Vec<SparsityFit> =
            study.sparsities().into_iter().filter_map(|sparsity| fit_of(&cells, sparsity)).collect();
        let ratios = ratios(&cells, &fits, &smoothness);
        StudySummary {
            name: study.name.clone(),
            goal: study.goal,
            steps: cells.iter().map(|cell| cell.steps).sum(),
            finished: cells.iter().map(CellSummary::finished).sum(),
            trials: cells.iter().map(|cell| cell.finished() + cell.running).sum(),
            cells,
            fits,
            ratios,
            smoothness,
            report: None,
        }
    }

    /// The cell with this batch and sparsity.
    pub fn cell(&self, batch: usize, sparsity: f64) -> Option<&CellSummary> {
        self.cells.iter().find(|cell| cell.batch == batch && cell.sparsity == sparsity)
    }
}

impl CellSummary {
    /// Trials that have come to their end.
    pub fn finished(&self) -> usize {
        self.complete + self.incomplete + self.infeasible + self.cut + self.stopped
    }

    /// Whether another trial than the best one takes the fewest steps with other seeds.
    pub fn has_steadier(&self) -> bool {
        self.steadiest_trial.is_some() && self.steadiest_trial != self.best_trial
    }

    /// Steps with other seeds: `176 to 240, 1 of 5 not`; nothing where there are none.
    pub fn seeds_in_words(&self) -> String {
        let reached: Vec<u64> = self.seeds.iter().copied().flatten().collect();
        let missed = self.seeds.len() - reached.len();
        let missed = (missed > 0).then(|| format!("{missed} of {} not", self.seeds.len()));
        let range =
            reached.iter().min().zip(reached.iter().max()).map(|(least, most)| format!("{least} to {most}"));
        range.into_iter().chain(missed).collect::<Vec<_>>().join(", ")
    }
}

fn of_cell(study: &Study, results: &Results, cell: Cell) -> CellSummary {
    let records = results.of_cell(cell);
    let count = |status| records.iter().filter(|record| record.status == status).count();
    let best = widen::best(records.iter().copied());
    let beyond: u32 = results.widened(cell).iter().map(|widened| widened.trials).sum();
    let steadiest = finalists::steadiest(study, results, cell);
    let mut summary = CellSummary {
        batch: cell.batch,
        sparsity: cell.sparsity,
        k_star: best.and_then(TrialRecord::result),
        complete: count(TrialStatus::Complete),
        incomplete: count(TrialStatus::Incomplete),
        infeasible: count(TrialStatus::Infeasible),
        cut: count(TrialStatus::Cut),
        stopped: count(TrialStatus::Stopped),
        running: 0,
        steps: records.iter().map(|record| record.steps).sum(),
        best: best.map(hyperparameters).unwrap_or_default(),
        best_trial: best.map(|best| best.trial),
        steadiest: steadiest.as_ref().map(|steadiest| hyperparameters(steadiest.record)).unwrap_or_default(),
        steadiest_trial: steadiest.as_ref().map(|steadiest| steadiest.record.trial),
        seeds: steadiest.map(|steadiest| steadiest.seeds).unwrap_or_default(),
        at_edge: widen::at_edge(study, results, cell).into_iter().map(|(range, _)| range.field).collect(),
    };
    summary.running = ((study.search.trials + beyond) as usize).saturating_sub(summary.finished());
    summary
}

fn hyperparameters(record: &TrialRecord) -> BTreeMap<String, f64> {
    let mut fields: BTreeMap<String, f64> = record.fields.iter().cloned().collect();
    if let Some(&rate) = fields.get("learning_rate.peak") {
        fields.insert("lr".into(), rate);
    }
    fields
}

fn fit_of(cells: &[CellSummary], sparsity: f64) -> Option<SparsityFit> {
    let reached = cells.iter().filter(|cell| cell.sparsity == sparsity).filter_map(|cell| {
        let k_star = cell.k_star? as f64;
        Some(CellSteps { batch: cell.batch as f64, k_star, repeats: &cell.seeds })
    });
    let fit = fit::fit(&reached.collect::<Vec<_>>())?;
    Some(SparsityFit { sparsity, fit })
}

fn ratios(cells: &[CellSummary], fits: &[SparsityFit], smoothness: &[MeasuredConstants]) -> Vec<StepsRatio> {
    let dense_fit = fits.iter().find(|fit| fit.sparsity == 0.0);
    let measured = |sparsity: f64| smoothness.iter().find(|measured| measured.sparsity == sparsity);
    let ratio = |cell: &CellSummary| {
        let dense = cells.iter().find(|dense| dense.sparsity == 0.0 && dense.batch == cell.batch)?;
        let predicted = match (dense_fit, measured(cell.sparsity), measured(0.0)) {
            (Some(fit), Some(sparse), Some(dense)) => {
                Some(CoefficientRatios::predicted(sparse, dense).at(&fit.fit.curve, cell.batch as f64))
            }
            _ => None,
        };
        let measured = cell.k_star? as f64 / dense.k_star? as f64;
        Some(StepsRatio { batch: cell.batch, sparsity: cell.sparsity, measured, predicted })
    };
    cells.iter().filter(|cell| cell.sparsity > 0.0).filter_map(ratio).collect()
}

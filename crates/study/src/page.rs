//! The page of a study: K* against the batch, the hyperparameters of all trials, smoothness along training,
//! and the numbers.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use espalier_report::{Column, Curve, Figure, Guide, Page, Plot, PlotAxis, Table, number};
use espalier_train::Error;

use crate::file::{Cell, Study};
use crate::range::{RangeScale, SearchRange};
use crate::results::Results;
use crate::smoothness::{self, SparsityCurve};
use crate::summary::{CellSummary, StudySummary};
use crate::trial::{TrialRecord, TrialStatus};
use crate::widen;

/// The column of trials that have not come to their end, while there are any.
const RUNNING: &str = "running or queued";

/// The column of what other seeds make of the best trials, where they were run with any.
const SEEDS: &str = "other seeds";

/// Points of a fitted curve.
const DRAWN: usize = 60;

/// Writes `study.html` into the study's folder; returns its path.
pub fn write(
    study: &Study,
    results: &Results,
    summary: &StudySummary,
    curves: &[SparsityCurve],
) -> Result<PathBuf, Error> {
    let path = results.folder().join("study.html");
    let unwritten = |why| Error::Disk { path: path.clone(), why: format!("cannot be written: {why}") };
    fs::create_dir_all(results.folder()).map_err(unwritten)?;
    fs::write(&path, page(study, results, summary, curves).html()).map_err(unwritten)?;
    Ok(path)
}

pub fn page(study: &Study, results: &Results, summary: &StudySummary, curves: &[SparsityCurve]) -> Page {
    let mut page = Page::new(format!("Study {}", study.name));
    page.text(format!(
        "Steps to a validation {} of {}, over batch sizes and sparsities: the fewest of {} trials each.",
        study.goal.name(),
        study.goal.value(),
        study.search.trials
    ));
    if summary.finished < summary.trials {
        page.note(format!("{} of {} trials are finished.", summary.finished, summary.trials));
    }
    page.figure(steps_to_result(study, summary));
    page.table(cells(summary));
    if !summary.fits.is_empty() {
        page.heading("K* = c1/B + c2");
        page.table(fits(summary));
    }
    if !summary.ratios.is_empty() {
        page.heading("Cost of sparsity");
        page.table(ratios(summary));
    }
    if !curves.is_empty() {
        page.figure(smoothness::figure(curves));
        page.table(smoothness::table(curves));
    }
    for sparsity in study.sparsities() {
        if let Some(figure) = hyperparameters(study, results, sparsity) {
            page.figure(figure);
        }
    }
    page
}

/// Several studies beside each other, each with its numbers.
pub fn compare(studies: &[(&Study, StudySummary)]) -> Page {
    let names: Vec<&str> = studies.iter().map(|(study, _)| study.name.as_str()).collect();
    let mut page = Page::new(format!("Studies {}", names.join(", ")));
    page.figure(compared(studies));
    for (study, summary) in studies {
        page.heading(panel_title(study));
        page.table(cells(summary));
        if !summary.fits.is_empty() {
            page.table(fits(summary));
        }
    }
    page
}

/// K* against the batch, a panel a study.
pub fn compared(studies: &[(&Study, StudySummary)]) -> Figure {
    let panels = studies.iter().map(|(study, summary)| plot(panel_title(study), study, summary));
    panels.fold(figure(), Figure::with)
}

/// K* against the batch.
pub fn steps_to_result(study: &Study, summary: &StudySummary) -> Figure {
    figure().with(plot("Steps to the goal".into(), study, summary).wide())
}

fn figure() -> Figure {
    Figure::new("K* against the batch").with_subtitle("marks: the best trial; dashed: c1/B + c2")
}

/// `w3: steps to a validation error of 0.12`
fn panel_title(study: &Study) -> String {
    format!("{}: steps to a validation {} of {}", study.name, study.goal.name(), study.goal.value())
}

/// A curve a sparsity, with the fit behind it and what would be perfect scaling and none at all.
fn plot(title: String, study: &Study, summary: &StudySummary) -> Plot {
    let mut batches: Vec<usize> = study.cells.iter().map(|cell| cell.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let ticks = batches.into_iter().map(|batch| (batch as f64, batch.to_string())).collect();
    let across = PlotAxis::log("batch").with_ticks(ticks);
    let mut plot = Plot::new(title, across, PlotAxis::log("steps"));
    for (style, sparsity) in study.sparsities().into_iter().enumerate() {
        let points = points(summary, sparsity);
        let (Some(&first), Some(&last)) = (points.first(), points.last()) else { continue };
        if style == 0 {
            let scaled = first.1 * first.0 / last.0;
            plot = plot.with(Guide::line("linear scaling", first, (last.0, scaled)));
            plot = plot.with(Guide::line("maximal data parallelism", (first.0, last.1), last));
        }
        if let Some(fit) = summary.fits.iter().find(|fit| fit.sparsity == sparsity) {
            let at = |i: usize| first.0 * (last.0 / first.0).powf(i as f64 / (DRAWN - 1) as f64);
            let curve = (0..DRAWN).map(at).map(|batch| (batch, fit.fit.curve.at(batch))).collect();
            plot = plot.with(Curve::new("", style, curve).dashed());
        }
        plot = plot.with(Curve::new(percent(sparsity), style, points).with_markers());
    }
    plot
}

/// The K* of a sparsity that are known, by ascending batch.
fn points(summary: &StudySummary, sparsity: f64) -> Vec<(f64, f64)> {
    let cells = summary.cells.iter().filter(|cell| cell.sparsity == sparsity);
    let mut points: Vec<_> =
        cells.filter_map(|cell| Some((cell.batch as f64, cell.k_star? as f64))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// The first two hyperparameters of every trial at a sparsity, a panel for each batch size, the best one
/// ringed; with one hyperparameter, its value against the steps.
fn hyperparameters(study: &Study, results: &Results, sparsity: f64) -> Option<Figure> {
    let title = format!("Hyperparameters of all trials, {}", percent(sparsity));
    let mut figure = Figure::new(title).with_subtitle("ring: the best trial");
    for &cell in study.cells.iter().filter(|cell| cell.sparsity == sparsity) {
        let records = results.of_cell(cell);
        if !records.is_empty() {
            figure = figure.with(scatter(study, results, cell, &records));
        }
    }
    (!figure.panels.is_empty()).then_some(figure)
}

fn scatter(study: &Study, results: &Results, cell: Cell, records: &[&TrialRecord]) -> Plot {
    let ranges = widen::ranges(study, results, cell);
    let value = |record: &TrialRecord, range: &SearchRange| {
        let found = record.fields.iter().find(|(field, _)| *field == range.field);
        found.map_or(
            f64::NAN,
            |(_, value)| if range.scale == RangeScale::OneMinusLog { 1.0 - value } else { *value },
        )
    };
    let at = |record: &TrialRecord| match &ranges[..] {
        [x, y, ..] => (value(record, x), value(record, y)),
        [x] => (value(record, x), record.steps as f64),
        [] => (f64::NAN, f64::NAN),
    };
    let across = ranges.first().map_or_else(|| PlotAxis::linear(""), axis);
    let up = ranges.get(1).map_or_else(|| PlotAxis::log("steps taken"), axis);
    let mut plot = Plot::new(format!("batch {}", cell.batch), across, up);
    let kinds: [(&str, &[TrialStatus]); 4] = [
        ("reached the goal", &[TrialStatus::Complete]),
        ("did not reach it", &[TrialStatus::Incomplete, TrialStatus::Cut, TrialStatus::Stopped]),
        ("diverged", &[TrialStatus::Infeasible]),
        ("running", &[TrialStatus::Paused]),
    ];
    for (style, (name, statuses)) in kinds.into_iter().enumerate() {
        let of_kind = records.iter().filter(|record| statuses.contains(&record.status));
        let points: Vec<_> = of_kind.map(|record| at(record)).collect();
        if !points.is_empty() {
            plot = plot.with(Curve::scatter(name, style, points));
        }
    }
    match widen::best(records.iter().copied()) {
        Some(best) => plot.with(Curve::best(format!("{} steps", best.steps), 0, at(best))),
        None => plot,
    }
}

/// The axis of a hyperparameter, as far as its range goes.
fn axis(range: &SearchRange) -> PlotAxis {
    let axis = match range.scale {
        RangeScale::Log | RangeScale::WholeLog => PlotAxis::log(range.field.clone()),
        RangeScale::OneMinusLog => PlotAxis::log(format!("1 - {}", range.field)),
        RangeScale::Linear | RangeScale::Whole => PlotAxis::linear(range.field.clone()),
    };
    axis.including(range.low).including(range.high)
}

fn cells(summary: &StudySummary) -> Table {
    let columns = [
        "batch",
        "sparsity",
        "K*",
        "complete",
        "incomplete",
        "infeasible",
        "cut",
        "stopped",
        RUNNING,
        "steps",
        SEEDS,
    ];
    let has_steadier = summary.cells.iter().any(CellSummary::has_steadier);
    let is_running = summary.cells.iter().any(|cell| cell.running > 0);
    let has_seeds = summary.cells.iter().any(|cell| !cell.seeds.is_empty());
    let columns = columns.into_iter().filter(|name| is_running || *name != RUNNING);
    let columns = columns.filter(|name| has_seeds || *name != SEEDS).map(Column::number);
    let columns = columns.chain([Column::text("best"), Column::text("at the edge")]);
    let columns = columns.chain(has_steadier.then(|| Column::text("steadier with other seeds")));
    let mut table = Table::new(columns.collect());
    for cell in &summary.cells {
        let CellSummary { batch, complete, incomplete, infeasible, cut, stopped, running, steps, .. } = cell;
        let k_star = cell.k_star.map_or("-".into(), |steps| steps.to_string());
        let counts = [complete, incomplete, infeasible, cut, stopped].into_iter();
        let counts = counts.chain(is_running.then_some(running)).map(|count| count.to_string());
        let first = [batch.to_string(), percent(cell.sparsity), k_star];
        let seeds = has_seeds.then(|| cell.seeds_in_words());
        let last = [fields(&cell.best), cell.at_edge.join(", ")].into_iter();
        let steadier = || if cell.has_steadier() { fields(&cell.steadiest) } else { String::new() };
        let last = last.chain(has_steadier.then(steadier));
        table.row(first.into_iter().chain(counts).chain([steps.to_string()]).chain(seeds).chain(last));
    }
    table
}

/// Hyperparameters of a trial.
fn fields(fields: &BTreeMap<String, f64>) -> String {
    let fields = fields.iter().filter(|(field, _)| *field != "lr");
    fields.map(|(field, value)| format!("{field} = {}", number::short(*value))).collect::<Vec<_>>().join(", ")
}

fn fits(summary: &StudySummary) -> Table {
    let has_seeds = summary.fits.iter().any(|fit| fit.fit.c1_interval.is_some());
    let columns = ["sparsity", "c1", SEEDS, "c2", SEEDS, "critical batch", "r2"];
    let columns = columns.into_iter().filter(|name| has_seeds || *name != SEEDS).map(Column::number);
    let mut table = Table::new(columns.collect());
    let interval = |interval: Option<[f64; 2]>| {
        let ends = |[low, high]: [f64; 2]| format!("{} to {}", number::short(low), number::short(high));
        has_seeds.then(|| interval.map_or("-".into(), ends))
    };
    for fit in &summary.fits {
        let (curve, fitted) = (fit.fit.curve, &fit.fit);
        let row = [
            Some(percent(fit.sparsity)),
            Some(number::short(curve.c1)),
            interval(fitted.c1_interval),
            Some(number::short(curve.c2)),
            interval(fitted.c2_interval),
            Some(fitted.critical_batch.map_or("-".into(), number::short)),
            Some(curve.r2.map_or("-".into(), |r2| format!("{r2:.3}"))),
        ];
        table.row(row.into_iter().flatten());
    }
    table
}

fn ratios(summary: &StudySummary) -> Table {
    let columns = ["sparsity", "batch", "steps relative to dense", "predicted"];
    let mut table = Table::new(columns.map(Column::number).into());
    for ratio in &summary.ratios {
        let predicted = ratio.predicted.map_or("-".into(), |predicted| format!("{predicted:.2}"));
        table.row([
            percent(ratio.sparsity),
            ratio.batch.to_string(),
            format!("{:.2}", ratio.measured),
            predicted,
        ]);
    }
    table
}

/// `90 % sparsity`
fn percent(sparsity: f64) -> String {
    format!("{} % sparsity", (sparsity * 1000.0).round() / 10.0)
}

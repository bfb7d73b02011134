//! The page of one run, or of several.

use espalier_report::{Column, Figure, Page, Table};
use espalier_train::RunSummary;

use super::{curves, pipeline, state};
use crate::progress::count;
use crate::records::{self, RunRecord, facts};

/// Everything that there is to show of them.
pub fn of(runs: &[RunRecord]) -> Page {
    let mut page = match runs {
        [run] => of_one(run),
        runs => of_several(runs),
    };
    runs.iter().flat_map(RunRecord::notes).for_each(|note| page.note(note));
    let mut figure = curves::figure(runs);
    figure.title = String::new();
    if !figure.panels.is_empty() {
        page.figure(figure);
    }
    let of = |run: &RunRecord| if runs.len() > 1 { format!(", {}", run.name) } else { String::new() };
    let memory: Vec<_> = runs.iter().filter_map(|run| state::memory(run, &of(run))).collect();
    if !memory.is_empty() {
        page.figure(memory.into_iter().fold(Figure::new("Memory"), Figure::with));
    }
    let kept: Vec<_> = runs.iter().flat_map(|run| state::kept(run, &of(run))).collect();
    if !kept.is_empty() {
        page.figure(kept.into_iter().fold(Figure::new("Sparsity"), Figure::with));
    }
    for figure in runs.iter().filter_map(|run| pipeline::figure(run, &of(run))) {
        page.figure(figure);
    }
    if runs.len() > 1 {
        what_differs(&mut page, runs);
    }
    for run in runs.iter().filter(|run| !run.settings.is_empty()) {
        page.folded(format!("All settings of {}", run.name), all_settings(run));
    }
    page
}

fn of_one(run: &RunRecord) -> Page {
    let mut page = Page::new(&run.name);
    page.text(description(run));
    page.facts(facts::of(run).into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
    page
}

fn of_several(runs: &[RunRecord]) -> Page {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let mut page = Page::new(names.join(", "));
    page.table(results(runs));
    page
}

/// Behind the curves, which say what came of it.
fn what_differs(page: &mut Page, runs: &[RunRecord]) {
    let differing = differing(runs);
    if differing.rows.is_empty() {
        page.text("Same settings.");
    } else {
        page.heading("Settings that differ");
        page.table(differing);
    }
}

/// `gpt, 636 k parameters, f32 on cpu, data 2 x pipeline 2; running`
fn description(run: &RunRecord) -> String {
    let mut facts = Vec::new();
    if let (Some(model), Some(plan)) = (run.model(), &run.plan) {
        facts.push(format!("{model}, {} parameters", count(plan.parameters as f64)));
    }
    if let Some(RunSummary { precision, device, .. }) = &run.summary {
        facts.push(format!("{precision} on {device}"));
    }
    let axes = ["data", "pipeline", "tensor", "spatial"].map(|axis| {
        let ranks = run.settings.get(&format!("parallel.{axis}"))?;
        (ranks != "1").then(|| format!("{axis} {ranks}"))
    });
    let axes: Vec<String> = axes.into_iter().flatten().collect();
    if !axes.is_empty() {
        facts.push(axes.join(" x "));
    }
    facts.push(run.state().to_owned());
    facts.join("; ")
}

/// The facts of several runs: a row a run, and a column for whatever one of them has.
fn results(runs: &[RunRecord]) -> Table {
    let (names, values) = facts::together(runs);
    let numbers = names.iter().map(|name| Column::number(*name));
    let mut table =
        Table::new([Column::text("run"), Column::text("state")].into_iter().chain(numbers).collect());
    for (run, values) in runs.iter().zip(values) {
        let values = values.into_iter().map(|value| value.unwrap_or_else(|| "–".into()));
        table.row([run.name.clone(), run.state().to_owned()].into_iter().chain(values));
    }
    table
}

/// Settings that differ: a row a field, a column a run.
fn differing(runs: &[RunRecord]) -> Table {
    let names = runs.iter().map(|run| Column::text(&run.name));
    let mut table = Table::new([Column::text("setting")].into_iter().chain(names).collect());
    for (field, values) in records::differing(runs) {
        let cells = values.into_iter().map(|value| value.unwrap_or_else(|| "–".into()));
        table.row([field].into_iter().chain(cells));
    }
    table
}

/// All settings of one run.
fn all_settings(run: &RunRecord) -> Table {
    let mut table = Table::new(vec![Column::text("setting"), Column::text("value")]);
    for (field, value) in &run.settings {
        table.row([field.clone(), value.clone()]);
    }
    table
}

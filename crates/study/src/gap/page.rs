//! The page of a generalisation gap.

use espalier_report::{Column, Curve, Figure, Page, Plot, PlotAxis, Table, number};

use super::file::GapStudy;
use super::train::{FinalMetrics, GapOutcome};

/// Errors, gaps and sharpness against the batch, a curve an arm, and all numbers.
pub fn page(gap: &GapStudy, outcomes: &[GapOutcome]) -> Page {
    let mut page = Page::new(format!("Study {}", gap.name));
    let until = gap.loss.map_or("to its end".into(), |loss| format!("to a training loss of {loss}"));
    page.text(format!(
        "Validation results after training with each batch size, {until}, by remedy for large batches; the largest eigenvalue of \
         the Hessian and sharpness in a box of epsilon {} over {} training samples.",
        gap.epsilon, gap.samples
    ));
    if outcomes.len() < gap.runs() {
        page.note(format!("{} of {} runs are finished.", outcomes.len(), gap.runs()));
    }
    page.figure(figure(gap, outcomes));
    page.table(table(outcomes));
    page
}

/// The pictures alone.
pub fn figure(gap: &GapStudy, outcomes: &[GapOutcome]) -> Figure {
    let plot = |title: &str, label: &str, of: fn(&FinalMetrics) -> f64| {
        let mut plot = Plot::new(title, PlotAxis::log("batch"), PlotAxis::linear(label));
        for (style, arm) in gap.arms.iter().enumerate() {
            plot = plot.with(
                Curve::new(arm.name.clone(), style, curve(gap, outcomes, &arm.name, of)).with_markers(),
            );
        }
        plot
    };
    Figure::new("Generalisation against the batch")
        .with(plot("Validation error", "fraction wrong", |ended| ended.error))
        .with(plot("Generalisation gap", "validation loss - training loss", FinalMetrics::gap))
        .with(plot("Largest eigenvalue of the Hessian", "eigenvalue", |ended| ended.eigenvalue))
        .with(plot("Sharpness", "percent", |ended| ended.sharpness))
}

/// The mean over seeds at each batch, where a run did not diverge and came to the loss that it was to reach.
fn curve(
    gap: &GapStudy,
    outcomes: &[GapOutcome],
    arm: &str,
    of: fn(&FinalMetrics) -> f64,
) -> Vec<(f64, f64)> {
    let mean = |batch: &usize| {
        let matching = outcomes.iter().filter(|outcome| outcome.arm == arm && outcome.batch == *batch);
        let matching = matching.filter(|outcome| outcome.reached != Some(false));
        let values: Vec<f64> = matching.filter_map(|outcome| outcome.ended.as_ref()).map(of).collect();
        (!values.is_empty()).then(|| (*batch as f64, values.iter().sum::<f64>() / values.len() as f64))
    };
    gap.batches.iter().filter_map(mean).collect()
}

fn table(outcomes: &[GapOutcome]) -> Table {
    let numbers = [
        "batch",
        "seed",
        "steps",
        "training loss",
        "validation loss",
        "validation error",
        "largest eigenvalue",
        "sharpness",
    ];
    let columns = [Column::text("arm")].into_iter().chain(numbers.map(Column::number));
    let mut table = Table::new(columns.collect());
    for outcome in outcomes {
        let GapOutcome { batch, arm, seed, steps, ended, .. } = outcome;
        let shown = |of: fn(&FinalMetrics) -> f64| {
            ended.as_ref().map_or("diverged".into(), |ended| number::short(of(ended)))
        };
        table.row([
            arm.clone(),
            batch.to_string(),
            seed.to_string(),
            steps.to_string(),
            shown(|ended| ended.training_loss)
                + if outcome.reached == Some(false) { ", not reached" } else { "" },
            shown(|ended| ended.validation_loss),
            shown(|ended| ended.error),
            shown(|ended| ended.eigenvalue),
            shown(|ended| ended.sharpness),
        ]);
    }
    table
}

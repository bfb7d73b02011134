//! The page of a time to a result.

use espalier_plan::time_to_result::ResultTimes;
use espalier_report::{Column, Page, Table};

use super::{figure, text};

pub fn page(result: &ResultTimes) -> Page {
    let ResultTimes { model, cluster, device, engine, .. } = result;
    let mut page = Page::new(format!("Time to result: {model} on {cluster}"));
    page.text(format!("Steps to the result times the time of a step, on {device}, engine {engine}."));
    result.notes.iter().for_each(|note| page.note(note));
    text::sentences(result).into_iter().for_each(|sentence| page.text(sentence));
    page.figure(figure(result));
    page.heading("The fastest choice for each number of GPUs");
    page.table(table(&text::rows(result)));
    if result.curves.len() > 1 {
        page.heading("By sparsity");
        page.table(table(&text::by_sparsity(result)));
    }
    page.heading("Steps to the result");
    result.curves.iter().for_each(|curve| page.text(text::of_curve(curve)));
    page
}

/// Rows under their head; the layout is text.
fn table(rows: &[Vec<String>]) -> Table {
    let column = |name: &String| match name.as_str() {
        "layout" => Column::text(name),
        _ => Column::number(name),
    };
    let mut table = Table::new(rows[0].iter().map(column).collect());
    rows[1..].iter().for_each(|row| table.row(row.iter().cloned()));
    table
}

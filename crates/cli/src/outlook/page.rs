//! The page of a time to a result.

use espalier_plan::outlook::Outlook;
use espalier_report::{Column, Page, Table};

use super::{figure, text};

pub fn page(outlook: &Outlook) -> Page {
    let Outlook { model, cluster, device, engine, .. } = outlook;
    let mut page = Page::new(format!("Time to result: {model} on {cluster}"));
    page.text(format!("Steps to the result times the time of a step, on {device}, engine {engine}."));
    outlook.notes.iter().for_each(|note| page.note(note));
    text::sentences(outlook).into_iter().for_each(|sentence| page.text(sentence));
    page.figure(figure(outlook));
    page.heading("The fastest choice for each number of GPUs");
    page.table(table(&text::rows(outlook)));
    if outlook.curves.len() > 1 {
        page.heading("By sparsity");
        page.table(table(&text::by_sparsity(outlook)));
    }
    page.heading("Steps to the result");
    outlook.curves.iter().for_each(|curve| page.text(text::of_curve(curve)));
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

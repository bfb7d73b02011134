//! `espalier compare`: runs side by side, in words: the settings that differ, and what came of them.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::output::{self, print_err, print_out};
use crate::records::{self, RunRecord, facts};
use crate::text_table::TextTable;

#[derive(Args)]
#[command(after_help = "`espalier report A B` plots the same runs in one figure.

Examples:
  espalier compare out/dense out/pruned
  espalier compare out/hello out/hello-2 out/hello-3 --json")]
pub struct CompareArguments {
    /// Run folders.
    #[arg(value_name = "RUN", required = true, num_args = 2..)]
    runs: Vec<PathBuf>,
    /// Print the comparison as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

pub fn compare(arguments: &CompareArguments) -> Result<ExitCode> {
    let mut runs = arguments.runs.iter().map(|run| RunRecord::open(run)).collect::<Result<Vec<_>>>()?;
    records::disambiguate(&mut runs);
    let row = |first: &str, values: Vec<String>| [vec![first.to_owned()], values].concat();
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let mut rows = vec![row("", runs.iter().map(|run| run.name.clone()).collect())];
    let differ = records::differing(&runs);
    for (field, values) in &differ {
        rows.push(row(field, values.iter().cloned().map(or_dash).collect()));
    }
    let mut results = vec![rows[0].clone()];
    results.push(row("state", runs.iter().map(|run| run.state().to_owned()).collect()));
    let (names, values) = facts::together(&runs);
    for (i, name) in names.iter().enumerate() {
        results.push(row(name, values.iter().map(|run| or_dash(run[i].clone())).collect()));
    }
    // What was asked for above, what came of it below, in the same columns where these fit.
    let all = [&rows[..], &results[1..]].concat();
    let text = TextTable::new(&all).render(output::width());
    let (above, below) = match text.lines().count() == all.len() {
        true => {
            let lines: Vec<&str> = text.lines().collect();
            let joined = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect();
            (joined(&lines[..rows.len()]), joined(&lines[rows.len()..]))
        }
        false => {
            let transposed = |rows: &[Vec<String>]| TextTable::new(rows).render(output::width());
            let above: String = if differ.is_empty() { String::new() } else { transposed(&rows) };
            (above, transposed(&results))
        }
    };
    output::on_standard_output(&above);
    if differ.is_empty() {
        print_out!("same settings");
    }
    output::on_standard_output(format_args!("\n{below}"));
    for run in &runs {
        run.notes().iter().for_each(|note| print_err!("note: {note}"));
    }
    let of_runs = || runs.iter().map(RunRecord::json).collect::<Vec<_>>();
    output::answer(arguments.json, || json!({ "runs": of_runs(), "differ": differ }))
}

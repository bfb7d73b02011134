//! The numbers of runs under one name each, over steps: what other programs are given.

use std::collections::BTreeMap;

use crate::records::RunRecord;

/// A number of a run over its steps.
pub struct Series {
    /// As in metrics.jsonl, with a slash for a part: `loss`, `validation/loss`.
    pub name: &'static str,
    /// By ascending step.
    pub points: Vec<SeriesPoint>,
}

/// One of its values.
pub struct SeriesPoint {
    pub step: u64,
    /// Seconds since the run began, where they are known.
    pub time: Option<f64>,
    pub value: f64,
}

/// Those that the run has.
pub fn of(run: &RunRecord) -> Vec<Series> {
    let mut found: BTreeMap<&'static str, Vec<SeriesPoint>> = BTreeMap::new();
    for line in &run.steps {
        let numbers = [
            ("loss", line.loss),
            ("lr", Some(line.lr)),
            ("grad_norm", line.grad_norm),
            ("accuracy", line.accuracy),
            ("sparsity", Some(line.sparsity)),
            ("tokens_per_s", line.tokens_per_s),
            ("images_per_s", line.images_per_s),
            ("noise_scale", line.noise_scale),
        ];
        for (name, value) in numbers {
            let point = |value| SeriesPoint { step: line.step, time: Some(line.time), value };
            found.entry(name).or_default().extend(value.map(point));
        }
    }
    for (step, validation) in &run.evaluations {
        let numbers = [
            ("validation/loss", validation.loss),
            ("validation/accuracy", validation.accuracy),
            ("validation/perplexity", validation.perplexity),
        ];
        for (name, value) in numbers {
            let point = |value| SeriesPoint { step: *step, time: None, value };
            found.entry(name).or_default().extend(value.map(point));
        }
    }
    let all = found.into_iter().map(|(name, points)| Series { name, points });
    all.filter(|series| !series.points.is_empty()).collect()
}

/// A table for spreadsheets: a line a step of a run, a column a number. What a run does not have at a step is
/// empty.
pub fn csv(runs: &[RunRecord]) -> String {
    let of_runs: Vec<Vec<Series>> = runs.iter().map(of).collect();
    let mut names: Vec<&str> = of_runs.iter().flatten().map(|series| series.name).collect();
    names.sort_unstable();
    names.dedup();
    let mut text = format!("run,step,{}\n", names.join(","));
    for (run, all) in runs.iter().zip(of_runs) {
        let mut rows: BTreeMap<u64, BTreeMap<&str, f64>> = BTreeMap::new();
        for Series { name, points } in &all {
            for SeriesPoint { step, value, .. } in points {
                rows.entry(*step).or_default().insert(name, *value);
            }
        }
        for (step, values) in rows {
            let cells = names.iter().map(|name| values.get(name).map_or(String::new(), f64::to_string));
            text += &format!("{},{step},{}\n", quoted(&run.name), cells.collect::<Vec<_>>().join(","));
        }
    }
    text
}

/// A cell of text (RFC 4180). Spreadsheets take what begins like a formula for one: it is not given to them
/// as such.
fn quoted(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if is_formula { format!("'{text}") } else { text.to_owned() };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_cell() {
        assert_eq!(["plain", "a,b", "a\"b", "=1+1"].map(quoted), ["plain", "\"a,b\"", "\"a\"\"b\"", "'=1+1"]);
    }
}

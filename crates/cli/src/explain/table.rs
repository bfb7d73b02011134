//! The explanation for a person: a table of the layers, totals, where the cheapest changes, and one sentence.

use std::fmt::Write as _;

use espalier_plan::cost::explanation::{ByParallelism, TimedCost};
use espalier_plan::cost::{AlphaBeta, Explanation, Integrated, Parallelism};

use super::measure::{MeasuredCosts, SecondsByParallelism};
use crate::text_table::TextTable;

/// Everything, in tables of so many letters; with the mixture that the run file asks for, where it does.
pub fn text(
    explanation: &Explanation,
    element_bytes: u64,
    measured: Option<&MeasuredCosts>,
    run: Option<&Integrated>,
    width: usize,
) -> String {
    let at = &explanation.setting;
    let pruned = match explanation.sparsity {
        0.0 => String::new(),
        sparsity => format!(", {} % pruned", digits(100.0 * sparsity)),
    };
    let mut text = format!(
        "{}, batch {} on {} ranks{pruned}; {}\nelements sent per rank and step, and milliseconds\n\n",
        explanation.model,
        at.batch,
        at.ranks,
        link(at.link, element_bytes)
    );
    text += &TextTable::new(&costs(explanation)).with_total().render(width);
    if let Some(measured) = measured {
        let fitted = link(measured.links.fitted(), element_bytes);
        let _ = writeln!(text, "\nmeasured among {} threads of this process: {fitted}", at.ranks);
        for (name, each) in measured.links.by_pattern() {
            let _ = writeln!(text, "  {}: {}", name.replace('_', "-"), link(each, element_bytes));
        }
        text += "\nmilliseconds, predicted and measured\n\n";
        text += &TextTable::new(&times(explanation, measured)).with_total().render(width);
    }
    let _ = writeln!(text, "\n{}", conclusion(explanation));
    let found = match &explanation.integrated {
        Some(found) => mixture(found),
        None => format!("this model cannot be split over {} ranks", at.ranks),
    };
    let _ = writeln!(text, "best mixture: {found}");
    if let Some(run) = run {
        let _ = writeln!(text, "run file: {}", mixture(run));
    }
    text
}

/// What it comes to.
pub fn conclusion(explanation: &Explanation) -> String {
    let products: Vec<_> = explanation.layers.iter().filter(|row| row.is_product()).collect();
    let wants = |by| products.iter().filter(|row| row.cheapest == by).count();
    let all = Parallelism::ALL.map(|by| (wants(Some(by)), by.name())).into_iter().filter(|(n, _)| *n > 0);
    let mut all: Vec<String> = all.map(|(n, name)| format!("{name} for {n}")).collect();
    if wants(None) > 0 {
        all.push(format!("none for {}, which cannot be split over so many ranks", wants(None)));
    }
    let pure = match explanation.total.cheapest() {
        Some((by, total)) => {
            format!("{}-parallel throughout takes {} ms", by.name(), milliseconds(total.seconds))
        }
        None => format!("no single parallelism works for all layers on {} ranks", explanation.setting.ranks),
    };
    let mixed = match &explanation.integrated {
        Some(mixed) => format!("the best mixture {} ms", milliseconds(mixed.seconds)),
        None => "and no mixture does either".into(),
    };
    format!(
        "Cheapest parallelism of {} layers with matmuls, each by itself: {}; {pure}, {mixed}.",
        products.len(),
        all.join(", ")
    )
}

/// Which layers are by what, and what that costs.
fn mixture(found: &Integrated) -> String {
    let moved = match found.exchanged.words {
        0.0 => String::new(),
        elements => format!(", {} of them to redistribute activations", count(elements)),
    };
    let (seconds, elements) = (milliseconds(found.seconds), count(found.cost.words));
    format!("{}: {seconds} ms, {elements} elements{moved}", found.sentence())
}

/// One row a layer, then the totals.
fn costs(explanation: &Explanation) -> Vec<Vec<String>> {
    let pruned = explanation.sparsity > 0.0;
    let mut head = vec!["layer", "weights"];
    head.extend(pruned.then_some("kept"));
    let possible = possible(explanation);
    head.extend(possible.iter().flat_map(|by| [by.name(), "ms"]));
    head.extend(["cheapest", "data from", "at more ranks"]);
    let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    for row in &explanation.layers {
        let mut cells = vec![row.sizes.name.clone(), count(row.sizes.parameters as f64)];
        cells.extend(pruned.then(|| count(row.sizes.kept as f64)));
        cells.extend(possible.iter().flat_map(|by| cost(row.costs.of(*by))));
        cells.push(row.cheapest.map_or("-", Parallelism::name).into());
        cells.push(row.data_from_batch.map_or("-".into(), |batch| format!("batch {batch}")));
        cells.push(match row.change {
            None => if row.is_product() { "the same" } else { "-" }.into(),
            Some(change) => format!("{} from {}", change.to.map_or("none", Parallelism::name), change.ranks),
        });
        rows.push(cells);
    }
    let sum = |of: fn(&espalier_plan::cost::LayerSizes) -> u64| {
        count(explanation.layers.iter().map(|row| of(&row.sizes) as f64).sum())
    };
    let mut total = vec!["total".to_string(), sum(|sizes| sizes.parameters)];
    total.extend(pruned.then(|| sum(|sizes| sizes.kept)));
    total.extend(possible.iter().flat_map(|by| cost(explanation.total.of(*by))));
    total.push(explanation.total.cheapest().map_or("-", |(by, _)| by.name()).into());
    rows.push(total);
    rows
}

/// One row a layer, then the totals: formula and measurement.
fn times(explanation: &Explanation, measured: &MeasuredCosts) -> Vec<Vec<String>> {
    let possible = possible(explanation);
    let mut head = vec!["layer"];
    head.extend(possible.iter().flat_map(|by| [by.name(), "measured"]));
    head.push("cheapest measured");
    let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    let time = |seconds: Option<f64>| seconds.map_or("-".into(), milliseconds);
    let mut row = |name: &str, formulas: &ByParallelism, seconds: &SecondsByParallelism, is_choice: bool| {
        let mut cells = vec![name.to_string()];
        for by in &possible {
            cells.extend([time(formulas.of(*by).map(|timed| timed.seconds)), time(seconds.of(*by))]);
        }
        let cheapest = seconds.cheapest().filter(|_| is_choice);
        cells.push(cheapest.map_or("-", Parallelism::name).into());
        rows.push(cells);
    };
    for (layer, seconds) in explanation.layers.iter().zip(&measured.layers) {
        row(&layer.sizes.name, &layer.costs, seconds, layer.is_product());
    }
    row("total", &explanation.total, &measured.total(), true);
    rows
}

/// Those that some layer could be split by: text has no rows of an image.
fn possible(explanation: &Explanation) -> Vec<Parallelism> {
    let some = |by: &Parallelism| explanation.layers.iter().any(|row| row.costs.of(*by).is_some());
    Parallelism::ALL.into_iter().filter(some).collect()
}

/// Elements and milliseconds.
fn cost(cost: Option<TimedCost>) -> [String; 2] {
    match cost {
        Some(timed) => [count(timed.cost.words), milliseconds(timed.seconds)],
        None => ["-".into(), "-".into()],
    }
}

/// `latency 2 us, 0.667 ns per element of 4 bytes (6.0 GB/s)`
fn link(link: AlphaBeta, element_bytes: u64) -> String {
    let rate = match link.beta > 0.0 {
        true => format!(" ({} GB/s)", digits(element_bytes as f64 / link.beta / 1e9)),
        false => String::new(),
    };
    format!(
        "latency {} us, {} ns per element of {element_bytes} bytes{rate}",
        digits(1e6 * link.alpha),
        digits(1e9 * link.beta)
    )
}

fn milliseconds(seconds: f64) -> String {
    digits(1e3 * seconds)
}

/// Three digits and a prefix.
fn count(n: f64) -> String {
    let prefixes = [(1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")];
    match prefixes.into_iter().find(|(unit, _)| n >= *unit) {
        Some((unit, prefix)) => format!("{}{prefix}", digits(n / unit)),
        None => digits(n),
    }
}

/// Three digits, or as many as stand before the point.
fn digits(n: f64) -> String {
    if n == 0.0 {
        return "0".into();
    }
    // A link of no bandwidth takes for ever.
    if !n.is_finite() {
        return n.to_string();
    }
    let before = n.abs().log10().floor() as i32 + 1;
    format!("{n:.*}", usize::try_from((3 - before).clamp(0, 6)).expect("not negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_have_digits() {
        let texts = [0.0, 0.012, 1.25, 123.4, 5e9, f64::INFINITY, f64::NAN].map(digits);
        assert_eq!(texts, ["0", "0.0120", "1.25", "123", "5000000000", "inf", "NaN"]);
    }
}

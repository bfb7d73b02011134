//! What a search found, for a person.

use std::fmt::Write as _;

use espalier_plan::Plan;
use espalier_plan::cluster::Cluster;
use espalier_plan::search::{Advice, SearchResult};
use espalier_plan::simulate::{Accuracy, Breakdown, Candidate, Estimate};

use crate::output;
use crate::text_table::TextTable;

/// The table of a search, and the paragraph below it.
pub fn ranked(plan: &Plan, cluster: &Cluster, engine: &str, devices: usize, found: &SearchResult) -> String {
    let pruned = plan
        .pruning
        .as_ref()
        .map_or(String::new(), |pruning| format!(", {:.0} % pruned", 100.0 * pruning.sparsity));
    let mut text = format!(
        "{}{pruned}, batch {} on {devices} x {} ({}), engine {engine}: {} layouts, {} simulated\n\n",
        plan.model.name,
        plan.batch.samples,
        cluster.device.name,
        cluster.name,
        found.candidates,
        found.simulated
    );
    let mut rows = vec![["layout", "GB", "step", "HFU", "MFU", "time breakdown"].map(String::from).to_vec()];
    rows.extend(found.ranked.iter().map(row));
    text += &aligned(&rows);
    text + &bar(&found.ranked)
}

/// What the error bars of a table are, or that there are none.
fn bar(ranked: &[Estimate]) -> String {
    match ranked.first().map(|first| first.accuracy) {
        Some(Some(Accuracy { error, set })) => {
            format!("\n± {:.0} %: nine of ten predictions for {set} were within it.\n", 100.0 * error)
        }
        Some(None) => {
            let surpassed = ranked.iter().find_map(|estimate| estimate.surpassed);
            let range = surpassed.map_or(String::new(), |best| {
                format!(
                    " The slower of two times is at {:.1} % of the peak, which no published run on about as many such \
                     GPUs has surpassed ({}).",
                    best.percent_of_peak, best.run
                )
            });
            format!(
                "\nNot measured: no layout of this kind has run, so that nobody knows how far off this is.{range}\n"
            )
        }
        None => String::new(),
    }
}

/// The time of a step, with its error bar.
pub fn step(estimate: &Estimate) -> String {
    let time = match estimate.surpassed {
        Some(_) => format!("{} to {}", seconds(estimate.step_seconds), seconds(estimate.slowest_seconds())),
        None => seconds(estimate.step_seconds),
    };
    match estimate.accuracy {
        Some(Accuracy { error, .. }) => format!("{time} ± {:.0} %", 100.0 * error),
        None => format!("{time}, not measured"),
    }
}

fn row(estimate: &Estimate) -> Vec<String> {
    vec![
        estimate.candidate.to_string(),
        format!("{:.2}", estimate.memory.total() as f64 / 1e9),
        step(estimate),
        percent(estimate, estimate.percent_of_peak),
        percent(estimate, estimate.model_percent_of_peak),
        fractions(&estimate.breakdown),
    ]
}

/// A fraction of the peak; where nobody has reached as much, from what somebody has.
fn percent(estimate: &Estimate, of_peak: f64) -> String {
    match estimate.surpassed {
        Some(_) => {
            let least = of_peak * estimate.step_seconds / estimate.slowest_seconds();
            format!("{least:.1} to {of_peak:.1} %")
        }
        None => format!("{of_peak:.1} %"),
    }
}

/// `compute 71 %, bubble 15 %, ...`: what is at least half a per cent.
fn fractions(breakdown: &Breakdown) -> String {
    let all: f64 = breakdown.kinds().iter().map(|(_, seconds)| seconds).sum();
    let fractions = breakdown.kinds().map(|(name, seconds)| (name, 100.0 * seconds / all));
    let shown = fractions.iter().filter(|(_, fraction)| *fraction >= 0.5);
    shown.map(|(name, fraction)| format!("{name} {fraction:.0} %")).collect::<Vec<_>>().join(", ")
}

/// What more memory or more pruning would buy.
pub fn advice(all: &[Advice], best: &Estimate) -> String {
    let mut text = String::new();
    for one in all {
        let _ = match one.times_faster {
            faster if faster > 1.005 => {
                writeln!(text, "{} would make it {:.2}x as fast: {}.", one.change, faster, one.best.candidate)
            }
            _ if one.best.candidate == best.candidate => {
                writeln!(text, "{} would not help.", one.change)
            }
            _ => writeln!(text, "{} would save less than 1 %.", one.change),
        };
    }
    text + "\n"
}

/// The best layout for each number of devices.
pub fn curve(plan: &Plan, cluster: &Cluster, engine: &str, best: &[(usize, Estimate)]) -> String {
    let mut text =
        format!("{}, batch {} on {}, engine {engine}\n\n", plan.model.name, plan.batch.samples, cluster.name);
    let mut rows =
        vec![["devices", "step", "samples/s", "HFU", "speed-up", "layout"].map(String::from).to_vec()];
    let (first, base) = (best[0].0, best[0].1.step_seconds);
    for (devices, estimate) in best {
        let faster = base / estimate.step_seconds;
        rows.push(vec![
            devices.to_string(),
            step(estimate),
            format!("{:.1}", plan.batch.samples as f64 / estimate.slowest_seconds()),
            percent(estimate, estimate.percent_of_peak),
            format!("{faster:.2}x of {:.0}x", *devices as f64 / first as f64),
            estimate.candidate.to_string(),
        ]);
    }
    text += &aligned(&rows);
    text + &bar(&best.iter().map(|(_, estimate)| estimate.clone()).collect::<Vec<_>>())
}

/// The best layout for each sparsity.
pub fn sparsities(
    plan: &Plan,
    cluster: &Cluster,
    devices: usize,
    best: &[(f64, Option<Estimate>)],
) -> String {
    let mut text = format!(
        "{}, batch {} on {devices} x {}\n\n",
        plan.model.name, plan.batch.samples, cluster.device.name
    );
    let mut rows = vec![["sparsity", "GB", "step", "HFU", "layout"].map(String::from).to_vec()];
    for (fraction, estimate) in best {
        let mut row = vec![format!("{fraction:.2}")];
        match estimate {
            Some(estimate) => row.extend([
                format!("{:.2}", estimate.memory.total() as f64 / 1e9),
                step(estimate),
                percent(estimate, estimate.percent_of_peak),
                estimate.candidate.to_string(),
            ]),
            None => row.extend(["", "", "", "does not fit"].map(String::from)),
        }
        rows.push(row);
    }
    text += &aligned(&rows);
    text
}

/// So many of them.
pub fn devices(number: usize) -> String {
    if number == 1 { "one device".into() } else { format!("{number} devices") }
}

/// One line.
pub fn fits(
    plan: &Plan,
    cluster: &Cluster,
    devices: usize,
    fits: bool,
    shown: Option<(Candidate, u64)>,
) -> String {
    let (devices, name) = (self::devices(devices), &plan.model.name);
    let size = |gb: f64, digits: usize| match gb {
        ..0.1 => format!("{:.1} MB", 1e3 * gb),
        _ => format!("{gb:.digits$} GB"),
    };
    let has = size(cluster.device.memory_gb, 0);
    match shown {
        Some((candidate, memory)) => {
            let gb = size(memory as f64 / 1e9, 1);
            match fits {
                true => {
                    format!("{name} fits on {devices} of {has}: {gb} each with {candidate}.")
                }
                false => {
                    format!("{name} does not fit on {devices} of {has}: {gb} each at least ({candidate}).")
                }
            }
        }
        None => format!("{name} does not fit on {devices} of {has}."),
    }
}

/// Seconds, or milliseconds where they are few.
pub fn seconds(time: f64) -> String {
    if time < 1.0 { format!("{:.1} ms", 1e3 * time) } else { format!("{time:.3} s") }
}

/// Columns whose first and last are words, as wide as where answers go.
pub fn aligned(rows: &[Vec<String>]) -> String {
    TextTable::new(rows).with_text_column().render(output::width())
}

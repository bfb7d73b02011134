//! Time to a result in sentences and columns.

use std::fmt::Write as _;

use espalier_plan::time_to_result::{
    ConvergenceCurve, DOUBLING_PAYS, IntervalSource, PruningGain, ResultChoice, ResultTimes,
};
use espalier_report::number;

use crate::output;
use crate::text_table::TextTable;

/// All of it, for a terminal.
pub fn text(result: &ResultTimes) -> String {
    let ResultTimes { model, cluster, device, engine, .. } = result;
    let mut text = format!("time to result: {model} on {cluster} ({device}), engine {engine}\n");
    for curve in &result.curves {
        let _ = writeln!(text, "{}", of_curve(curve));
    }
    text += "\nThe fastest choice for each number of GPUs:\n";
    let mut rows = rows(result);
    // Layouts are too long for a line, and are named where one is chosen.
    rows.iter_mut().for_each(|row| drop(row.pop()));
    text += &TextTable::new(&rows).render(output::width());
    if result.points.iter().any(|point| point.extrapolated) {
        text += "* a batch beyond those of the study\n";
    }
    if result.curves.len() > 1 {
        let _ = write!(text, "\n{}", TextTable::new(&by_sparsity(result)).render(output::width()));
    }
    text.push('\n');
    for sentence in sentences(result) {
        let _ = writeln!(text, "{sentence}");
    }
    text
}

/// What follows, a paragraph each: the best choice, where more GPUs stop paying, where pruning pays.
pub fn sentences(result: &ResultTimes) -> Vec<String> {
    let mut all = vec![best(result)];
    all.extend(result.curves.iter().filter_map(|curve| scaling(result, curve)));
    all.extend(result.pruning_gains().iter().map(|gain| pruning(result, gain)));
    all.retain(|sentence| !sentence.is_empty());
    all
}

/// `90 % pruned: K* = 104910/B + 298 ...`
pub fn of_curve(curve: &ConvergenceCurve) -> String {
    let critical = curve
        .critical_batch()
        .map_or("no critical batch".into(), |batch| format!("critical batch {}", number::short(batch)));
    let interval = match curve.interval_source() {
        IntervalSource::Seeds(seeds) => {
            format!(
                "expected {}, the median of {seeds} or more other seeds a batch, whose least and most are the intervals",
                steps(curve.expected())
            )
        }
        IntervalSource::Residuals(cells) => {
            format!("intervals (90 %) from how far {cells} cells lie from the fit, for lack of other seeds")
        }
        IntervalSource::Unknown => "no interval, for lack of cells and of other seeds".into(),
    };
    let (name, k_star) = (pruned(curve.sparsity), steps([curve.c1, curve.c2]));
    format!("{name}: K* = {k_star}; {interval}; {critical}")
}

/// `104.9k/B + 298`
fn steps([c1, c2]: [f64; 2]) -> String {
    let floor = if c2 > 0.0 { format!(" + {}", number::short(c2)) } else { String::new() };
    format!("{}/B{floor}", number::short(c1))
}

/// The best choice, and why it is not more GPUs.
pub fn best(result: &ResultTimes) -> String {
    let Some(limit) = result.scaling_limit(None) else { return String::new() };
    let point = limit.point;
    let unproven = if point.measured { "" } else { ", a kind of layout that was never measured" };
    let mut text = format!("Best: {}, {}; {}{unproven}.", choice(point), price(point), point.described);
    match (limit.next, limit.next_speedup()) {
        (Some(next), Some(speedup)) if speedup > 1.0 => {
            let dearer = next.gpu_hours / point.gpu_hours;
            text += &format!(
                " {} would be {speedup:.2} times as fast for {dearer:.2} times the GPU-hours: twice the GPUs should \
                 save a factor of {DOUBLING_PAYS}.",
                devices(next.gpus)
            );
        }
        (Some(next), _) => text += &format!(" {} would not be faster.", devices(next.gpus)),
        _ => text += " More GPUs were not considered.",
    }
    text
}

/// `8 GPUs, batch 512, 90 % pruned: 1.2 min (1.1 min to 1.5 min)`
fn choice(point: &ResultChoice) -> String {
    let ResultChoice { gpus, batch, sparsity, .. } = point;
    let interval = interval(point).map_or(String::new(), |interval| format!(" ({interval})"));
    let (gpus, pruned) = (devices(*gpus), pruned(*sparsity));
    format!("{gpus}, batch {batch}, {pruned}: {}{interval}", hours(point.hours))
}

fn price(point: &ResultChoice) -> String {
    let mut text = format!("{} GPU-hours", number::short(point.gpu_hours));
    if let Some(cost) = point.cost {
        text += &format!(", cost {}", number::short(cost));
    }
    if let Some(kwh) = point.kwh {
        text += &format!(", {} kWh", number::short(kwh));
    }
    text
}

/// Where more GPUs stop paying at a sparsity.
fn scaling(result: &ResultTimes, curve: &ConvergenceCurve) -> Option<String> {
    let limit = result.scaling_limit(Some(curve.sparsity))?;
    let (point, name) = (limit.point, pruned(curve.sparsity));
    let mut text = format!("{name}: GPUs pay up to {} ({})", point.gpus, hours(point.hours));
    if let (Some(next), Some(speedup)) = (limit.next, limit.next_speedup()) {
        text += &format!(", {} are only {speedup:.2} times as fast", next.gpus);
    }
    if let Some(critical) = curve.critical_batch() {
        text += &format!(
            "; batch {} takes {} steps, twice as large a one {}, and none fewer than {}: the critical batch is {}",
            point.batch,
            point.steps,
            curve.at(2.0 * point.batch as f64).ceil(),
            curve.expected()[1].ceil(),
            number::short(critical)
        );
    }
    Some(text + ".")
}

/// Whether a sparsity is worth its steps.
fn pruning(result: &ResultTimes, gain: &PruningGain) -> String {
    let name = pruned(gain.sparsity);
    let faster: Vec<&(usize, f64)> = gain.speedups.iter().filter(|(_, speedup)| *speedup > 1.0).collect();
    let largest = |all: &[&(usize, f64)]| all.iter().map(|(_, speedup)| *speedup).fold(0.0, f64::max);
    let mut text = match (&faster[..], &gain.speedups[..]) {
        ([], []) => format!("{name}: nothing to compare with, since the dense network fits nowhere"),
        ([], all) => {
            let slower = |(_, speedup): &(usize, f64)| 1.0 / speedup;
            let least = all.iter().map(slower).fold(f64::INFINITY, f64::min);
            let most = all.iter().map(slower).fold(0.0, f64::max);
            format!("{name}: does not pay: {least:.2} to {most:.2} times the time of the dense network")
        }
        (some, all) if some.len() == all.len() => {
            format!("{name}: pays on every number of GPUs, up to {:.2} times as fast", largest(some))
        }
        (some, _) => {
            let gpus: Vec<String> = some.iter().map(|(gpus, _)| gpus.to_string()).collect();
            format!(
                "{name}: pays on {} GPUs alone, up to {:.2} times as fast",
                gpus.join(", "),
                largest(some)
            )
        }
    };
    // Where both run: what it is made of.
    let pair = result.scaling_limit(Some(0.0)).and_then(|limit| {
        let dense = limit.point;
        let same = result.by_gpus(Some(gain.sparsity)).into_iter().find(|point| point.gpus == dense.gpus)?;
        Some((dense, same))
    });
    if let Some((dense, same)) = pair {
        text += &format!(
            "; on {} it takes {:.2} times the steps, each {:.2} times as long",
            devices(dense.gpus),
            same.steps as f64 / dense.steps as f64,
            same.step_seconds / dense.step_seconds
        );
    }
    if !gain.only_pruned.is_empty() {
        let gpus: Vec<String> = gain.only_pruned.iter().map(ToString::to_string).collect();
        text += &format!("; on {} GPUs the dense network does not fit", gpus.join(", "));
    }
    text + "."
}

/// The fastest choice for each number of GPUs; columns that nothing is known of are left out.
pub fn rows(result: &ResultTimes) -> Vec<Vec<String>> {
    let points = result.by_gpus(None);
    let known = |of: fn(&ResultChoice) -> bool| points.iter().any(|point| of(point));
    let (intervals, costs) =
        (known(|point| point.hours_interval.is_some()), known(|point| point.cost.is_some()));
    let energy = known(|point| point.kwh.is_some());
    let optional = |is_shown: bool, text: String| is_shown.then_some(text);
    let row = |point: &&ResultChoice| {
        let star = if point.extrapolated { "*" } else { "" };
        let all = [
            Some(devices(point.gpus)),
            Some(format!("{}{star}", point.batch)),
            Some(point.sparsity.to_string()),
            Some(point.steps.to_string()),
            Some(number::seconds(point.step_seconds)),
            Some(hours(point.hours)),
            optional(intervals, interval(point).unwrap_or("-".into())),
            Some(number::short(point.gpu_hours)),
            optional(costs, point.cost.map_or("-".into(), number::short)),
            optional(energy, point.kwh.map_or("-".into(), number::short)),
            Some(point.described.clone()),
        ];
        all.into_iter().flatten().collect::<Vec<String>>()
    };
    let names =
        ["GPUs", "batch", "sparsity", "steps", "step", "time", "interval", "GPU-hours", "cost", "kWh"];
    let is_shown = |name: &&str| match *name {
        "interval" => intervals,
        "cost" => costs,
        "kWh" => energy,
        _ => true,
    };
    let head = names.into_iter().filter(is_shown).chain(["layout"]).map(String::from).collect();
    [head].into_iter().chain(points.iter().map(row)).collect()
}

/// The shortest time of each sparsity on each number of GPUs, and how many times as fast as the dense network.
pub fn by_sparsity(result: &ResultTimes) -> Vec<Vec<String>> {
    let gains = result.pruning_gains();
    let head =
        ["GPUs".to_owned()].into_iter().chain(result.curves.iter().map(|curve| pruned(curve.sparsity)));
    let mut rows = vec![head.collect::<Vec<_>>()];
    for fastest in result.by_gpus(None) {
        let cell = |curve: &ConvergenceCurve| {
            let points = result.by_gpus(Some(curve.sparsity));
            let Some(point) = points.into_iter().find(|point| point.gpus == fastest.gpus) else {
                return "does not fit".into();
            };
            let gain = gains.iter().find(|gain| gain.sparsity == curve.sparsity);
            let times = gain.and_then(|gain| gain.speedups.iter().find(|(gpus, _)| *gpus == fastest.gpus));
            let times = times.map_or(String::new(), |(_, times)| format!(" ({times:.2}x)"));
            format!("{}{times}", hours(point.hours))
        };
        let cells = result.curves.iter().map(cell);
        rows.push([devices(fastest.gpus)].into_iter().chain(cells).collect());
    }
    rows
}

fn interval(point: &ResultChoice) -> Option<String> {
    point.hours_interval.map(|[low, high]| format!("{} to {}", hours(low), hours(high)))
}

fn hours(hours: f64) -> String {
    number::seconds(3600.0 * hours)
}

pub fn devices(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".into() } else { format!("{gpus} GPUs") }
}

/// `dense`, or `90 % pruned`
pub fn pruned(sparsity: f64) -> String {
    match sparsity {
        0.0 => "dense".into(),
        sparsity => format!("{} pruned", number::percent(sparsity)),
    }
}

//! The planner against ranks that sleep for the planned time and send what a run would: every layout of 4, 8
//! and 16 ranks for a GPT and a CNN, on a network as slow as the cluster below says:
//! `cargo bench -p espalier-train --bench planner`.
//!
//! What is compared is all that a planner models but the time of kernels, which is taken from it:
//! order, waiting, messages, what hides behind what. Each rank behaves as with a device of its own, however
//! few cores there are.

mod paced;

use std::time::Instant;

use espalier_plan::Plan;
use espalier_plan::cluster::Cluster;

use paced::of_plan::{Comparison, SLOW, compare, plan};

const MODELS: [(&str, &str, bool); 2] = [
    ("gpt", "[model]\nname = \"gpt\"\nlayers = 8\nwidth = 64\nheads = 16\ncontext = 32\n", false),
    ("resnet8", "[model]\nname = \"resnet8\"\n", true),
];
/// Of a step, over all replicas.
const SAMPLES: usize = 32;
const STEPS: usize = 3;

fn main() {
    let begin = Instant::now();
    let cluster = Cluster::parse(SLOW).expect("a cluster");
    println!("| model | ranks | layout | step ms | predicted | error |\n|---|---|---|---|---|---|");
    let mut all = Vec::new();
    for (name, model, images) in MODELS {
        for ranks in [4, 8, 16] {
            let mut compared = Vec::new();
            for layout in layouts(ranks, images) {
                match planned(model, layout).map(|plan| compare(&plan, &cluster, STEPS)) {
                    Ok(Ok(one)) => {
                        println!("| {name} | {ranks} | {} |", line(&one));
                        compared.push(one);
                    }
                    Ok(Err(why)) => panic!("{layout:?}: {why}"),
                    Err(why) => println!("| {name} | {ranks} | {layout:?} | | | {why} |"),
                }
            }
            println!("{name}, {ranks} ranks: {}", summary(&compared));
            all.extend(compared);
        }
    }
    println!("\nall: {}; {:.0} s", summary(&all), begin.elapsed().as_secs_f64());
}

/// Every way to write so many ranks as data x pipeline x tensor x spatial.
fn layouts(ranks: usize, images: bool) -> Vec<[usize; 4]> {
    let divisors = |of: usize| (1..=of).filter(move |n| of.is_multiple_of(*n));
    let mut found = Vec::new();
    for pipeline in divisors(ranks) {
        for tensor in divisors(ranks / pipeline) {
            let rest = ranks / pipeline / tensor;
            for spatial in divisors(rest).filter(|n| *n == 1 || images) {
                found.push([rest / spatial, pipeline, tensor, spatial]);
            }
        }
    }
    found
}

/// Micro-batches of two samples.
fn planned(model: &str, layout: [usize; 4]) -> Result<Plan, espalier_plan::Error> {
    plan(model, layout, SAMPLES, (SAMPLES / layout[0] / 2).max(1))
}

fn line(compared: &Comparison) -> String {
    let Comparison { candidate, predicted, measured } = compared;
    let error = 100.0 * (predicted / measured - 1.0);
    format!("{candidate} | {:.1} | {:.1} | {error:+.1} %", 1e3 * measured, 1e3 * predicted)
}

/// Errors, the order, and what it costs to take the layout that is predicted to be the fastest.
fn summary(compared: &[Comparison]) -> String {
    let errors: Vec<f64> = compared.iter().map(|one| (one.predicted / one.measured - 1.0).abs()).collect();
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    let most = errors.iter().copied().fold(0.0, f64::max);
    let mut agreed = 0.0;
    for (i, a) in compared.iter().enumerate() {
        for b in &compared[..i] {
            agreed += ((a.predicted - b.predicted) * (a.measured - b.measured)).signum();
        }
    }
    let pairs = compared.len() * (compared.len() - 1) / 2;
    let by =
        |of: fn(&Comparison) -> f64| compared.iter().min_by(|a, b| of(a).total_cmp(&of(b))).expect("some");
    let regret = by(|one| one.predicted).measured / by(|one| one.measured).measured - 1.0;
    format!(
        "mean error {:.1} %, most {:.1} %, Kendall's tau {:.3}, regret {:.1} %",
        100.0 * mean,
        100.0 * most,
        agreed / pairs as f64,
        100.0 * regret
    )
}

//! How far every synchronous schedule is from one rank, over all layouts of interest:
//! `cargo bench -p espalier-train --bench schedules [-- STEPS MODEL]`. The tests walk a few of them; this
//! walks all.
//!
//! Losses are compared, and norms of gradients: those jump by more where rounding moves an activation across
//! the kink of a ReLU, on one rank and on many.

use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::Plan;
use espalier_plan::config::RunFile;
use espalier_plan::schedule::ScheduleName;
use espalier_tensor::Device;
use espalier_train::parallel::on_threads;
use espalier_train::trainer::Trainer;

const GPT: &str = r#"
    seed = 4
    [model]
    name = "gpt"
    layers = 4
    heads = 2
    width = 16
    context = 12
    dropout = 0.1
    [data]
    kind = "arithmetic"
    count = 400
    [optimizer]
    name = "sgd"
    [learning_rate]
    peak = 0.1
    schedule = "constant"
"#;

/// At a rate at which an activation that rounding moves across the kink of a ReLU does not show.
const RESNET8: &str = r#"
    seed = 4
    [model]
    name = "resnet8"
    [data]
    kind = "shapes"
    count = 200
    size = 16
    [optimizer]
    name = "sgd"
    [learning_rate]
    peak = 1e-4
    schedule = "constant"
"#;

/// Losses and gradient norms of a run's steps.
fn run(text: &str, set: &[String], steps: usize) -> Option<Vec<[f64; 2]>> {
    let set: Vec<_> = set.iter().map(|text| text.as_str().into()).collect();
    let run_file = RunFile::parse(text, &set).ok()?;
    let dataset = Dataset::open(&run_file).expect("synthetic data");
    let plan = Plan::new(run_file, dataset.facts()).expect("a plan");
    let mesh = plan.mesh;
    let (device, dataset) = (Device::cpu(2).expect("a processor"), Arc::new(dataset));
    let shown = |mut trainer: Trainer| {
        let mut shown = Vec::new();
        for _ in 0..steps {
            let report = trainer.step()?;
            shown.push([report.loss, report.grad_norm]);
        }
        Ok(shown)
    };
    if mesh.size() == 1 {
        return Some(shown(Trainer::new(plan, dataset, &device).expect("a trainer")).expect("steps"));
    }
    let all = on_threads(&mesh, &device, |ranks, device| {
        shown(Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?)
    });
    all.expect("all ranks end well").into_iter().next()
}

fn main() {
    let steps = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(50);
    let only = std::env::args().find(|word| ["gpt", "resnet8"].contains(&word.as_str()));
    println!("largest relative difference to one rank over {steps} steps: losses / gradient norms");
    println!(
        "{:<8} {:<7} {:>6} {:>13} {:>8}  by schedule",
        "model", "pruned", "stages", "micro-batches", "replicas"
    );
    let mut worst = [0.0; 2];
    for (model, text) in [("gpt", GPT), ("resnet8", RESNET8)] {
        if only.as_ref().is_some_and(|only| only != model) {
            continue;
        }
        for pruned in [false, true] {
            for (stages, micro_batches, data) in [2, 3, 4]
                .into_iter()
                .flat_map(|p| [1, 4, 7].into_iter().flat_map(move |m| [1, 2].map(|d| (p, m, d))))
            {
                let mut base =
                    vec![format!("train.batch={}", 2 * micro_batches * data), format!("train.steps={steps}")];
                if pruned {
                    base.extend(["prune.method=magnitude", "prune.sparsity=0.9"].map(String::from));
                }
                let single = [&base[..], &[format!("train.micro_batches={}", micro_batches * data)]].concat();
                let single = run(text, &single, steps).expect("one rank can always");
                let mut line = String::new();
                for name in [
                    ScheduleName::Gpipe,
                    ScheduleName::OneFOneB,
                    ScheduleName::Interleaved,
                    ScheduleName::Chimera,
                    ScheduleName::ZbH1,
                    ScheduleName::Axonn,
                ] {
                    let set = [
                        format!("train.micro_batches={micro_batches}"),
                        format!("parallel.pipeline={stages}"),
                        format!("parallel.data={data}"),
                        format!("parallel.schedule={name}"),
                    ];
                    line += &match run(text, &[&base[..], &set].concat(), steps) {
                        None => format!(" {name} -"),
                        Some(together) => {
                            let apart = [0, 1].map(|of| {
                                let pairs = single.iter().zip(&together).map(|(a, b)| (a[of], b[of]));
                                pairs.map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max)
                            });
                            worst = [0, 1].map(|of| apart[of].max(worst[of]));
                            format!(" {name} {:.0e}/{:.0e}", apart[0], apart[1])
                        }
                    };
                }
                let pruned = if pruned { "90 %" } else { "no" };
                println!("{model:<8} {pruned:<7} {stages:>6} {micro_batches:>13} {data:>8} {line}");
            }
        }
    }
    let [losses, norms] = worst;
    println!("worst: {losses:.1e} / {norms:.1e}; - where the schedule does not take these numbers");
}

//! Published training times against what the planner predicts, each through the engine that made them.
//!
//! `cargo bench -p espalier-plan --bench published [-- mosaic|unseen|megatron|samo|spatial] [-- --fit|--leave-out]`: with
//! `--fit` the constants of the cluster file and of the engine that are in use are fitted to the rows, and what
//! comes out is printed; with `--leave-out` they are fitted to all sets of rows but one, for each set, and the
//! errors of that one are printed.

#[path = "published/fit.rs"]
mod fit;
#[path = "published/tables.rs"]
mod tables;

use espalier_plan::cluster::builtin;
use espalier_plan::engine::EngineProfile;
use espalier_plan::simulate::{Estimate, Simulation};
use tables::{
    PRUNED, Table, megatron, mosaic, mosaic_a100, mosaic_a100_40gb, mosaic_large, plan, samo, searched,
    spatial, torchtitan,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let fit = arguments.iter().any(|word| word == "--fit");
    let leave_out = arguments.iter().any(|word| word == "--leave-out");
    let report = |table: Table| if leave_out { leave_sets_out(table) } else { report(table, fit) };
    let wanted = |name: &str| {
        arguments.iter().all(|word| word.starts_with("--")) || arguments.iter().any(|word| word == name)
    };
    if wanted("mosaic") {
        report(mosaic());
    }
    // Nothing was fitted to these, and so nothing is left out of a fit or refitted.
    if wanted("unseen") && !fit && !leave_out {
        [mosaic_large(), mosaic_a100(), mosaic_a100_40gb(), torchtitan()].into_iter().for_each(report);
    }
    if wanted("megatron") {
        report(megatron());
    }
    if wanted("samo") {
        report(samo());
        samo_breakdown();
    }
    if wanted("spatial") {
        println!("## A tiled convolution, V100: times as fast as one, published and predicted");
        for (side, gpus, [seen, said]) in spatial() {
            println!("{side} x {side} on {gpus}: {seen:.2} {said:.2} {:+.1} %", 100.0 * (said / seen - 1.0));
        }
    }
}

/// Prints a table, after fitting it where that is asked for.
fn report(mut table: Table, fit: bool) {
    if fit {
        table.fit();
    }
    println!("## {}", table.name);
    let seen: Vec<f64> = table.rows.iter().map(|row| row.seconds).collect();
    let said: Vec<f64> = table.rows.iter().map(|row| table.predict(row)).collect();
    for (row, predicted) in table.rows.iter().zip(&said) {
        let held_out = if row.held_out { "  held out" } else { "" };
        let error = 100.0 * (predicted / row.seconds - 1.0);
        println!("{:32} {:9.3} s {predicted:9.3} s {error:+6.1} %{held_out}", row.name, row.seconds);
    }
    for (name, said) in [("ours", said), ("one rate for all, times the bubble", table.baseline())] {
        println!("{name}:");
        for (what, held_out) in [("fitted", false), ("held out", true)] {
            let rows = table.rows.iter().zip(&said).filter(|(row, _)| row.held_out == held_out);
            let mut errors: Vec<f64> = rows.map(|(row, said)| (said / row.seconds - 1.0).abs()).collect();
            errors.sort_by(f64::total_cmp);
            if errors.is_empty() {
                continue;
            }
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let at = |share: f64| 100.0 * errors[((errors.len() - 1) as f64 * share).round() as usize];
            println!(
                "  {what}: {} rows, mean {:.1} %, median {:.1} %, 95th {:.1} %, most {:.1} %",
                errors.len(),
                100.0 * mean,
                at(0.5),
                at(0.95),
                at(1.0)
            );
        }
        println!("  Kendall's tau {:.3}", tau(&seen, &said));
    }
}

/// The errors of each set of rows where constants were fitted to the others.
fn leave_sets_out(mut table: Table) {
    println!("## {}, one set left out of the fit at a time", table.name);
    let mut sets: Vec<String> = table.rows.iter().map(|row| row.set.clone()).collect();
    sets.dedup();
    let (cluster, engine) = (table.cluster.clone(), table.engine);
    for set in sets {
        (table.cluster, table.engine) = (cluster.clone(), engine);
        table.rows.iter_mut().for_each(|row| row.held_out = row.set == set);
        table.fit();
        let said: Vec<f64> = table.rows.iter().map(|row| table.predict(row)).collect();
        let count = table.rows.iter().filter(|row| row.held_out).count();
        let mean = |said: Vec<f64>| {
            let left = table.rows.iter().zip(said).filter(|(row, _)| row.held_out);
            100.0 * left.map(|(row, said)| (said / row.seconds - 1.0).abs()).sum::<f64>() / count as f64
        };
        let one_rate = mean(table.baseline());
        println!("{set}: {count} rows, mean {:.1} %; one rate for all {one_rate:.1} %", mean(said));
    }
}

/// The fraction of pairs in the same order, less that of pairs in the other.
fn tau(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for i in 0..a.len() {
        for j in 0..i {
            sum += ((a[i] - a[j]) * (b[i] - b[j])).signum();
        }
    }
    sum / (a.len() * (a.len() - 1) / 2) as f64
}

/// Where SAMO's gain on GPT-3 2.7B comes from, in per cent of AxoNN's time, beside what the paper says.
fn samo_breakdown() {
    println!("GPT-3 2.7B on Summit: saved by SAMO in per cent of AxoNN's step, published and predicted");
    let published = [
        (128, [18.0, 9.0, 6.0, -12.0]),
        (256, [16.17, 13.17, 11.08, -10.18]),
        (512, [4.0, 15.0, 21.0, -8.0]),
    ];
    let summit = builtin("summit").unwrap();
    for (gpus, paper) in published {
        let found = [(EngineProfile::AXONN, ""), (EngineProfile::SAMO, PRUNED)].map(|(engine, pruned)| {
            let plan = plan(32, 2560, 32, 50257, 2048, 512, pruned);
            searched(&Simulation::new(&plan, &summit, engine), gpus)
        });
        let [dense, samo] = &found;
        let kinds = |estimate: &Estimate| {
            let of = &estimate.breakdown;
            [of.point_to_point, of.bubble, of.collective, of.compress]
        };
        let (before, after) = (kinds(dense), kinds(samo));
        let saved: Vec<String> = (0..4)
            .map(|i| format!("{:.1} ({})", 100.0 * (before[i] - after[i]) / dense.step_seconds, paper[i]))
            .collect();
        println!(
            "{gpus:5} cards, {} and {} stages: point-to-point {}, bubble {}, collectives {}, compression {}",
            dense.candidate.pipeline, samo.candidate.pipeline, saved[0], saved[1], saved[2], saved[3]
        );
    }
}

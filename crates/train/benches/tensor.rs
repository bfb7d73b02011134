//! Training steps of a GPT whose layers are sharded over two ranks, against one rank: 4 layers of width 512
//! in f32.
//! `cargo bench -p espalier-train --bench tensor [-- --rounds 9] [--batch 8] [--context 128] [--sequence]`
//!
//! Ranks are threads, each with one thread to compute. A round measures one rank of one thread, the two
//! ranks, one rank of two threads, and one rank of one thread again. Cores that others share change their
//! speed, so the round that is reported is the steadiest: the one whose two measurements of one rank differ
//! least. Beside it stands the median of all rounds.

use std::sync::Arc;

use espalier_data::Dataset;
use espalier_plan::config::Override;
use espalier_plan::{Plan, RunFile};
use espalier_tensor::Device;
use espalier_train::Result;
use espalier_train::parallel::on_threads;
use espalier_train::trainer::Trainer;

/// Steps of a measurement: the first is not timed, of the others the shortest counts.
const STEPS: usize = 4;

struct Setting {
    fields: Vec<String>,
    sharding: Vec<String>,
}

impl Setting {
    /// Seconds of a step with so many threads, on two ranks or on one.
    fn step(&self, threads: usize, is_sharded: bool) -> f64 {
        let mut fields = self.fields.clone();
        fields.extend(self.sharding.iter().filter(|_| is_sharded).cloned());
        let run = RunFile::parse("", &fields.into_iter().map(Override::from).collect::<Vec<_>>())
            .expect("a run file");
        let dataset = Dataset::open(&run).expect("synthetic data");
        let plan = Plan::new(run, dataset.facts()).expect("a plan");
        let (mesh, dataset) = (plan.mesh, Arc::new(dataset));
        let device = Device::cpu(threads).expect("a processor");
        let steps = on_threads(&mesh, &device, |ranks, device| -> Result<f64> {
            let mut trainer = Trainer::distributed(plan.clone(), dataset.clone(), device, ranks)?;
            let times = (0..STEPS).map(|_| Ok(trainer.step()?.seconds)).collect::<Result<Vec<f64>>>()?;
            Ok(times[1..].iter().copied().fold(f64::INFINITY, f64::min))
        });
        steps.expect("all ranks end well").into_iter().fold(0.0, f64::max)
    }
}

/// Seconds of a step.
struct Round {
    one: f64,
    two_ranks: f64,
    two_threads: f64,
    spread: f64,
}

impl Round {
    fn measure(setting: &Setting) -> Round {
        let before = setting.step(1, false);
        let (two_ranks, two_threads) = (setting.step(2, true), setting.step(2, false));
        let after = setting.step(1, false);
        let one = (before + after) / 2.0;
        Round { one, two_ranks, two_threads, spread: (before - after).abs() / one }
    }

    /// How many times faster the ranks are than one of one thread, and than one of two.
    fn gains(&self) -> [f64; 2] {
        [self.one / self.two_ranks, self.two_threads / self.two_ranks]
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, |n| n.parse().expect("a number"))
    };
    let (rounds, batch, context) = (number("--rounds", 9), number("--batch", 8), number("--context", 128));
    let is_sequence = arguments.iter().any(|argument| argument == "--sequence");
    let mut sharding = vec!["parallel.tensor=2".to_owned()];
    sharding.extend(is_sequence.then(|| "parallel.sequence=true".into()));
    let model = ["layers=4", "width=512", "heads=8"].map(|field| format!("model.{field}"));
    let fields = [format!("model.context={context}"), format!("train.batch={batch}")];
    let setting = Setting { fields: model.into_iter().chain(fields).collect(), sharding };
    let mut all: Vec<Round> = (0..rounds).map(|_| Round::measure(&setting)).collect();
    all.sort_by(|a, b| a.spread.total_cmp(&b.spread));
    let median = [0, 1].map(|which: usize| {
        let mut gains: Vec<f64> = all.iter().map(|round| round.gains()[which]).collect();
        gains.sort_by(f64::total_cmp);
        gains[gains.len() / 2]
    });
    let Round { one, two_ranks, two_threads, spread } = &all[0];
    let gains = all[0].gains();
    println!(
        "gpt 4 x 512, f32, batch {batch} x {context}{}; {rounds} rounds, the steadiest (spread {:.1} %)",
        if is_sequence { ", sequence-parallel norms" } else { "" },
        100.0 * spread
    );
    println!("  one rank of one thread    {:8.1} ms", one * 1e3);
    println!(
        "  two ranks of one thread   {:8.1} ms   {:.2}x (median {:.2}x)",
        two_ranks * 1e3,
        gains[0],
        median[0]
    );
    println!(
        "  one rank of two threads   {:8.1} ms   two ranks are {:.2}x of it (median {:.2}x)",
        two_threads * 1e3,
        gains[1],
        median[1]
    );
}

//! Published training times against what the planner predicts, each through the engine that made them.
//!
//! `cargo bench -p espalier-plan --bench published [-- mosaic|megatron|samo] [-- --fit]`: with `--fit` the constants of the cluster
//! file and of the engine that stand in `constants` are fitted to the rows, and what comes out is printed.

use espalier_plan::cluster::{Cluster, builtin};
use espalier_plan::engine::{AttentionKernel, Engine};
use espalier_plan::schedule::Name;
use espalier_plan::simulate::{Candidate, Estimate, Job};
use espalier_plan::spec::Recompute;
use espalier_plan::{DataFacts, Plan, RunFile};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let fit = arguments.iter().any(|word| word == "--fit");
    let wanted = |name: &str| {
        arguments.iter().all(|word| word.starts_with("--")) || arguments.iter().any(|word| word == name)
    };
    if wanted("mosaic") {
        mosaic().report(fit);
    }
    if wanted("megatron") {
        megatron().report(fit);
    }
    if wanted("samo") {
        samo().report(fit);
        samo_breakdown();
    }
}

/// A run that somebody measured.
struct Row {
    name: String,
    /// Whose constants were fitted without it.
    held_out: bool,
    plan: Plan,
    engine: Option<Engine>,
    /// None: the fastest that fits, over stages.
    candidate: Candidate,
    free_stages: bool,
    seconds: f64,
}

/// A table, and what predicts it.
struct Table {
    name: &'static str,
    cluster: Cluster,
    engine: Engine,
    rows: Vec<Row>,
    constants: Vec<Constant>,
}

/// Where a constant is.
type Get = for<'a> fn(&'a mut Cluster, &'a mut Engine) -> &'a mut f64;

/// A number of the cluster or the engine that may be fitted.
struct Constant {
    name: &'static str,
    get: Get,
    range: [f64; 2],
}

impl Table {
    fn predict(&self, row: &Row) -> f64 {
        let engine =
            row.engine.map_or(self.engine, |own| Engine { sink: own.sink, state: own.state, ..self.engine });
        let engine = if row.engine.is_some() && row.name.starts_with("axonn") {
            Engine { sink: Engine::AXONN.sink, ..engine }
        } else {
            engine
        };
        let job = Job::new(&row.plan, &self.cluster, engine);
        if !row.free_stages {
            return job.estimate(&row.candidate).unwrap().step_seconds;
        }
        fastest(&job, &row.candidate).step_seconds
    }

    fn report(mut self, fit: bool) {
        if fit {
            self.fit();
        }
        println!("## {}", self.name);
        let mut errors = [Vec::new(), Vec::new()];
        let (mut seen, mut said) = (Vec::new(), Vec::new());
        for row in &self.rows {
            let predicted = self.predict(row);
            let error = predicted / row.seconds - 1.0;
            errors[usize::from(row.held_out)].push(error.abs());
            seen.push(row.seconds);
            said.push(predicted);
            println!(
                "{:32} {:9.3} s {:9.3} s {:+6.1} %{}",
                row.name,
                row.seconds,
                predicted,
                100.0 * error,
                if row.held_out { "  held out" } else { "" }
            );
        }
        for (errors, what) in errors.iter_mut().zip(["fitted", "held out"]) {
            if errors.is_empty() {
                continue;
            }
            errors.sort_by(f64::total_cmp);
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let at = |share: f64| errors[((errors.len() - 1) as f64 * share).round() as usize];
            println!(
                "{what}: {} rows, mean {:.1} %, median {:.1} %, 95th {:.1} %, most {:.1} %",
                errors.len(),
                100.0 * mean,
                100.0 * at(0.5),
                100.0 * at(0.95),
                100.0 * at(1.0)
            );
        }
        println!("Kendall's tau {:.3}", tau(&seen, &said));
    }

    /// Logarithms of predicted over seen, of the rows that may be fitted to.
    fn residuals(&self) -> Vec<f64> {
        let rows = self.rows.iter().filter(|row| !row.held_out);
        rows.map(|row| (self.predict(row) / row.seconds).ln()).collect()
    }

    /// Levenberg's and Marquardt's way to the least squares, over the logarithms of the constants.
    fn fit(&mut self) {
        let square = |residuals: &[f64]| residuals.iter().map(|one| one * one).sum::<f64>();
        let mut residuals = self.residuals();
        let mut damping = 1e-2;
        for _ in 0..25 {
            let (count, old) = (self.constants.len(), self.values());
            let mut slopes = Vec::new();
            for i in 0..count {
                let mut moved = old.clone();
                moved[i] = (moved[i] * 1.02).min(self.constants[i].range[1] * 1.02);
                self.set(&moved);
                let width = (moved[i] / old[i]).ln();
                slopes.push(
                    self.residuals()
                        .iter()
                        .zip(&residuals)
                        .map(|(new, was)| (new - was) / width)
                        .collect::<Vec<f64>>(),
                );
            }
            let mut better = false;
            for _ in 0..6 {
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let mut normal: Vec<Vec<f64>> = (0..count)
                    .map(|i| {
                        let mut row: Vec<f64> = (0..count).map(|j| dot(&slopes[i], &slopes[j])).collect();
                        row[i] += damping;
                        row.push(-dot(&slopes[i], &residuals));
                        row
                    })
                    .collect();
                let way = solve(&mut normal);
                let new: Vec<f64> = (0..count)
                    .map(|i| {
                        let [least, most] = self.constants[i].range;
                        (old[i] * way[i].clamp(-0.7, 0.7).exp()).clamp(least, most)
                    })
                    .collect();
                self.set(&new);
                let found = self.residuals();
                if square(&found) < square(&residuals) * 0.9995 {
                    (residuals, damping, better) = (found, damping / 3.0, true);
                    break;
                }
                self.set(&old);
                damping *= 4.0;
            }
            if !better {
                break;
            }
        }
        let values = self.values();
        for (constant, value) in self.constants.iter().zip(values) {
            println!("{} = {value:.4}", constant.name);
        }
    }

    fn values(&mut self) -> Vec<f64> {
        let Table { cluster, engine, constants, .. } = self;
        constants.iter().map(|constant| *(constant.get)(cluster, engine)).collect()
    }

    fn set(&mut self, values: &[f64]) {
        let Table { cluster, engine, constants, .. } = self;
        constants.iter().zip(values).for_each(|(constant, value)| *(constant.get)(cluster, engine) = *value);
    }
}

/// Gauss's elimination; the last column is what the equations equal.
fn solve(rows: &mut [Vec<f64>]) -> Vec<f64> {
    let count = rows.len();
    for i in 0..count {
        let pivot = (i..count).max_by(|a, b| rows[*a][i].abs().total_cmp(&rows[*b][i].abs())).unwrap();
        rows.swap(i, pivot);
        for j in 0..count {
            if j != i && rows[i][i] != 0.0 {
                let factor = rows[j][i] / rows[i][i];
                for k in i..=count {
                    let part = factor * rows[i][k];
                    rows[j][k] -= part;
                }
            }
        }
    }
    (0..count).map(|i| if rows[i][i] == 0.0 { 0.0 } else { rows[i][count] / rows[i][i] }).collect()
}

/// The share of pairs in the same order, less that of pairs in the other.
fn tau(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for i in 0..a.len() {
        for j in 0..i {
            sum += ((a[i] - a[j]) * (b[i] - b[j])).signum();
        }
    }
    sum / (a.len() * (a.len() - 1) / 2) as f64
}

fn plan(
    layers: usize,
    width: usize,
    heads: usize,
    vocab: usize,
    context: usize,
    batch: usize,
    more: &str,
) -> Plan {
    let text = format!(
        "[model]\nname = \"gpt\"\nlayers = {layers}\nwidth = {width}\nheads = {heads}\nvocab = {vocab}\ncontext = {context}\n\
         [train]\nbatch = {batch}\nprecision = \"bf16\"\n{more}"
    );
    Plan::new(RunFile::parse(&text, &[]).unwrap(), DataFacts::default()).unwrap()
}

fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().skip(1).map(|line| line.split(',').collect())
}

fn recompute(word: &str) -> Recompute {
    match word {
        "block" => Recompute::Block,
        "attention" => Recompute::Attention,
        _ => Recompute::None,
    }
}

fn constants() -> Vec<Constant> {
    vec![
        Constant {
            name: "efficiency[2]",
            get: |cluster, _| &mut cluster.device.bf16.efficiency[2][1],
            range: [0.1, 0.85],
        },
        Constant {
            name: "largest efficiency",
            get: |cluster, _| &mut cluster.device.bf16.efficiency.last_mut().unwrap()[1],
            range: [0.1, 0.9],
        },
        Constant {
            name: "network efficiency",
            get: |cluster, _| &mut cluster.network.as_mut().unwrap().efficiency,
            range: [0.2, 1.0],
        },
        Constant {
            name: "link efficiency",
            get: |cluster, _| &mut cluster.node.link.as_mut().unwrap().efficiency,
            range: [0.4, 0.9],
        },
        Constant { name: "passes", get: |_, engine| &mut engine.passes, range: [0.8, 6.0] },
    ]
}

fn mosaic() -> Table {
    let text = include_str!("published/mosaic-h100.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, batch) = (number(6), number(8));
        Row {
            name: format!("{} s {} on {gpus}, micro-batch {}", fields[0], fields[5], fields[7]),
            held_out: ["30b", "7b", "1b"].contains(&fields[0]),
            plan: plan(number(1), number(2), number(3), number(4), number(5), batch, ""),
            engine: None,
            candidate: Candidate {
                data: gpus,
                recompute: recompute(fields[9]),
                zero: 3,
                ..Candidate::alone(number(7))
            },
            free_stages: false,
            seconds: fields[12].parse().unwrap(),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "hides", get: |_, engine| &mut engine.hides, range: [0.001, 1.0] });
    constants.push(Constant {
        name: "attention",
        get: |_, engine| match &mut engine.attention {
            AttentionKernel::Fused { share, .. } => share,
            AttentionKernel::Unfused { bytes } => bytes,
            AttentionKernel::Ours => unreachable!("an engine of others"),
        },
        range: [0.1, 40.0],
    });
    Table {
        name: "MosaicML, H100",
        cluster: builtin("dgx-h100").unwrap(),
        engine: Engine::FSDP,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

fn megatron() -> Table {
    let text = include_str!("published/megatron-a100.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, tensor, pipeline, chunks) = (number(6), number(7), number(8), number(9));
        Row {
            name: fields[0].into(),
            held_out: fields[0].starts_with("Narayanan"),
            plan: plan(number(1), number(2), number(3), number(4), number(5), number(11), ""),
            engine: None,
            candidate: Candidate {
                data: gpus / tensor / pipeline,
                tensor,
                pipeline,
                sequence: fields[13] == "true",
                schedule: if chunks > 1 { Name::Interleaved } else { Name::OneFOneB },
                chunks: Some(chunks).filter(|chunks| *chunks > 1),
                recompute: recompute(fields[12]),
                ..Candidate::alone(number(10))
            },
            free_stages: false,
            seconds: fields[14].parse().unwrap(),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "blocking", get: |_, engine| &mut engine.blocking, range: [0.01, 1.0] });
    constants.push(Constant {
        name: "attention",
        get: |_, engine| match &mut engine.attention {
            AttentionKernel::Fused { share, .. } => share,
            AttentionKernel::Unfused { bytes } => bytes,
            AttentionKernel::Ours => unreachable!("an engine of others"),
        },
        range: [0.1, 40.0],
    });
    Table {
        name: "Megatron, A100",
        cluster: builtin("dgx-a100").unwrap(),
        engine: Engine::MEGATRON,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

/// The fastest that fits, over numbers of stages.
fn fastest(job: &Job, on: &Candidate) -> Estimate {
    let tried = (1..6).map(|power| 1 << power).filter_map(|pipeline| {
        let layout = Candidate { pipeline, data: on.data / pipeline, ..*on };
        job.estimate(&layout).ok().filter(|found| found.fits)
    });
    tried.min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds)).expect("a number of stages that fits")
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
        let found = [(Engine::AXONN, ""), (Engine::SAMO, PRUNED)].map(|(engine, pruned)| {
            let plan = plan(32, 2560, 32, 50257, 2048, 512, pruned);
            let on = Candidate {
                data: gpus,
                recompute: Recompute::Block,
                schedule: Name::Axonn,
                ..Candidate::alone(1)
            };
            let on = Candidate { compressed: !pruned.is_empty(), ..on };
            fastest(&Job::new(&plan, &summit, engine), &on)
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

/// As SAMO's paper prunes.
const PRUNED: &str = "[prune]\nmethod = \"magnitude\"\nsparsity = 0.9\nembeddings = true";

fn samo() -> Table {
    let text = include_str!("published/samo-summit.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, batch, samo) = (number(4), number(5), fields[0] == "samo");
        let (layers, width) = (number(1), number(2));
        let pruned =
            if samo { "[prune]\nmethod = \"magnitude\"\nsparsity = 0.9\nembeddings = true" } else { "" };
        let plan = plan(layers, width, number(3), 50257, 2048, batch, pruned);
        let flops = plan.model.train_flops(batch, Recompute::Block).unwrap();
        let share: f64 = fields[6].parse().unwrap();
        Row {
            name: format!("{} on {gpus}", fields[0]),
            held_out: gpus == 512 || gpus == 1024,
            plan,
            engine: Some(if samo { Engine::SAMO } else { Engine::AXONN }),
            candidate: Candidate {
                data: gpus,
                recompute: Recompute::Block,
                schedule: Name::Axonn,
                compressed: samo,
                ..Candidate::alone(1)
            },
            free_stages: true,
            seconds: flops / (gpus as f64 * 125e12 * share / 100.0),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "blocking", get: |_, engine| &mut engine.blocking, range: [0.05, 1.0] });
    constants.push(Constant {
        name: "attention",
        get: |_, engine| match &mut engine.attention {
            AttentionKernel::Fused { share, .. } => share,
            AttentionKernel::Unfused { bytes } => bytes,
            AttentionKernel::Ours => unreachable!("an engine of others"),
        },
        range: [0.1, 40.0],
    });
    Table {
        name: "SAMO, Summit",
        cluster: builtin("summit").unwrap(),
        engine: Engine::SAMO,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

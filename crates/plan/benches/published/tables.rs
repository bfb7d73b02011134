//! Published training times, and the clusters and engines that predict them. For a program that prints and
//! fits, and for a test.

use espalier_plan::cluster::{Cluster, builtin};
use espalier_plan::engine::{AttentionKernel, EngineProfile};
use espalier_plan::schedule::ScheduleName;
use espalier_plan::simulate::{Candidate, Estimate, Simulation};
use espalier_plan::spec::RecomputeMode;
use espalier_plan::{DataFacts, Plan, RunFile};

/// A run that somebody measured.
pub struct Row {
    pub name: String,
    /// Whether constants were fitted without it.
    pub held_out: bool,
    pub plan: Plan,
    /// Where rows of a table are of several engines.
    pub engine: Option<EngineProfile>,
    pub candidate: Candidate,
    /// Whether the number of stages is not published: then the fastest that fits counts.
    pub free_stages: bool,
    pub seconds: f64,
}

/// A table, and what predicts it.
pub struct Table {
    pub name: &'static str,
    pub cluster: Cluster,
    pub engine: EngineProfile,
    pub rows: Vec<Row>,
    pub constants: Vec<Constant>,
}

/// Where a constant is.
pub type Get = for<'a> fn(&'a mut Cluster, &'a mut EngineProfile) -> &'a mut f64;

/// A number of the cluster or the engine that may be fitted.
pub struct Constant {
    pub name: &'static str,
    pub get: Get,
    pub range: [f64; 2],
}

impl Table {
    /// Seconds of a row.
    pub fn predict(&self, row: &Row) -> f64 {
        // Constants that are fitted are the table's, the form of state is the row's.
        let engine = row.engine.map_or(self.engine, |own| EngineProfile {
            sink: own.sink,
            state: own.state,
            ..self.engine
        });
        let job = Simulation::new(&row.plan, &self.cluster, engine);
        if !row.free_stages {
            return job.estimate(&row.candidate).unwrap().step_seconds;
        }
        fastest(&job, &row.candidate).step_seconds
    }

    /// The trivial planner beside ours: one rate for all, times the bubble. The rate is that of the rows that
    /// constants were fitted to.
    pub fn baseline(&self) -> Vec<f64> {
        let ideal = |row: &Row| {
            let Candidate { pipeline, chunks, recompute, .. } = row.candidate;
            let batch = row.plan.batch.samples;
            let flops = row.plan.model.train_flops(batch, recompute).unwrap() / row.candidate.ranks() as f64;
            let micro_batches = row.candidate.micro_batches(batch).unwrap_or(1) * chunks.unwrap_or(1);
            flops * (1.0 + (pipeline - 1) as f64 / micro_batches as f64)
        };
        let fitted = self.rows.iter().filter(|row| !row.held_out);
        let rates: Vec<f64> = fitted.map(|row| (ideal(row) / row.seconds).ln()).collect();
        let rate = (rates.iter().sum::<f64>() / rates.len() as f64).exp();
        self.rows.iter().map(|row| ideal(row) / rate).collect()
    }
}

pub fn plan(
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

fn recompute(word: &str) -> RecomputeMode {
    match word {
        "block" => RecomputeMode::Block,
        "attention" => RecomputeMode::Attention,
        _ => RecomputeMode::None,
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
        Constant {
            name: "attention",
            get: |_, engine| match &mut engine.attention {
                AttentionKernel::Fused { efficiency, .. } => efficiency,
                AttentionKernel::Unfused { bytes } => bytes,
                AttentionKernel::Ours => unreachable!("an engine of others"),
            },
            range: [0.1, 40.0],
        },
    ]
}

pub fn mosaic() -> Table {
    let text = include_str!("mosaic-h100.csv");
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
                ..Candidate::single_rank(number(7))
            },
            free_stages: false,
            seconds: fields[12].parse().unwrap(),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "hides", get: |_, engine| &mut engine.hides, range: [0.001, 1.0] });
    Table {
        name: "MosaicML, H100",
        cluster: builtin("dgx-h100").unwrap(),
        engine: EngineProfile::FSDP,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

pub fn megatron() -> Table {
    let text = include_str!("megatron-a100.csv");
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
                schedule: if chunks > 1 { ScheduleName::Interleaved } else { ScheduleName::OneFOneB },
                chunks: Some(chunks).filter(|chunks| *chunks > 1),
                recompute: recompute(fields[12]),
                ..Candidate::single_rank(number(10))
            },
            free_stages: false,
            seconds: fields[14].parse().unwrap(),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "blocking", get: |_, engine| &mut engine.blocking, range: [0.01, 1.0] });
    Table {
        name: "Megatron, A100",
        cluster: builtin("dgx-a100").unwrap(),
        engine: EngineProfile::MEGATRON,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

/// The fastest that fits, over numbers of stages.
pub fn fastest(job: &Simulation, on: &Candidate) -> Estimate {
    let tried = (1..6).map(|power| 1 << power).filter_map(|pipeline| {
        let layout = Candidate { pipeline, data: on.data / pipeline, ..*on };
        job.estimate(&layout).ok().filter(|found| found.fits)
    });
    tried.min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds)).expect("a number of stages that fits")
}

/// As SAMO's paper prunes.
pub const PRUNED: &str = "[prune]\nmethod = \"magnitude\"\nsparsity = 0.9\nembeddings = true";

pub fn samo() -> Table {
    let text = include_str!("samo-summit.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, batch, samo) = (number(4), number(5), fields[0] == "samo");
        let (layers, width) = (number(1), number(2));
        let pruned =
            if samo { "[prune]\nmethod = \"magnitude\"\nsparsity = 0.9\nembeddings = true" } else { "" };
        let plan = plan(layers, width, number(3), 50257, 2048, batch, pruned);
        let flops = plan.model.train_flops(batch, RecomputeMode::Block).unwrap();
        let share: f64 = fields[6].parse().unwrap();
        Row {
            name: format!("{} on {gpus}", fields[0]),
            held_out: gpus == 512 || gpus == 1024,
            plan,
            engine: Some(if samo { EngineProfile::SAMO } else { EngineProfile::AXONN }),
            candidate: Candidate {
                data: gpus,
                recompute: RecomputeMode::Block,
                schedule: ScheduleName::Axonn,
                compressed: samo,
                ..Candidate::single_rank(1)
            },
            free_stages: true,
            seconds: flops / (gpus as f64 * 125e12 * share / 100.0),
        }
    };
    let mut constants = constants();
    constants.push(Constant { name: "blocking", get: |_, engine| &mut engine.blocking, range: [0.05, 1.0] });
    Table {
        name: "SAMO, Summit",
        cluster: builtin("summit").unwrap(),
        engine: EngineProfile::SAMO,
        rows: rows(text).map(of).collect(),
        constants,
    }
}

//! Published training times, and the clusters and engines that predict them. For a program that prints and
//! fits, and for a test.

use espalier_plan::cluster::{Cluster, Fabric, MatmulRates, builtin};
use espalier_plan::engine::{AttentionKernel, EngineProfile};
use espalier_plan::schedule::ScheduleName;
use espalier_plan::search::{LayoutSearch, SearchConstraints};
use espalier_plan::simulate::{Candidate, Estimate, Simulation};
use espalier_plan::spec::RecomputeMode;
use espalier_plan::{DataFacts, Plan, RunFile};

/// A run that somebody measured.
pub struct Row {
    pub name: String,
    /// What it has in common with others: of a split by sets one is left out of the fit at a time.
    pub set: String,
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
            attention: self.engine.attention,
            passes: self.engine.passes,
            blocking: self.engine.blocking,
            ..own
        });
        let job = Simulation::new(&row.plan, &self.cluster, engine);
        if !row.free_stages {
            return job.estimate(&row.candidate).unwrap().step_seconds;
        }
        searched(&job, row.candidate.ranks()).step_seconds
    }

    /// The trivial planner beside ours: one rate for all, times the bubble. The rate is that of the rows that
    /// constants were fitted to; where there are none, that of all rows, which it would not know beforehand.
    pub fn baseline(&self) -> Vec<f64> {
        let ideal = |row: &Row| {
            let Candidate { pipeline, chunks, recompute, .. } = row.candidate;
            let batch = row.plan.batch.samples;
            let flops = row.plan.model.train_flops(batch, recompute).unwrap() / row.candidate.ranks() as f64;
            let micro_batches = row.candidate.micro_batches(batch).unwrap_or(1) * chunks.unwrap_or(1);
            flops * (1.0 + (pipeline - 1) as f64 / micro_batches as f64)
        };
        let unseen = self.rows.iter().all(|row| row.held_out);
        let fitted = self.rows.iter().filter(|row| unseen || !row.held_out);
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
    resolved(&text)
}

fn resolved(text: &str) -> Plan {
    Plan::new(RunFile::parse(text, &[]).unwrap(), DataFacts::default()).unwrap()
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

/// Products of 16-bit numbers.
fn halves(cluster: &mut Cluster) -> &mut MatmulRates {
    let device = &mut cluster.device;
    device.bf16.as_mut().or(device.fp16.as_mut()).expect("published runs are of 16 bits")
}

fn constants() -> Vec<Constant> {
    let all: [(&str, Get, [f64; 2]); 8] = [
        ("efficiency[2]", |cluster, _| &mut halves(cluster).efficiency[2][1], [0.1, 0.85]),
        (
            "largest efficiency",
            |cluster, _| &mut halves(cluster).efficiency.last_mut().unwrap()[1],
            [0.1, 0.9],
        ),
        ("network efficiency", |cluster, _| &mut network(cluster).efficiency, [0.2, 1.0]),
        ("link efficiency", |cluster, _| &mut cluster.node.link.as_mut().unwrap().efficiency, [0.4, 0.9]),
        ("contention", |cluster, _| &mut network(cluster).contention, [0.0001, 5.0]),
        ("straggle", |cluster, _| &mut network(cluster).straggle, [0.0001, 0.1]),
        ("passes", |_, engine| &mut engine.passes, [0.8, 6.0]),
        ("attention", |_, engine| attention(engine), [0.1, 40.0]),
    ];
    all.map(|(name, get, range)| Constant { name, get, range }).into()
}

fn network(cluster: &mut Cluster) -> &mut Fabric {
    cluster.network.as_mut().expect("published runs are of several nodes")
}

fn attention(engine: &mut EngineProfile) -> &mut f64 {
    match &mut engine.attention {
        AttentionKernel::Fused { speed } => speed,
        AttentionKernel::Unfused { bytes } => bytes,
    }
}

/// MosaicML's runs on H100, of which every other size of model is held out.
pub fn mosaic() -> Table {
    let text = include_str!("mosaic-h100.csv");
    let held_out = |model: &str| ["30b", "7b", "1b"].contains(&model);
    mosaic_on("MosaicML, H100", builtin("dgx-h100").unwrap(), text, held_out)
}

/// Later runs of theirs on 128 to 512 of them.
pub fn mosaic_large() -> Table {
    let text = include_str!("mosaic-h100-large.csv");
    mosaic_on("MosaicML, 128 to 512 H100", builtin("dgx-h100").unwrap(), text, |_| true)
}

/// MosaicML's runs on A100 of 80 GB.
pub fn mosaic_a100() -> Table {
    let text = include_str!("mosaic-a100-80gb.csv");
    mosaic_on("MosaicML, A100 80 GB", builtin("dgx-a100").unwrap(), text, |_| true)
}

/// The same on A100 of 40 GB, whose memory is slower too.
pub fn mosaic_a100_40gb() -> Table {
    let text = include_str!("mosaic-a100-40gb.csv");
    let mut cluster = builtin("dgx-a100").unwrap();
    (cluster.device.memory_gb, cluster.device.memory.gb_per_s) = (40.0, 1555.0);
    mosaic_on("MosaicML, A100 40 GB", cluster, text, |_| true)
}

/// Runs of llm-foundry (its scripts/train/benchmarking).
fn mosaic_on(name: &'static str, cluster: Cluster, text: &str, held_out: fn(&str) -> bool) -> Table {
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        Row {
            name: format!("{} s {} on {}, micro-batch {}", fields[0], fields[5], fields[6], fields[7]),
            set: fields[0].into(),
            held_out: held_out(fields[0]),
            plan: plan(number(1), number(2), number(3), number(4), number(5), number(8), ""),
            engine: None,
            candidate: Candidate {
                // Gradients and state are sharded alone, or weights too.
                zero: if fields[10] == "SHARD_GRAD_OP" { 2 } else { 3 },
                ..sharded(number(6), number(7), fields[9])
            },
            free_stages: false,
            seconds: fields[12].parse().unwrap(),
        }
    };
    fsdp(name, cluster, rows(text).map(of).collect())
}

/// Llamas of torchtitan (its docs/performance.md) on A100, those of them without recomputation and with that
/// of all blocks.
pub fn torchtitan() -> Table {
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let [layers, width, heads, kv_heads, inner, vocab, context, gpus, micro_batch] =
            std::array::from_fn(|i| number(i + 1));
        let text = format!(
            "[model]\nname = \"llama\"\nlayers = {layers}\nwidth = {width}\nheads = {heads}\nkv_heads = {kv_heads}\n\
             inner = {inner}\nvocab = {vocab}\ncontext = {context}\ntied = false\n\
             [train]\nbatch = {}\nprecision = \"bf16\"\n",
            gpus * micro_batch
        );
        Row {
            name: format!("{} s {context} on {gpus}, micro-batch {micro_batch}", fields[0]),
            set: fields[0].into(),
            held_out: true,
            plan: resolved(&text),
            engine: None,
            candidate: sharded(gpus, micro_batch, fields[10]),
            free_stages: false,
            seconds: (micro_batch * context) as f64 / fields[11].parse::<f64>().unwrap(),
        }
    };
    let text = include_str!("torchtitan-a100.csv");
    fsdp("torchtitan, A100", builtin("dgx-a100").unwrap(), rows(text).map(of).collect())
}

/// Replicas that shard everything.
fn sharded(gpus: usize, micro_batch: usize, recomputed: &str) -> Candidate {
    Candidate { data: gpus, recompute: recompute(recomputed), zero: 3, ..Candidate::single_rank(micro_batch) }
}

/// A table of FSDP's runs.
fn fsdp(name: &'static str, cluster: Cluster, rows: Vec<Row>) -> Table {
    let mut constants = constants();
    let hides: [(&str, Get); 2] = [
        ("hides", |_, engine| &mut engine.hides[1]),
        ("hides within a node", |_, engine| &mut engine.hides[0]),
    ];
    constants.extend(hides.map(|(name, get)| Constant { name, get, range: [0.001, 1.0] }));
    Table { name, cluster, engine: EngineProfile::FSDP, rows, constants }
}

pub fn megatron() -> Table {
    let text = include_str!("megatron-a100.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, tensor, pipeline, chunks) = (number(6), number(7), number(8), number(9));
        Row {
            name: fields[0].into(),
            set: fields[0].split_whitespace().next().unwrap().into(),
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

/// What the search finds for so many devices: of AxoNN and what is built into it with micro-batches of one.
pub fn searched(job: &Simulation, devices: usize) -> Estimate {
    let micro_batch = Some(1).filter(|_| job.engine.fewest_stages);
    let fixed = SearchConstraints { micro_batch, ..SearchConstraints::default() };
    let search = LayoutSearch { job, devices, fixed: &fixed, rows: 1 };
    search.run().unwrap().ranked.into_iter().next().expect("a layout that fits")
}

/// A 3 x 3 convolution of 64 channels, batch 32, f32, tiled over V100s (Jin, Ginsburg & Keutzer 2018; Dryden
/// et al. 2019): side, GPUs, and how many times as fast as one, published and predicted. A layer's time is
/// what four more of it add to a network.
pub fn spatial() -> Vec<(usize, usize, [f64; 2])> {
    let summit = builtin("summit").unwrap();
    let layer = |side: usize, gpus: usize| {
        let step = |layers: usize| {
            let conv = "  { type = \"conv\", output = 64, kernel = 3, padding = 1 },\n".repeat(layers);
            let text = format!(
                "[model]\nname = \"custom\"\nlayers = [\n{conv}  {{ type = \"global_avg_pool\" }}, {{ type = \"linear\" }} ]\n\
                 [data]\nkind = \"shapes\"\n[train]\nbatch = 32\n"
            );
            let facts = DataFacts { image: Some((side, side, 3)), classes: Some(10), ..DataFacts::default() };
            let plan = Plan::new(RunFile::parse(&text, &[]).unwrap(), facts).unwrap();
            let candidate = Candidate { grid: [gpus, 1], ..Candidate::single_rank(32) };
            let job = Simulation::new(&plan, &summit, EngineProfile::ESPALIER);
            job.estimate(&candidate).unwrap().step_seconds
        };
        step(6) - step(2)
    };
    let seen: Vec<Vec<f64>> = rows(include_str!("spatial.csv"))
        .map(|fields| fields.iter().map(|field| field.parse().unwrap()).collect())
        .collect();
    let both = |row: &[f64]| row[2] + row[3];
    let of = |row: &Vec<f64>| {
        let (side, gpus) = (row[0] as usize, row[1] as usize);
        let single = seen.iter().find(|one| one[0] == row[0] && one[1] == 1.0).unwrap();
        (side, gpus, [both(single) / both(row), layer(side, 1) / layer(side, gpus)])
    };
    seen.iter().filter(|row| row[1] > 1.0).map(of).collect()
}

/// As SAMO's paper prunes.
pub const PRUNED: &str = "[prune]\nmethod = \"magnitude\"\nsparsity = 0.9\nembeddings = true";

pub fn samo() -> Table {
    let text = include_str!("samo-summit.csv");
    let of = |fields: Vec<&str>| {
        let number = |i: usize| fields[i].parse::<usize>().unwrap();
        let (gpus, batch, engine) = (number(4), number(5), EngineProfile::named(fields[0]).unwrap());
        let (layers, width, pruned) = (number(1), number(2), if engine.compresses() { PRUNED } else { "" });
        let plan = plan(layers, width, number(3), 50257, 2048, batch, pruned);
        let flops = plan.model.train_flops(batch, RecomputeMode::Block).unwrap();
        let share: f64 = fields[6].parse().unwrap();
        Row {
            name: format!("{} on {gpus}", fields[0]),
            set: gpus.to_string(),
            held_out: gpus == 512 || gpus == 1024,
            plan,
            engine: Some(engine),
            candidate: Candidate {
                data: gpus,
                recompute: RecomputeMode::Block,
                schedule: ScheduleName::Axonn,
                compressed: engine.compresses(),
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

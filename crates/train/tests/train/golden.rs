//! Golden runs: the losses and the weights of small runs, bit for bit, as they stand in `golden/runs.json`.
//!
//! A change that is meant to leave behaviour as it is must leave these alone; one that is meant to change
//! numbers writes them anew,
//!
//! ```text
//! ESPALIER_GOLDEN=write cargo test --workspace --test train golden
//! ```
//!
//! and says why. The text and the synthetic shapes are the test's own, and the processor is held to portable
//! instructions, of which every machine has the same: richer sets add in other orders. What is left of the
//! platform is its sine and cosine in f64, whose last bit is lost when a learning rate becomes an f32 and a
//! colour a byte.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::{env, fs};

use espalier_tensor::Device;
use espalier_tensor::cpu::{Cpu, Isa};
use espalier_train::run::{Launch, RunDir, run};
use serde::{Deserialize, Serialize};

use crate::support::{Base, RecordingObserver, base, hash, prepare, tiny_cnn};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/train/golden/runs.json");
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/train/golden/text.txt");

/// What a run came to. Numbers are written with the digits that name one f64 and no other.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Golden {
    losses: Vec<String>,
    evaluations: Vec<String>,
    weights: String,
}

fn golden(base: &Base) -> Golden {
    let (plan, dataset, _) = prepare(base, 1);
    let device = Device::Cpu(Cpu::with_isa(1, Isa::Portable).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut observer = RecordingObserver::default();
    let run_dir = RunDir::at(folder.path());
    let outcome = run(plan, dataset, &device, &run_dir, &Launch::default(), &mut observer).unwrap();
    Golden {
        losses: observer.losses.iter().map(|loss| format!("{loss:?}")).collect(),
        evaluations: observer.evaluations.iter().map(|(_, loss)| format!("{loss:?}")).collect(),
        weights: hash(outcome.summary),
    }
}

/// Compares runs with what is in the file, or puts them there.
fn check(cases: impl IntoIterator<Item = (String, Base)>) {
    static FILE_IN_USE: Mutex<()> = Mutex::new(());
    let found: BTreeMap<String, Golden> =
        cases.into_iter().map(|(name, base)| (name, golden(&base))).collect();
    let _lock = FILE_IN_USE.lock();
    let mut known: BTreeMap<String, Golden> =
        fs::read(FILE).map_or_else(|_| BTreeMap::new(), |text| serde_json::from_slice(&text).unwrap());
    if env::var("ESPALIER_GOLDEN").is_ok_and(|how| how == "write") {
        known.extend(found);
        return fs::write(FILE, serde_json::to_string_pretty(&known).unwrap() + "\n").unwrap();
    }
    let changed: Vec<_> = found
        .iter()
        .filter(|(name, golden)| known.get(*name) != Some(golden))
        .map(|(name, golden)| format!("{name}: {golden:?}\n  instead of {:?}", known.get(name)))
        .collect();
    assert!(changed.is_empty(), "{} of {} runs changed:\n{}", changed.len(), found.len(), changed.join("\n"));
}

fn gpt(precision: &str) -> Base {
    base(include_str!("golden/gpt.toml")).set(format!("data.path={TEXT} train.precision={precision}"))
}

fn pruned(base: &Base) -> Base {
    base.set("prune.method=gradual prune.sparsity=0.8 prune.every=1 prune.end=2 prune.state=compressed")
}

fn cnn() -> Base {
    tiny_cnn("train.steps=4 train.eval_every=2 train.micro_batches=2 checkpoint.last=false data.count=80")
}

/// A name and what it changes.
const LAYOUTS: [(&str, &str); 6] = [
    ("one rank", ""),
    ("2 replicas", "parallel.data=2"),
    ("2 stages", "parallel.pipeline=2"),
    ("2 x 2", "parallel.data=2 parallel.pipeline=2"),
    ("zero", "parallel.data=2 parallel.zero=true"),
    ("local", "parallel.data=2 parallel.average_every=2"),
];

fn on_layouts<'a>(
    what: &'a str,
    base: &'a Base,
    layouts: &'a [(&str, &str)],
) -> impl Iterator<Item = (String, Base)> + 'a {
    let one = move |(layout, changes): &(&str, &str)| (format!("{what}, {layout}"), base.set(changes));
    layouts.iter().map(one)
}

#[test]
fn golden_gpt_in_f32() {
    let (dense, pruned) = (gpt("f32"), pruned(&gpt("f32")));
    check(on_layouts("gpt f32", &dense, &LAYOUTS).chain(on_layouts("gpt f32 pruned", &pruned, &LAYOUTS)));
}

#[test]
fn golden_gpt_in_bf16() {
    let (dense, pruned) = (gpt("bf16"), pruned(&gpt("bf16")));
    check(on_layouts("gpt bf16", &dense, &LAYOUTS).chain(on_layouts("gpt bf16 pruned", &pruned, &LAYOUTS)));
}

#[test]
fn golden_cnn() {
    let base = cnn();
    let synchronised = base.set("parallel.batch_norm=synchronised parallel.data=2");
    let synchronised = ("cnn, synchronised".to_owned(), synchronised);
    check(on_layouts("cnn", &base, &LAYOUTS).chain([synchronised]));
}

/// Methods that need gradients of all weights, and those that compare several steps.
#[test]
fn golden_pruning_methods() {
    let set = |changes: &str| gpt("f32").set(changes);
    let methods = [
        ("snip", set("prune.method=snip prune.samples=8")),
        ("grasp", set("prune.method=grasp prune.samples=4")),
        ("rigl", set("prune.method=rigl prune.every=1 prune.sparsity=0.7")),
        ("elsa", set("prune.method=elsa prune.every=1 prune.penalty=0.1")),
        ("lottery", set("prune.method=lottery prune.rate=0.5 prune.sparsity=0.5")),
        ("2:4", set("prune.method=2:4")),
    ];
    let layouts = [LAYOUTS[0], LAYOUTS[3]];
    check(methods.iter().flat_map(|(name, base)| on_layouts(name, base, &layouts)));
}

/// Every schedule, on a pruned GPT of as many blocks as the longest needs.
#[test]
fn golden_schedules() {
    let base = gpt("f32").set("prune.method=magnitude prune.sparsity=0.8 model.layers=3");
    let base = base.set("train.micro_batches=4 model.tied=false train.clip=0");
    let base = base.set("parallel.pipeline=2");
    let schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "axonn", "pipedream", "2bw"];
    check(schedules.map(|name| (format!("schedule {name}"), base.set(format!("parallel.schedule={name}")))));
}

//! A run as its ranks go through it: what it leaves on a disk, what it sends, and where it stops.

use std::sync::atomic::Ordering;

use espalier_plan::RunFile;
use espalier_plan::config::Override;
use espalier_plan::schedule::Action;
use espalier_plan::traffic::StepTraffic;

use super::*;
use crate::durable::record;
use crate::parallel::on_threads;

const RUN: &str = r#"
    model = { name = "gpt", layers = 1, heads = 1, width = 8, context = 8 }
    data = { kind = "arithmetic", count = 20 }
    train = { steps = 2, batch = 2, eval_samples = 2 }
    optimizer = { name = "adamw" }
    checkpoint = { every = 1 }
"#;

fn prepare(overrides: &[&str]) -> (Plan, Dataset) {
    let overrides: Vec<Override> = overrides.iter().map(|set| Override::from(*set)).collect();
    let run_file = RunFile::parse(RUN, &overrides).unwrap();
    let dataset = Dataset::open(&run_file).unwrap();
    (Plan::new(run_file, dataset.facts()).unwrap(), dataset)
}

/// Runs as ranks on threads, each with a flag and an observer of its own; what each came to, and the bytes
/// that it sent.
fn on_ranks<O: Observer>(
    overrides: &[&str],
    folder: &Path,
    observer: impl Fn(&Ranks, &Arc<AtomicBool>) -> O + Sync,
) -> Vec<(RunOutcome, u64)> {
    let (plan, dataset) = prepare(overrides);
    let (run_dir, dataset) = (RunDir::at(folder), Arc::new(dataset));
    let ran = on_threads(&plan.mesh, &Device::cpu(1).unwrap(), |ranks, device| {
        let (stop, sent) = (Arc::default(), ranks.clone());
        let mut rank_observer = observer(&ranks, &stop);
        let outcome = from_start_to_end(
            plan.clone(),
            dataset.clone(),
            device,
            &run_dir,
            ranks,
            &stop,
            &mut rank_observer,
        )?;
        Ok((outcome, sent.sent().total()))
    });
    ran.unwrap()
}

/// What a power cut leaves: a folder under its name, then the files that say what the run is, then for each
/// checkpoint the metrics up to it, its tensors and what is beside them, its manifest, their names, and last
/// the name that makes it one.
#[test]
fn everything_that_a_run_leaves_is_synced_in_an_order_that_a_power_cut_may_interrupt() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, dataset) = prepare(&[]);
    let run_dir = RunDir::at(folder.path().join("out/run"));
    run(plan, dataset, &Device::cpu(1).unwrap(), &run_dir, &Launch::default(), &mut ()).unwrap();

    let mut expected: Vec<String> = ["", "out"].map(str::to_owned).into();
    let run = ["/.run.toml.writing", "", "/.plan.json.writing", "", "", "/metrics.jsonl", ""];
    expected.extend(run.map(|path| format!("out/run{path}")));
    for step in 1..=2 {
        if step == 2 {
            expected.push("out/run/metrics.jsonl".into());
        }
        let tensors = ["/model.safetensors", "/optimizer.safetensors"];
        let beside = ["/config.json", "/generation_config.json", "/tokenizer.json", "/tokenizer_config.json"];
        for file in tensors.iter().chain(&beside).chain(&["/manifest.json", ""]) {
            expected.push(format!("out/run/checkpoints/.writing-step-00000{step}{file}"));
        }
        expected.push("out/run/checkpoints".into());
    }
    expected.extend(["/metrics.jsonl", "/.summary.json.writing", ""].map(|path| format!("out/run{path}")));
    assert_eq!(record::below(folder.path()), expected);
}

/// Layouts that agree in different ways: in an all-reduce over all ranks, at the end of a list, in an average.
const LAYOUTS: [&[&str]; 8] = [
    &["parallel.data=2"],
    &["parallel.data=2", "parallel.zero=true"],
    &["parallel.data=2", "parallel.zero=3"],
    &["parallel.tensor=2"],
    &["parallel.pipeline=2", "parallel.data=2", "train.micro_batches=2"],
    &["parallel.pipeline=2", "train.micro_batches=2", "parallel.schedule=pipedream", "parallel.drain=4"],
    &[
        "parallel.pipeline=2",
        "parallel.data=2",
        "train.micro_batches=2",
        "parallel.schedule=2bw",
        "parallel.drain=4",
    ],
    &["parallel.data=3", "parallel.average_every=4"],
];
const SMALL: [&str; 7] = [
    "model.layers=2",
    "model.heads=2",
    "model.tied=false",
    "data.count=60",
    "train.batch=12",
    "checkpoint.every=100",
    "checkpoint.keep=1",
];

/// Asks its rank to stop after a step.
struct StopAfter(u64, Arc<AtomicBool>);

impl Observer for StopAfter {
    fn step(&mut self, report: &StepReport, _: Throughput, _: usize) {
        self.1.fetch_or(report.step == self.0, Ordering::Relaxed);
    }
}

/// As a signal does that reaches one process alone, and not the first.
#[test]
fn one_rank_that_is_asked_to_stop_stops_all_after_the_same_step() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        let overrides = [&SMALL, layout, &["train.steps=20"]].concat();
        let ran = on_ranks(&overrides, folder.path(), |ranks, stop| {
            StopAfter(if ranks.rank() == 1 { 2 } else { u64::MAX }, stop.clone())
        });
        // Where ranks agree in every step, it is the one in which they next do.
        let waits = overrides.iter().any(|set| set.contains("drain") || set.contains("average_every"));
        let expected = if waits { 4 } else { 3 };
        for (rank, (outcome, _)) in ran.iter().enumerate() {
            assert!(outcome.interrupted, "{layout:?}, rank {rank}");
            assert_eq!(outcome.summary.steps, expected, "{layout:?}, rank {rank}");
        }
        let checkpoint = folder.path().join(format!("checkpoints/step-{expected:06}/manifest.json"));
        assert!(checkpoint.exists(), "{layout:?}");
    }
}

/// Whether to stop is agreed on with all else: between two steps a run makes no collective of its own, or it
/// would be counted here.
#[test]
fn a_run_sends_what_the_plan_says_of_its_steps_and_nothing_more() {
    for layout in LAYOUTS {
        let sent = |steps: &str| {
            let overrides = [&SMALL, layout, &["checkpoint.last=false", steps]].concat();
            let ran = on_ranks(&overrides, tempfile::tempdir().unwrap().path(), |_, _| ());
            ran.into_iter().map(|(_, sent)| sent).collect::<Vec<u64>>()
        };
        let (plan, _) = prepare(&[&SMALL, layout].concat());
        let [short, long] = ["train.steps=4", "train.steps=8"].map(sent);
        for (rank, (short, long)) in short.into_iter().zip(long).enumerate() {
            let traffic = plan.traffic(rank, &plan.gradient_lengths(rank)).unwrap();
            let schedule = plan.schedule(if plan.pipeline.is_asynchronous() { 4 } else { 1 }).unwrap();
            let list = &schedule.ranks[plan.mesh.coordinates(rank).pipeline];
            let arrives = |action: &&Action| matches!(action, Action::Receive(_) | Action::RecvControl(_));
            let actions = list.iter().filter(|action| !arrives(action)).map(|action| traffic.bytes(action));
            let layers = plan.layer_traffic(rank, &schedule).unwrap();
            let exchanges = StepTraffic { layers, ..StepTraffic::default() };
            let of_list = actions.sum::<u64>() + exchanges.total();
            let expected = match plan.data_parallel.averages_after(4) {
                true => traffic.bytes(&Action::Average),
                false => of_list * (4 / schedule.batches as u64),
            };
            assert_eq!(long - short, expected, "{layout:?}, rank {rank}");
        }
    }
}

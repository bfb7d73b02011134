//! Stages and replicas together: what they split, save and score is what one rank has.

use std::collections::BTreeMap;

use espalier_train::RunSummary;
use espalier_train::checkpoint::Checkpoint;
use espalier_train::parallel::Ranks;
use espalier_train::prune::{count, differing};

use crate::support::{Base, files, images, passed_on, rotary_llama, saved, tiny_gpt, tiny_llama};

/// A tied GPT of several blocks, whose batch all layouts here divide.
fn gpt() -> Base {
    tiny_gpt("train.batch=8 train.eval_samples=11 model.layers=3").set("train.micro_batches=4")
}

fn on(base: &Base, stages: usize, data: usize, schedule: &str) -> Base {
    let base = base.set(format!("parallel.data={data} parallel.pipeline={stages}"));
    let micro_batches = 4 / data;
    let base = base.set(format!("train.micro_batches={micro_batches}"));
    if stages > 1 { base.set(format!("parallel.schedule={schedule}")) } else { base }
}

/// A tied table is shared by the replicas of two stages; copies of a stage by the ranks that hold them.
#[test]
fn sharded_state_gives_the_bits_of_replicated_state_on_every_stage() {
    let pruned = gpt().set("prune.method=gradual prune.sparsity=0.8 prune.end=4");
    let pruned = pruned.set("prune.every=2 prune.embeddings=true");
    for (what, base) in [
        ("adamw", gpt().set("train.clip=0.5 train.precision=bf16")),
        ("lamb, pruned", pruned.set("optimizer.name=lamb train.clip=0.5")),
        ("low bits, pruned", pruned.set("train.precision=bf16 optimizer.master=low-bits")),
    ] {
        for (stages, schedule) in [(2, "1f1b"), (2, "chimera"), (2, "zb-h1"), (3, "gpipe")] {
            let base = on(&base, stages, 2, schedule);
            let (replicated, shared) = (base.steps(5).run(), base.set("parallel.zero=true").steps(5).run());
            let what = format!("{what}, {stages} stages, {schedule}");
            assert_eq!(replicated.weights_hash, shared.weights_hash, "{what}");
            assert_eq!(replicated.loss, shared.loss, "{what}");
            let in_use = |of: &RunSummary| of.memory["optimizer"].measured.unwrap() as f64;
            assert!(in_use(&shared) < 0.55 * in_use(&replicated), "{what}");
        }
    }
}

/// A model of grouped queries and gates learns, and learns the same in stages, on replicas, recomputed, and
/// pruned in compressed state.
#[test]
fn llama_s_layers_learn_and_every_layout_is_the_same_run() {
    let changes = "train.batch=8 train.micro_batches=4 train.eval_samples=8";
    [tiny_llama(changes), rotary_llama(changes)].iter().for_each(learns_the_same_everywhere);
}

fn learns_the_same_everywhere(base: &Base) {
    let loss = |base: &Base, steps: usize| base.steps(steps).run().loss.unwrap();
    let long = loss(&base.set("train.batch=16 model.context=24"), 40);
    let first = loss(base, 1);
    assert!(long < 0.85 * first, "{first} at first, {} after 40 steps", long);
    let wanted = loss(base, 6);
    for (stages, data, schedule) in [(2, 1, "1f1b"), (3, 1, "zb-h1"), (1, 2, ""), (2, 2, "gpipe")] {
        let got = loss(&on(base, stages, data, schedule), 6);
        assert!((got - wanted).abs() < 2e-5, "{stages} stages of {data}, {schedule}: {got}, alone {wanted}");
    }
    let in_stages = ["1f1b", "zb-h1"].map(|schedule| on(base, 2, 1, schedule).steps(4));
    for kept in [base.steps(4)].iter().chain(&in_stages) {
        let expected = kept.run().weights_hash;
        for again in ["train.recompute=block", "train.recompute=attention"] {
            assert_eq!(kept.set(again).run().weights_hash, expected, "{kept}, {again}");
        }
    }
    let pruned = base.set("prune.method=magnitude prune.sparsity=0.7");
    let [dense, compressed] =
        ["dense", "compressed"].map(|state| pruned.set(format!("prune.state={state}")).steps(4).run());
    assert_eq!(dense.weights_hash, compressed.weights_hash, "compressed is masked-dense");
}

/// Rank 0 speaks for stages that it does not hold, and holds no candidate where it has the embeddings alone.
#[test]
fn what_is_reported_of_pruning_is_of_all_stages() {
    let base = gpt().set("model.tied=false prune.method=magnitude");
    let message = |base: &Base| {
        let (ended, observer) = base.set("train.steps=2").run_observed();
        (ended.unwrap().state_bytes_per_parameter, observer.warnings)
    };
    for sparsity in ["prune.sparsity=0.3", "prune.sparsity=0.9995"] {
        let base = base.set(sparsity);
        let (bytes, warnings) = message(&base);
        assert_eq!(warnings.is_empty(), sparsity == "prune.sparsity=0.3", "{warnings:?}");
        for (stages, data, schedule) in [(2, 1, "1f1b"), (5, 1, "gpipe"), (2, 2, "chimera")] {
            let (there, theirs) = message(&on(&base, stages, data, schedule));
            assert!((there - bytes).abs() < 1e-9, "{stages} stages: {there} {bytes}");
            assert_eq!(theirs, warnings, "{stages} stages");
        }
    }
}

/// From one rank through every layout and back: byte for byte, with the masks and what the method remembers.
#[test]
fn a_checkpoint_goes_through_any_layout_unchanged() {
    let lottery = gpt().set("prune.method=lottery prune.rate=0.3 prune.sparsity=0.5");
    let early = gpt().set("prune.method=early-bird prune.every=2 prune.latest=20");
    let resnet = images().set("model.name=resnet8 data.size=16 data.count=120");
    for (what, base, steps) in [
        ("lottery", lottery.set("prune.rewind=2 prune.embeddings=true train.steps=30"), 12),
        ("early bird", early.set("train.precision=bf16 train.steps=30 prune.window=9"), 7),
        ("statistics", resnet.set("train.batch=8 train.micro_batches=4 train.steps=9"), 3),
    ] {
        let folder = saved(&base, steps);
        let before = files(folder.path());
        assert_eq!(before.contains_key("pruner.safetensors"), what != "statistics", "{what}");
        let layouts = [
            (2, 1, "1f1b", 0),
            (2, 2, "1f1b", 1),
            (3, 1, "zb-h1", 0),
            (2, 2, "chimera", 0),
            (2, 2, "chimera", 1),
            (2, 1, "interleaved", 0),
            (1, 4, "", 1),
            (2, 2, "interleaved", 2),
        ];
        let layouts = layouts.map(|(stages, data, schedule, zero)| {
            on(&base, stages, data, schedule).set(format!("parallel.zero={zero}"))
        });
        let after = files(passed_on(folder.path(), layouts.into_iter().chain([base.clone()])).path());
        let changed: Vec<&String> =
            before.keys().filter(|name| before.get(*name) != after.get(*name)).collect();
        assert!(changed.is_empty() && after.len() == before.len(), "{what}: {changed:?}");
    }
}

/// The masks of a run's last checkpoint.
fn masks(base: &Base, steps: usize) -> (BTreeMap<String, Vec<u32>>, f64) {
    let folder = tempfile::tempdir().unwrap();
    let loss = base.steps(steps).run_in(folder.path()).loss.unwrap();
    let checkpoint = Checkpoint::find(folder.path(), &Ranks::single(), |_| ()).unwrap();
    let words = |name: &str| checkpoint.u32_values("masks.safetensors", name).unwrap().unwrap();
    let masks = checkpoint.names("masks.safetensors").map(|name| (name.to_owned(), words(name)));
    (masks.collect(), loss)
}

#[test]
fn scores_on_stages_and_replicas_are_those_of_one_rank() {
    let base = gpt().set("prune.sparsity=0.7 prune.embeddings=true model.dropout=0.1");
    let base = base.set("optimizer.name=sgd learning_rate.peak=0.1");
    for (method, base, steps) in [
        ("wanda", base.set("prune.embeddings=false prune.method=wanda prune.samples=21"), 1),
        ("snip", base.set("prune.method=snip prune.samples=21"), 1),
        ("grasp", base.set("prune.method=grasp prune.samples=12"), 1),
        ("rigl", base.set("prune.method=rigl prune.every=1 prune.until=1"), 3),
    ] {
        // RigL uses a micro-batch: of one rank it is as large as those of all replicas together.
        let single = [1, 2].map(|data| masks(&base.set(format!("train.micro_batches={}", 4 / data)), steps));
        for (stages, data, schedule) in
            [(2, 1, "1f1b"), (2, 2, "1f1b"), (3, 1, "gpipe"), (2, 2, "chimera"), (2, 1, "interleaved")]
        {
            let ((one, loss), (many, near)) =
                (&single[data - 1], masks(&on(&base, stages, data, schedule), steps));
            let layout = format!("{method}: {stages} stages, {data} replicas, {schedule}");
            assert!(one.keys().eq(many.keys()), "{layout}");
            let all: usize = one.values().map(|words| 32 * words.len()).sum();
            let counts =
                |masks: &BTreeMap<String, Vec<u32>>| masks.values().map(|words| count(words)).sum::<usize>();
            assert_eq!(counts(one), counts(&many), "{layout}");
            let apart = one.iter().map(|(name, words)| differing(words, &many[name])).sum::<usize>();
            assert!(apart as f64 <= 3e-3 * all as f64, "{layout}: {apart} of {all} places differ");
            assert!((loss - near).abs() < 1e-3 * loss, "{layout}: {loss}, {near}");
        }
    }
}

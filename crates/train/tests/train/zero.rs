//! State that ranks split: the same weights bit for bit, in the bytes that were promised.

use std::fs;

use espalier_train::RunSummary;

use crate::parallel::{Shown, on};
use crate::support::{
    Base, assert_predicted, files, hash, images, passed_on, planned, pruned, save_again, saved, tiny_cnn,
    tiny_gpt,
};
use crate::tensor::all_same;

const OPTIMIZERS: [&str; 7] = ["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"];

/// On so many ranks that split state, or not.
fn shared(base: &Base, ranks: usize, zero: usize) -> Base {
    base.replicas(ranks).set(format!("parallel.zero={zero}"))
}

/// Weights and losses to the bit; norms are sums over shards. Of one micro-batch gradients are summed alike
/// wherever their sums are.
fn the_same(base: &Base, ranks: usize, steps: usize) {
    let [replicated, shared, scattered, sharded] =
        [0, 1, 2, 3].map(|zero| on(ranks, &base.set(format!("parallel.zero={zero}")), steps));
    if planned(&base.replicas(ranks)).batch.micro_batches == 1 {
        assert_eq!(scattered, shared, "{base} on {ranks} ranks");
    }
    assert_eq!(sharded, scattered, "{base} on {ranks} ranks, weights sharded");
    let bits = |of: &Shown| (of.losses.clone(), of.validation, of.weights.clone(), of.masks.clone());
    assert_eq!(bits(&replicated), bits(&shared), "{base} on {ranks} ranks");
    let far = |a: &f64, b: &f64| (a - b).abs() / a.abs().max(1e-300);
    for (a, b) in
        replicated.norms.iter().chain(&replicated.noise).zip(shared.norms.iter().chain(&shared.noise))
    {
        assert!(far(a, b) < 1e-9, "{base} on {ranks} ranks: a norm of {a} is {b}");
    }
}

#[test]
fn sharded_state_gives_the_bits_of_replicated_state() {
    let (steps, layouts) = if espalier_testing::long() { (8, 3) } else { (3, 1) };
    for (i, optimizer) in OPTIMIZERS.into_iter().enumerate() {
        let masters = [("f32", "f32"), ("bf16", "f32"), ("bf16", "low-bits")];
        for (j, (precision, master)) in masters.into_iter().enumerate() {
            let base = tiny_gpt("train.batch=12 train.clip=0.5 train.micro_batches=2")
                .set(format!("optimizer.name={optimizer} train.precision={precision}"));
            let base =
                if precision == "bf16" { base.set(format!("optimizer.master={master}")) } else { base };
            // In the short form one of them: each optimizer has all three, and each precision.
            let all = [(2, base.clone()), (3, pruned(&base)), (6, pruned(&base))];
            for (ranks, base) in all.into_iter().cycle().skip(i + j).take(layouts) {
                the_same(&base, ranks, steps);
            }
        }
    }
}

/// A message of its own for a large parameter, with and without padding, and small ones packed.
#[test]
fn large_parameters_travel_alone() {
    let base = images().set("train.batch=14 data.count=60 model.name=mlp");
    let base = base.set("model.hidden=[90, 9] optimizer.name=adamw learning_rate.peak=1e-3");
    // The first weight has 3 * 32 * 32 * 90 numbers: 1.05 MiB, divisible by 2 and not by 7.
    for ranks in [2, 7] {
        the_same(&base, ranks, 2);
        the_same(&pruned(&base).set("prune.sparsity=0.04"), ranks, 2);
        let messages = |zero: usize| {
            let base = base.set(format!("train.steps=2 parallel.zero={zero}"));
            let bytes = base.replicas(ranks).run().memory["communication"];
            (bytes.predicted.unwrap(), bytes.measured.unwrap() as u64)
        };
        let (predicted, measured) = messages(1);
        assert_eq!(predicted, measured, "{ranks}");
        let (most, measured) = messages(2);
        assert!(measured <= most && most - measured <= 16384, "{ranks}: {measured} of at most {most}");
    }
}

/// Several buckets a micro-batch, two of them on their way at once: never more than the plan says, and not
/// much less.
#[test]
fn messages_of_shared_gradients_keep_below_what_is_predicted() {
    for (tied, micro_batches) in [(true, 4), (false, 4), (true, 1), (false, 1)] {
        let base = tiny_gpt("train.batch=8 train.steps=2 model.width=128 model.layers=3");
        let base = base.set(format!("model.tied={tied} train.micro_batches={micro_batches}"));
        let memory = base.set("parallel.zero=2").replicas(2).run().memory;
        let bytes = memory["communication"];
        let (most, measured) = (bytes.predicted.unwrap(), bytes.measured.unwrap() as u64);
        let what = format!("tied {tied}, {micro_batches} micro-batches");
        assert!(
            measured <= most && measured as f64 > 0.8 * most as f64,
            "{what}: {measured} of at most {most}"
        );
        let gradients = memory["gradients"];
        assert_eq!(gradients.predicted, gradients.measured.map(|bytes| bytes as u64), "{what}");
    }
}

/// Sums over ranks come before sums over micro-batches, so rounding is another; what is learnt is what one
/// rank learns.
#[test]
fn shared_gradients_of_several_micro_batches_are_those_of_one_rank() {
    let gpt = tiny_gpt("train.batch=12 train.clip=0.5 train.micro_batches=2 train.eval_samples=11");
    let gpt = gpt
        .set("model.layers=4 optimizer.name=sgd learning_rate.peak=0.1")
        .set("learning_rate.decay_steps=100");
    for (what, base) in [
        ("tied", gpt.clone()),
        ("own head", gpt.set("model.tied=false")),
        ("pruned", pruned(&gpt)),
        ("noise", gpt.set("train.noise_scale=true")),
    ] {
        let layouts = [
            "parallel.data=3",
            "parallel.data=2 parallel.pipeline=2",
            "parallel.data=2 parallel.pipeline=2 parallel.schedule=zb-h1",
            "parallel.data=2 parallel.pipeline=2 parallel.schedule=interleaved",
        ];
        // The noise scale is measured on full models.
        let layouts = layouts.into_iter().filter(|layout| what != "noise" || !layout.contains("pipeline"));
        all_same(&base, layouts.map(|layout| format!("{layout} parallel.zero=2")), 5, 1e-5);
    }
}

/// Whenever masks change, state moves to whoever has its weight then.
#[test]
fn pruning_on_the_way_shards_anew() {
    let gpt = tiny_gpt("train.batch=12 prune.sparsity=0.8");
    let bf16 = gpt.set("train.precision=bf16 optimizer.master=low-bits");
    let gradual = |base: &Base| base.set("prune.method=gradual prune.start=2 prune.end=6 prune.every=2");
    let cnn = tiny_cnn("train.batch=12 prune.method=early-bird prune.form=channels prune.l1=1e-4")
        .set("prune.sparsity=0.5");
    for base in [
        gpt.set("prune.method=magnitude prune.at=3"),
        gradual(&gpt),
        gradual(&bf16),
        gpt.set("prune.method=elsa prune.every=2 prune.penalty=0.3"),
        bf16.set("prune.method=elsa prune.every=2 optimizer.moments=bf16"),
        gpt.set("prune.method=rigl prune.every=2"),
        bf16.set("prune.method=set prune.every=3"),
        gpt.set("prune.method=lottery prune.rate=0.6"),
        cnn,
    ] {
        the_same(&base, 3, 8);
    }
}

#[test]
fn the_noise_scale_and_local_statistics_are_the_same() {
    let base = tiny_cnn("train.batch=24 train.noise_scale=true");
    the_same(&base, 4, 6);
}

#[test]
fn bytes_are_those_predicted_and_state_is_a_shard() {
    let layouts = if espalier_testing::long() { 4 } else { 1 };
    for (i, optimizer) in ["sgd", "momentum", "adamw", "lamb"].into_iter().enumerate() {
        for (j, precision) in ["f32", "bf16"].into_iter().enumerate() {
            // In the short form one of them: each optimizer dense and pruned, each precision with all.
            let all = [(2, None), (4, Some(0.75)), (3, None), (3, Some(0.75))];
            for (ranks, sparsity) in all.into_iter().cycle().skip(i + j).take(layouts) {
                let mut base = tiny_gpt("train.batch=12 train.steps=2 model.tied=false")
                    .set(format!("optimizer.name={optimizer} train.precision={precision}"));
                if let Some(sparsity) = sparsity {
                    base = base
                        .set(format!("prune.method=magnitude prune.scope=layer prune.sparsity={sparsity}"));
                }
                let what = format!("{optimizer} {precision} {ranks} {sparsity:?}");
                let [replicated, shared, scattered] = [0, 1, 2].map(|zero| shared(&base, ranks, zero).run());
                assert_predicted(&shared, &["weights", "optimizer", "communication", "mask"], &what);
                let peak = |of: &RunSummary, category: &str| of.memory[category].measured.unwrap() as f64;
                let is_shard = |of: &RunSummary, full: &RunSummary, category: &str| {
                    peak(of, category) <= peak(full, category) / ranks as f64 + 2000.0
                };
                assert!(is_shard(&shared, &replicated, "optimizer"), "{what}");
                let (all, local) = (replicated.state_bytes.optimizer, shared.state_bytes.optimizer);
                assert!(
                    (local * ranks as f64 - all).abs() <= 0.02 * all,
                    "{what}: {local} of {all} bytes a weight"
                );
                assert_eq!(replicated.state_bytes.gradients, shared.state_bytes.gradients, "{what}");
                assert!(replicated.weights_hash == shared.weights_hash, "{what}");
                let all = ["weights", "gradients", "optimizer", "communication", "mask"];
                assert_predicted(&scattered, &all, &what);
                assert_eq!(scattered.memory["optimizer"], shared.memory["optimizer"], "{what}");
                assert!(is_shard(&scattered, &shared, "gradients"), "{what}");
                assert!(replicated.weights_hash == scattered.weights_hash, "{what}");
            }
        }
    }
}

/// With and without shared state, on one number of ranks and another: what was saved is what is loaded.
#[test]
fn checkpoints_of_shards_load_on_any_number_of_ranks() {
    let gpt = tiny_gpt("train.batch=12 prune.method=gradual prune.sparsity=0.8 prune.every=2");
    let gpt = gpt.set("prune.start=2 prune.end=6");
    for base in [
        gpt.set("optimizer.name=lamb"),
        gpt.set("train.precision=bf16 optimizer.master=low-bits"),
        tiny_cnn("train.batch=12 train.precision=bf16"),
    ] {
        let mut last = saved(&base, 4);
        let before = files(last.path());
        // Nothing is left to do: each loads what the one before saved, and saves it again.
        for (ranks, zero) in [(3, 1), (2, 2), (4, 0), (6, 1), (3, 3), (4, 3)] {
            let copy = tempfile::tempdir().unwrap();
            save_again(&shared(&base, ranks, zero), last.path(), copy.path());
            let count = fs::read_dir(copy.path().join("step-000004")).unwrap().count();
            assert!(count > ranks, "{count} files of {ranks} ranks");
            last = copy;
        }
        assert!(before == files(passed_on(last.path(), [base.clone()]).path()), "{base}");
        // Two halves are the uninterrupted run, whoever takes them. In the short form each form of state writes
        // once and reads once: what is written does not depend on the form, as was just seen.
        let expected = hash(shared(&base, 3, 0).steps(7).run());
        let halves = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 1), (1, 0), (2, 0), (1, 3), (3, 3)];
        for &(first, second) in &halves[..if espalier_testing::long() { halves.len() } else { 4 }] {
            let folder = tempfile::tempdir().unwrap();
            shared(&base, 3, first).steps(4).run_in(folder.path());
            assert_eq!(
                hash(shared(&base, 3, second).steps(7).run_in(folder.path())),
                expected,
                "{first} {second}"
            );
        }
    }
}

//! Moments in bf16: half the bytes, rounded by bits that depend on where a weight stands and not on who steps it.

use std::collections::BTreeMap;

use espalier_tensor::DType;
use espalier_train::prune::is_kept;
use espalier_train::run::RunDir;
use espalier_train::trainer::Trainer;

use crate::support::{
    Base, assert_goes_on, assert_predicted, assert_says, files, losses, on_every_rank, passed_on, planned,
    resumed, saved, take, tiny_cnn, tiny_gpt, tiny_llama,
};

/// Those that have moments.
const OPTIMIZERS: [(&str, f64); 6] =
    [("momentum", 0.1), ("nesterov", 0.1), ("adam", 0.01), ("adamw", 0.01), ("lars", 20.0), ("lamb", 0.01)];

fn narrow(base: &Base) -> Base {
    base.set("optimizer.moments=bf16")
}

fn pruned(base: &Base) -> Base {
    base.set("prune.method=magnitude prune.sparsity=0.8 prune.embeddings=true")
}

/// What a rank has of every moment: where its numbers stand in the full tensor, and what they are.
type Moments = BTreeMap<String, BTreeMap<usize, f32>>;

fn moments(trainer: &Trainer) -> Moments {
    let mut found = Moments::new();
    for (_, param) in trainer.params().iter() {
        let mut positions: Vec<usize> =
            param.plan.shard.runs().flat_map(|run| run.in_full..run.in_full + run.length).collect();
        if let Some(mask) = param.compressing_mask() {
            let words = mask.words();
            let mut local = 0..;
            positions.retain(|_| local.next().is_some_and(|i: usize| is_kept(&words, i)));
        }
        let local = param.plan.zero.split(positions.len());
        for (i, moment) in param.state().skip(usize::from(trainer.params().dtype() != DType::F32)).enumerate()
        {
            assert_eq!(moment.dtype(), DType::Bf16);
            let values = positions[local.clone()].iter().copied().zip(moment.to_f32());
            found.entry(format!("moment{i}/{}", param.plan.name)).or_default().extend(values);
        }
    }
    found
}

/// The moments of all ranks of a layout after some steps, and the losses.
fn on(base: &Base, steps: usize) -> (Moments, Vec<f64>) {
    let ranks = on_every_rank(&base.steps(steps), |mut trainer| {
        let losses = losses(&mut trainer, steps)?;
        Ok((moments(&trainer), losses))
    });
    let losses = ranks[0].1.clone();
    let mut all = Moments::new();
    for (name, values) in ranks.into_iter().flat_map(|(moments, _)| moments) {
        for (position, value) in values {
            let before = all.entry(name.clone()).or_default().insert(position, value);
            assert!(
                before.is_none_or(|before| before == value),
                "{name} at {position} is not the same on all ranks"
            );
        }
    }
    (all, losses)
}

/// Compressed state is masked-dense state, and low bits are f32 masters, for every optimizer.
#[test]
fn compressed_moments_are_those_of_masked_dense_ones_bit_for_bit() {
    for (optimizer, rate) in OPTIMIZERS {
        for precision in ["f32", "bf16"] {
            let base = pruned(&tiny_gpt("train.clip=0.5 train.micro_batches=2"))
                .set(format!("optimizer.name={optimizer} learning_rate.peak={rate}"))
                .set(format!("train.precision={precision}"));
            let base = narrow(&base);
            let run = |base: &Base| {
                let mut trainer = base.steps(8).trainer(2);
                (losses(&mut trainer, 8).unwrap(), trainer.params().hash().unwrap())
            };
            let dense = run(&base.set("prune.state=dense"));
            assert!(dense == run(&base.set("prune.state=compressed")), "{optimizer} {precision}");
            let kept = base.set("prune.weights=compressed");
            assert!(dense == run(&kept), "{optimizer} {precision}: compressed weights");
            if precision == "bf16" {
                assert!(dense == run(&base.set("optimizer.master=low-bits")), "{optimizer}: the low bits");
                assert!(dense == run(&kept.set("optimizer.master=low-bits")), "{optimizer}: both");
            }
        }
    }
}

/// Replicas, state and gradients that they shard, and stages: layouts that make a gradient in the same
/// bits leave the same moments.
#[test]
fn layouts_round_alike() {
    let gpt = tiny_gpt("train.batch=8 model.layers=3 model.tied=false");
    let late = gpt.set("prune.method=gradual prune.sparsity=0.8 prune.end=4 prune.every=2");
    for (what, base) in [
        ("dense", narrow(&gpt)),
        ("pruned", narrow(&pruned(&gpt)).set("train.precision=bf16 optimizer.master=low-bits")),
        ("pruned on the way", narrow(&late).set("train.precision=bf16")),
        ("lamb", narrow(&pruned(&gpt)).set("optimizer.name=lamb")),
    ] {
        let replicas = on(&base.replicas(2), 5);
        for zero in [1, 2] {
            let shared = base.replicas(2).set(format!("parallel.zero={zero}"));
            let kept = (what != "dense").then(|| on(&shared.set("prune.weights=compressed"), 5));
            for shared in [Some(on(&shared, 5)), kept].into_iter().flatten() {
                assert_eq!(replicas.1, shared.1, "{what}, zero {zero}");
                assert!(replicas.0 == shared.0, "{what}, zero {zero}");
            }
        }
        let base = base.set("train.micro_batches=4");
        let (one, stages) = (on(&base, 5), on(&base.set("parallel.pipeline=2 parallel.schedule=1f1b"), 5));
        assert_eq!(one.1, stages.1, "{what}, stages");
        assert!(one.0 == stages.0, "{what}, stages");
    }
}

/// Sums of other layouts are in another order, so that some numbers are rounded the other way: hardly any
/// where the bits are the same, one of three where they are not.
#[test]
fn shards_of_a_tensor_are_rounded_by_the_bits_of_the_full_one() {
    let gpt = tiny_gpt("train.batch=8 model.tied=false");
    for (what, base) in [
        ("gpt", gpt.clone()),
        ("gpt, sequence", gpt.set("parallel.sequence=true")),
        ("gpt, pruned", pruned(&gpt)),
        ("grouped queries", tiny_llama("train.batch=8")),
        ("convolutions", tiny_cnn("")),
    ] {
        let base = narrow(&base);
        let one = on(&base.set("parallel.sequence=false"), 1);
        let shards = on(&base.set("parallel.tensor=2"), 1);
        let other = on(&base.set("parallel.sequence=false seed=5"), 1);
        assert!((one.1[0] - shards.1[0]).abs() < 1e-5 && one.1[0] != other.1[0], "{what}");
        assert_eq!(one.0.len(), shards.0.len(), "{what}");
        let (mut numbers, mut apart) = (0, 0);
        for (name, values) in &one.0 {
            assert!(values.keys().eq(shards.0[name].keys()), "{what}: {name}");
            numbers += values.len();
            apart += values.iter().filter(|(position, value)| shards.0[name][*position] != **value).count();
        }
        assert!(apart * 50 < numbers, "{what}: {apart} of {numbers} numbers differ");
    }
}

/// What local SGD averages is rounded once, alike on all ranks.
#[test]
fn ranks_that_step_by_themselves_come_together() {
    let base = narrow(&tiny_gpt("train.batch=8 parallel.average_every=2"));
    for base in [base.clone(), pruned(&base).set("train.precision=bf16")] {
        let ranks = on_every_rank(&base.replicas(2).steps(4), |mut trainer| {
            take(&mut trainer, 4)?;
            trainer.average()?;
            Ok((moments(&trainer), trainer.params().hash()?))
        });
        assert!(ranks[0] == ranks[1]);
        let ran = base.replicas(2).steps(4).run();
        assert_predicted(&ran, &["optimizer", "communication"], "averaged");
    }
}

/// A fair share of it on ranks that share it out.
#[test]
fn every_byte_is_predicted() {
    for (more, each) in [
        ("train.precision=f32", 4),
        ("train.precision=bf16", 8),
        ("train.precision=bf16 optimizer.master=low-bits", 6),
    ] {
        let base = narrow(&tiny_gpt("model.tied=false train.batch=8")).set(more);
        assert_eq!(planned(&base).storage.optimizer_bytes, each);
        for zero in [1, 2] {
            let shared = base.replicas(2).set(format!("parallel.zero={zero}")).steps(2).run();
            assert_predicted(&shared, &["optimizer"], format!("zero {zero}"));
        }
    }
}

/// Also where masks move and weights come back.
#[test]
fn two_halves_equal_the_uninterrupted_run() {
    let rigl = "prune.method=rigl prune.sparsity=0.8 prune.every=3 train.micro_batches=2";
    for base in
        [tiny_gpt(""), pruned(&tiny_gpt("train.precision=bf16 optimizer.master=low-bits")), tiny_gpt(rigl)]
    {
        assert_goes_on(&narrow(&base), [4, 8]);
    }
}

/// Moments are saved as what they are, and go through every layout.
#[test]
fn a_checkpoint_of_them_goes_through_layouts_unchanged() {
    let base = narrow(&pruned(&tiny_gpt("train.batch=8 train.micro_batches=2")));
    let folder = saved(&base, 3);
    let before = files(folder.path());
    for layout in [
        "parallel.data=2 parallel.zero=2",
        "parallel.pipeline=2 parallel.schedule=gpipe",
        "parallel.tensor=2 parallel.data=2",
    ] {
        let after = files(passed_on(folder.path(), [base.set(layout), base.clone()]).path());
        assert!(before == after, "{layout}");
    }
}

/// It is another run, and reported so; where it is allowed, moments are widened, or rounded once.
#[test]
fn another_type_of_moments_must_be_allowed() {
    for (first, then) in [("f32", "bf16"), ("bf16", "f32")] {
        let base =
            |moments: &str| tiny_gpt(format!("checkpoint.every=4 optimizer.moments={moments}")).steps(8);
        let folder = tempfile::tempdir().unwrap();
        base(first).steps(4).run_in(folder.path());
        assert_says(base(then).fails(&resumed(folder.path())), &["optimizer.moments", "--allow"]);
        let run_dir = RunDir { allow: vec!["optimizer.moments".into()], ..resumed(folder.path()) };
        let ended = base(then).run_at(&run_dir, &mut ()).unwrap().summary;
        assert_eq!(ended.steps, 8);
    }
}

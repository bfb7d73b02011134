//! Batch norm over groups of samples, and running statistics that several ranks have measured.

use std::collections::BTreeMap;

use espalier_tensor::Category;
use espalier_testing::{apart, farthest, largest};
use espalier_train::Result;
use espalier_train::trainer::Trainer;

use crate::support::{Base, assert_peaks, losses, on_every_rank, tiny_cnn};

/// Losses, and weights and running statistics by name.
type Shown = (Vec<f64>, BTreeMap<String, Vec<f32>>);

fn shown(mut trainer: Trainer, steps: usize) -> Result<Shown> {
    let losses = losses(&mut trainer, steps)?;
    let tensors = trainer.params().named().map(|(name, tensor)| (name.to_owned(), tensor.to_f32()));
    Ok((losses, tensors.collect()))
}

/// What all ranks of a run file hold together after some steps.
fn run(base: &Base, steps: usize) -> Shown {
    let mut all = on_every_rank(&base.steps(steps), |trainer| shown(trainer, steps)).into_iter();
    let mut first = all.next().unwrap();
    all.for_each(|other| first.1.extend(other.1));
    first
}

fn assert_same(a: &Shown, b: &Shown, what: &str) {
    assert!(a.1.keys().eq(b.1.keys()), "{what}: every tensor is somewhere");
    assert!(a.1.keys().any(|name| name.ends_with("running_var")), "there are statistics");
    assert!(apart(&a.0, &b.0) < 1e-6, "{what}: losses {:?} and {:?}", a.0, b.0);
    for (name, a) in &a.1 {
        let (_, off) = farthest(a, &b.1[name]);
        assert!(off <= 2e-6 * largest(a), "{what}: {name} is off by {off}");
    }
}

fn cnn(settings: &str) -> Base {
    let base = tiny_cnn("train.batch=24 optimizer.name=sgd");
    base.set(settings)
}

/// A group is a batch of its own: six micro-batches of four, or one batch in six groups of four, are the same
/// run, on every layout that keeps the groups whole, running statistics included.
#[test]
fn ghost_batch_norm_is_the_same_on_every_layout_that_keeps_groups_whole() {
    let small = run(&cnn("train.micro_batches=6"), 3);
    let large = run(&cnn(""), 3);
    assert_ne!(small.1, large.1, "the batch matters");
    for layout in [
        "",
        "train.micro_batches=2",
        "train.recompute=block",
        "parallel.data=2",
        "parallel.data=3 train.micro_batches=2",
        "parallel.pipeline=2 train.micro_batches=3",
        "parallel.pipeline=2 parallel.schedule=chimera train.micro_batches=2",
        "parallel.pipeline=2 parallel.schedule=chimera train.micro_batches=2 parallel.data=3",
        "parallel.data=2 parallel.zero=true",
    ] {
        let ghost = run(&cnn(layout).set("train.batch_norm_group=4"), 3);
        assert_same(&small, &ghost, layout);
    }
}

/// What a group keeps for the backward pass is predicted to the byte.
#[test]
fn statistics_of_groups_are_counted() {
    for settings in ["", "train.batch_norm_group=4", "train.batch_norm_group=4 train.micro_batches=2"] {
        assert_peaks(&cnn(settings).set("train.steps=2"), 2, [Category::Activations]);
    }
}

/// The two copies of a stage see half of the micro-batches each; their running statistics are those of one
/// rank that sees all, one after the other. With replicas, the mean of theirs, as on any schedule.
#[test]
fn running_statistics_of_chimera_are_those_of_one_rank() {
    let chimera = "parallel.pipeline=2 parallel.schedule=chimera train.micro_batches=4";
    assert_same(&run(&cnn("train.micro_batches=4"), 3), &run(&cnn(chimera), 3), "alone");
    let replicas = |more: &str| run(&cnn("parallel.data=3 train.micro_batches=4").set(more), 3);
    let plain = run(&cnn("parallel.data=3 train.micro_batches=4"), 3);
    let both = run(&cnn(chimera).set("parallel.data=3"), 3);
    assert_same(&plain, &both, "three replicas");
    let together = "parallel.batch_norm=synchronised";
    let both = run(&cnn(chimera).set("parallel.data=3").set(together), 3);
    assert_same(&replicas(together), &both, "synchronised");
}

//! Training that multiplies without zeros learns what training with them learns.

use espalier_nn::weights::{ParameterId, WeightStore};
use espalier_tensor::{Category, Mask};
use espalier_testing::apart;
use espalier_train::trainer::Trainer;

use crate::support::{Base, losses, on_every_rank, prepare, tiny_cnn, tiny_gpt};

fn gpt(method: &str) -> Base {
    let base = tiny_gpt("train.micro_batches=2 prune.sparsity=0.9 optimizer.name=sgd");
    base.set(format!("learning_rate.peak=0.1 prune.method={method}"))
}

/// Losses, what is kept, and how many parameters are multiplied without their zeros at the end.
fn train(base: &Base, steps: usize) -> (Vec<f64>, String, usize) {
    let mut all = on_every_rank(&base.steps(steps), |mut trainer| {
        let losses = losses(&mut trainer, steps)?;
        let weights = trainer.params();
        let sparse = weights.ids().filter(|id| WeightStore::sparse(weights, *id).is_some()).count();
        Ok((losses, trainer.params().mask_hash()?, sparse))
    });
    all.swap_remove(0)
}

#[test]
fn every_method_learns_the_same() {
    let more = |method: &str| match method {
        "gradual" => "prune.start=1 prune.end=6 prune.every=2",
        "rigl" | "set" => "prune.every=2",
        "early-bird" => "prune.every=1 prune.latest=3",
        "lottery" => "prune.sparsity=0.7 prune.rate=0.4",
        _ => "",
    };
    for method in ["magnitude", "snip", "grasp", "gradual", "rigl", "set", "early-bird", "lottery"] {
        let base = gpt(method).set(more(method));
        let (losses, kept, none) = train(&base, 10);
        let (sparse_losses, sparse_kept, some) = train(&base.set("prune.kernels=sparse"), 10);
        // Four linear layers in each of two blocks; the head is tied. Where less goes in all, some keep too much.
        let enough = if method == "lottery" { 2 } else { 8 };
        assert!(none == 0 && some >= enough, "{method}: {some}");
        assert!(apart(&losses, &sparse_losses) < 1e-5, "{method}: {losses:?} and {sparse_losses:?}");
        assert_eq!(kept, sparse_kept, "{method}");
    }
}

/// Two stages of two replicas, input and weight gradients apart.
#[test]
fn ranks_learn_the_same_without_zeros() {
    let base = gpt("magnitude").set("prune.kernels=sparse");
    let single = train(&base.set("train.micro_batches=4"), 5);
    for schedule in ["1f1b", "zb-h1"] {
        let layout = base.set("parallel.data=2 parallel.pipeline=2");
        let (losses, _, sparse) = train(&layout.set(format!("parallel.schedule={schedule}")), 5);
        assert_eq!(sparse, 4, "of one stage");
        assert!(apart(&single.0, &losses) < 1e-5, "{schedule}: {:?} and {losses:?}", single.0);
    }
}

#[test]
fn little_pruned_weights_and_convolutions_are_multiplied_as_they_are() {
    assert_eq!(train(&gpt("magnitude").set("prune.kernels=sparse prune.sparsity=0.3"), 1).2, 0);
    let cnn = tiny_cnn("prune.method=magnitude prune.kernels=sparse");
    let (losses, ..) = train(&cnn, 5);
    assert_eq!(losses, train(&cnn.set("prune.kernels=dense"), 5).0, "its only linear layer is the head");
}

#[test]
fn the_pattern_is_predicted_tracked_and_shown() {
    let base = gpt("magnitude").set("prune.scope=layer prune.kernels=sparse train.steps=2");
    let (plan, dataset, device) = prepare(&base, 2);
    let predicted = plan.memory.mask;
    let mut trainer = Trainer::new(plan, dataset, &device).unwrap();
    trainer.step().unwrap();
    let in_use = device.ledger().current(Category::Mask);
    assert_eq!(in_use as u64, predicted);
    let candidates: Vec<ParameterId> = trainer.params().masks().map(|(id, _)| id).collect();
    let elements: usize = candidates.iter().map(|id| trainer.params().param(*id).len()).sum();
    assert_eq!(trainer.state_bytes().unwrap().mask, in_use as f64 / elements as f64);
    let bare: usize = trainer.params().masks().map(|(_, mask)| Mask::bytes(mask)).sum();
    assert!(bare < in_use);
}

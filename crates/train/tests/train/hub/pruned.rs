//! Pruning while it trains, step by step against PyTorch (`../oracle/pruned.py`): dense weights under masks
//! there, in f64; here state of kept weights alone, or dense. What a mask that shrinks or moves does to
//! weights, masters and moments is in every loss behind it.

use std::path::Path;

use espalier_tensor::mask::ones;

use super::{Fixture, floats, folder_with, gpt2, started, tensors, tokens};
use crate::support::RecordingObserver;

fn fixture() -> Fixture {
    Fixture::read(include_bytes!("../../oracle/hub/pruned.safetensors"))
}

const RECIPE: &str = "
    train.steps=20 train.clip=1 train.log_every=1 data.validation=0 optimizer.eps=1e-8 optimizer.beta2=0.95
    learning_rate.schedule=cosine learning_rate.warmup=4 prune.sparsity=0.75 prune.every=3";

/// Trains as PyTorch did, and compares every loss and the last weights.
fn same_as_torch(case: &str, from: &Path, more: &str) {
    let expected = fixture();
    for form in ["prune.state=dense", "prune.state=compressed", "prune.weights=compressed"] {
        let folder = tempfile::tempdir().unwrap();
        let mut observer = RecordingObserver::default();
        let out = folder.path().join("run");
        started(from, &tokens(&expected, "tokens"), &out, &format!("{RECIPE} {more} {form}"), &mut observer)
            .unwrap();
        let losses = &expected.f32[&format!("{case}/losses")];
        for (step, (ours, theirs)) in observer.losses.iter().zip(losses).enumerate() {
            let off = (ours - f64::from(*theirs)).abs();
            assert!(off < 2e-5, "{case}, {form}, step {}: {ours} instead of {theirs}", step + 1);
        }
        assert_eq!(observer.losses.len(), losses.len());
        let weights = tensors(&out.join("checkpoints/step-000020/model.safetensors"));
        for (name, (_, _, bytes)) in weights {
            let theirs = &expected.f32[&format!("{case}/after/{name}")];
            // A softmax does not see the biases of keys: what they are is rounding.
            let is_seen = |(i, _): &(usize, _)| !(name.ends_with("c_attn.bias") && (16..32).contains(i));
            for (i, (ours, theirs)) in floats(&bytes).iter().zip(theirs).enumerate().filter(is_seen) {
                assert!((ours - theirs).abs() < 1e-4, "{case}, {form}, {name}[{i}]: {ours}, not {theirs}");
                assert_eq!(*ours == 0.0, *theirs == 0.0, "{case}, {form}, {name}[{i}]: {ours}, {theirs}");
            }
        }
    }
}

#[test]
fn gradual_pruning_is_that_of_dense_weights_under_masks() {
    same_as_torch("gradual", &gpt2(), "prune.method=gradual prune.start=5");
}

#[test]
fn the_rate_grows_as_density_falls() {
    same_as_torch("density", &gpt2(), "prune.method=gradual prune.start=5 learning_rate.by_density=0.3");
}

/// The fixture's first masks are zeros of what the run starts from.
#[test]
fn rigl_moves_weights_and_moments() {
    let folder = tempfile::tempdir().unwrap();
    let (masks, at) = (fixture().words, folder.path().join("sparse"));
    let sparse = folder_with(at, |all| {
        for (name, (_, _, bytes)) in all {
            let name = name.trim_start_matches("transformer.");
            let Some(bits) = masks.get(&format!("rigl/first/{name}")) else { continue };
            let mut kept = vec![0; bytes.len()];
            ones(bits).for_each(|i| kept[4 * i..4 * i + 4].copy_from_slice(&bytes[4 * i..4 * i + 4]));
            *bytes = kept;
        }
    });
    same_as_torch("rigl", &sparse, "prune.method=rigl prune.distribution=uniform train.keep_zeros=true");
}

#[test]
fn elsa_pulls_as_admm_does() {
    same_as_torch("elsa", &gpt2(), "prune.method=elsa prune.start=5 prune.penalty=0.05");
}

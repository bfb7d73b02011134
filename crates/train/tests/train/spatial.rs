//! Spatial parallelism: ranks that have a tile of every image each train as one rank does, alone and with the
//! other axes.

use crate::support::{Base, images, refused, tiny_cnn};
use crate::tensor::{on, same_as};

/// A net without batch norms and with smooth activations, over images that not every grid divides evenly.
fn smooth(size: usize) -> Base {
    let base = tiny_cnn(&["train.batch=8", "train.eval_samples=11", "model.layers.0.stride=2"]);
    base.with([
        "learning_rate.peak=0.01",
        "model.layers.1.type=gelu",
        "model.layers.2.type=gelu",
        "model.layers.4.branch.1.type=gelu",
        &format!("data.size={size}"),
    ])
}

fn resnet8() -> Base {
    let base = images().with(["model.name=resnet8", "data.size=20", "data.count=120", "train.batch=8"]);
    base.with(["train.micro_batches=2", "train.eval_samples=9", "learning_rate.peak=0.001"])
}

#[test]
fn an_image_net_over_tiles_learns_what_it_learns_over_images() {
    let steps = if espalier_testing::long() { 50 } else { 10 };
    for base in [smooth(16), smooth(19)] {
        let single = on(&base, steps).remove(0);
        for grid in ["2", "3", "[2,2]", "[1,3]"] {
            same_as(&single, &base.set(format!("parallel.spatial={grid}")), steps, 1e-5, grid);
        }
    }
}

/// Residual blocks whose branches differ, and strides: over few steps, since a kink is not rounding.
#[test]
fn a_residual_net_over_tiles_with_every_other_axis() {
    let base = resnet8();
    let single = on(&base, 3).remove(0);
    for layout in [
        vec!["parallel.spatial=2"],
        vec!["parallel.spatial=[2,2]"],
        vec!["parallel.spatial=2", "parallel.tensor=2"],
        vec!["parallel.spatial=2", "parallel.pipeline=2"],
        vec!["parallel.spatial=2", "parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.tensor=2"],
    ] {
        same_as(&single, &base.with(&layout), 3, 1e-4, &format!("{layout:?}"));
    }
}

/// A batch norm measures over the pixels of all tiles, and over all replicas where it is synchronised.
#[test]
fn batch_norms_measure_full_images() {
    let base = smooth(16).set("model.layers.1.type=batch_norm");
    let single = on(&base, 6).remove(0);
    for layout in [
        vec!["parallel.spatial=2"],
        vec!["parallel.spatial=[2,2]"],
        vec!["parallel.spatial=3", "parallel.tensor=2"],
    ] {
        same_as(&single, &base.with(&layout), 6, 1e-5, &format!("{layout:?}"));
    }
    let base = base.with(["parallel.batch_norm=synchronised", "parallel.data=2"]);
    for layout in [
        vec!["parallel.spatial=2"],
        vec!["parallel.spatial=2", "parallel.zero=true"],
        vec!["parallel.spatial=2", "parallel.tensor=2"],
    ] {
        same_as(&single, &base.with(&layout), 6, 1e-5, &format!("{layout:?} with replicas"));
    }
}

#[test]
fn pruned_nets_over_tiles_learn_what_single_ranks_learn() {
    for (what, fields) in [
        ("magnitude", vec!["prune.method=magnitude", "prune.sparsity=0.8"]),
        ("snip", vec!["prune.method=snip", "prune.sparsity=0.6", "prune.samples=16"]),
        ("grasp", vec!["prune.method=grasp", "prune.sparsity=0.6", "prune.samples=20"]),
        ("rigl", vec!["prune.method=rigl", "prune.sparsity=0.6", "prune.every=3"]),
    ] {
        let base = smooth(16).with(fields);
        let single = on(&base, 8).remove(0);
        // A score that is a sum over ranks may round to the other side of the threshold.
        let tolerance = if what == "grasp" { 1e-3 } else { 1e-4 };
        same_as(&single, &base.set("parallel.spatial=2"), 8, tolerance, what);
    }
}

/// What is dropped of an image depends on the position in it, whichever other axis shards its layers too.
#[test]
fn dropout_on_tiles_drops_what_it_drops_on_images() {
    let base = smooth(16).with(["model.layers.2.type=dropout", "model.layers.2.rate=0.3"]);
    let single = on(&base, 2).remove(0);
    for layout in [
        vec!["parallel.spatial=2"],
        vec!["parallel.spatial=2", "parallel.tensor=2"],
        vec!["parallel.spatial=2", "parallel.integrated=auto"],
    ] {
        same_as(&single, &base.with(&layout), 2, 1e-5, &format!("{layout:?}"));
    }
}

#[test]
fn a_slab_thinner_than_its_halo_is_named() {
    let base = smooth(16).set("parallel.spatial=16");
    let error = refused(&base);
    assert!(error.contains("parallel.spatial") && error.contains("conv"), "{error}");
}

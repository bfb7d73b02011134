//! Spatial parallelism: ranks that have a tile of every image each train as one rank does, alone and with the
//! other axes.

use crate::support::{Base, assert_says, images, refused, tiny_cnn};
use crate::tensor::all_same;

/// A net without batch norms and with smooth activations, over images that not every grid divides evenly.
fn smooth(size: usize) -> Base {
    let base = tiny_cnn("train.batch=8 train.eval_samples=11 model.layers.0.stride=2");
    base.set("learning_rate.peak=0.01 model.layers.1.type=gelu model.layers.2.type=gelu")
        .set(format!("model.layers.4.branch.1.type=gelu data.size={size}"))
}

fn resnet8() -> Base {
    let base = images().set("model.name=resnet8 data.size=20 data.count=120 train.batch=8");
    base.set("train.micro_batches=2 train.eval_samples=9 learning_rate.peak=0.001")
}

#[test]
fn an_image_net_over_tiles_learns_what_it_learns_over_images() {
    let steps = if espalier_testing::long() { 50 } else { 10 };
    for size in [16, 19] {
        let grids = ["2", "3", "[2,2]", "[1,3]"].map(|grid| format!("parallel.spatial={grid}"));
        all_same(&smooth(size), grids, steps, 1e-5);
    }
}

/// Residual blocks whose branches differ, and strides: over few steps, since a kink is not rounding.
#[test]
fn a_residual_net_over_tiles_with_every_other_axis() {
    let layouts = [
        "parallel.spatial=2",
        "parallel.spatial=[2,2]",
        "parallel.spatial=2 parallel.tensor=2",
        "parallel.spatial=2 parallel.pipeline=2",
        "parallel.spatial=2 parallel.pipeline=2 parallel.schedule=zb-h1 parallel.tensor=2",
    ];
    all_same(&resnet8(), layouts, 3, 1e-4);
}

/// A batch norm measures over the pixels of all tiles, and over all replicas where it is synchronised.
#[test]
fn batch_norms_measure_full_images() {
    let replicas = "parallel.batch_norm=synchronised parallel.data=2 parallel.spatial=2";
    let layouts = [
        "parallel.spatial=2",
        "parallel.spatial=[2,2]",
        "parallel.spatial=3 parallel.tensor=2",
        replicas,
        &format!("{replicas} parallel.zero=true"),
        &format!("{replicas} parallel.tensor=2"),
    ];
    all_same(&smooth(16).set("model.layers.1.type=batch_norm"), layouts, 6, 1e-5);
}

#[test]
fn pruned_nets_over_tiles_learn_what_single_ranks_learn() {
    for fields in [
        "prune.method=magnitude prune.sparsity=0.8",
        "prune.method=snip prune.sparsity=0.6 prune.samples=16",
        "prune.method=grasp prune.sparsity=0.6 prune.samples=20",
        "prune.method=rigl prune.sparsity=0.6 prune.every=3",
    ] {
        // A score that is a sum over ranks may round to the other side of the threshold.
        let tolerance = if fields.contains("grasp") { 1e-3 } else { 1e-4 };
        all_same(&smooth(16).set(fields), ["parallel.spatial=2"], 8, tolerance);
    }
}

/// What is dropped of an image depends on the position in it, whichever other axis shards its layers too.
#[test]
fn dropout_on_tiles_drops_what_it_drops_on_images() {
    let base = smooth(16).set("model.layers.2.type=dropout model.layers.2.rate=0.3");
    let others = ["", " parallel.tensor=2", " parallel.integrated=auto"];
    all_same(&base, others.map(|other| format!("parallel.spatial=2{other}")), 2, 1e-5);
}

#[test]
fn a_slab_thinner_than_its_halo_is_named() {
    let base = smooth(16).set("parallel.spatial=16");
    let error = refused(&base);
    assert_says(&error, &["parallel.spatial", "conv"]);
}

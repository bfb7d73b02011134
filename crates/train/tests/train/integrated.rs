//! Integrated parallelism: one group of ranks by samples or by tiles for convolutions, by features for linear
//! layers, trains as one rank does, and sends and holds what the plan says.

use std::fmt::Display;

use espalier_plan::cost::Parallelism::{self, Data, Domain, Model};
use espalier_tensor::Category::{Activations, Gradients, Optimizer, Weights};

use crate::support::{
    Base, assert_peaks, dense_and_pruned, files, images, passed_on, planned, pruned, refused, saved, tiny_cnn,
};
use crate::tensor::{all_same, masks};
use crate::traffic::check;

/// As VGG and AlexNet are: convolutions and pools, then three linear layers with dropout between them;
/// smooth, since a kink is no rounding. Widths and samples that three ranks do not divide.
fn net(line: impl Display) -> Base {
    const LAYERS: &str = r#"model.layers=[
        { type = "conv", output = 8, kernel = 3, padding = 1 },
        { type = "gelu" },
        { type = "max_pool", kernel = 2 },
        { type = "conv", output = 10, kernel = 3, padding = 1 },
        { type = "gelu" },
        { type = "max_pool", kernel = 2 },
        { type = "flatten" },
        { type = "dropout", rate = 0.2 },
        { type = "linear", output = 50 },
        { type = "gelu" },
        { type = "dropout", rate = 0.3 },
        { type = "linear", output = 34 },
        { type = "gelu" },
        { type = "linear" }]"#;
    tiny_cnn(LAYERS)
        .set("train.batch=14 train.micro_batches=2 train.eval_samples=15 train.clip=0.5 learning_rate.peak=0.01")
        .set(line)
}

/// All linear layers.
const LINEAR: &str = "parallel.integrated=[\"layers.8\",\"layers.11\",\"layers.13\"]";

fn steps() -> usize {
    if espalier_testing::long() { 50 } else { 5 }
}

/// The mixtures that are compared: what the alpha-beta model chooses, all linear layers, one in the middle,
/// the first, a convolution.
const MIXTURES: [&str; 5] = [
    "auto",
    "[\"layers.8\",\"layers.11\",\"layers.13\"]",
    "[\"layers.11\"]",
    "[\"layers.8\"]",
    "[\"layers.3\",\"layers.13\"]",
];

/// All of them on some axes. A convolution on tiles is by domain.
fn mixtures_on(axes: &[&str]) -> Vec<String> {
    let on_axes = |mixture: &'static str| {
        let can_be = move |axis: &&&str| !(axis.starts_with("spatial") && mixture.contains("layers.3"));
        let layout = move |axis: &&str| format!("parallel.{axis} parallel.integrated={mixture}");
        axes.iter().filter(can_be).map(layout)
    };
    MIXTURES.into_iter().flat_map(on_axes).collect()
}

#[test]
fn mixtures_learn_what_one_rank_learns() {
    let layouts = mixtures_on(&["tensor=2", "tensor=3", "spatial=2", "spatial=[2,2]"]);
    for base in dense_and_pruned(&net("")) {
        all_same(&base, &layouts, steps(), 1e-5);
    }
}

/// Nothing is trained before the first layer that multiplies, so nobody wants the gradient of what it reads;
/// what stands before it still goes back through its own shapes.
#[test]
fn what_nothing_trained_stands_before_is_sharded_without_a_backward() {
    for layers in [
        "model={name=\"mlp\",hidden=[]}",
        "model.layers=[{type=\"max_pool\",kernel=2},{type=\"flatten\"},{type=\"linear\"}]",
    ] {
        let axes = ["tensor=2", "tensor=3", "spatial=2"];
        all_same(&net(layers), axes.map(|axis| format!("parallel.{axis} parallel.integrated=auto")), 3, 1e-5);
    }
}

/// With replicas, shared state, blocks that run again, other optimizers, batch norms over all that have samples.
#[test]
fn mixtures_go_with_the_other_settings() {
    let base = net("train.batch=24");
    let layouts = ["parallel.tensor=2", "parallel.spatial=2"].into_iter().flat_map(|axis| {
        [
            "parallel.data=2 train.micro_batches=1",
            "parallel.data=2 train.micro_batches=1 parallel.zero=true",
            "train.recompute=block",
        ]
        .map(|other| format!("{axis} {LINEAR} {other}"))
    });
    all_same(&base, layouts, 5, 1e-5);
    // A bias before a norm has no gradient but rounding.
    let norm = base.set("model.layers.0.bias=false model.layers.1.type=batch_norm");
    let replicas = "parallel.tensor=2 parallel.data=2 parallel.batch_norm=synchronised";
    for (base, layouts) in [
        (base.set("optimizer.name=lamb"), &["parallel.tensor=2"][..]),
        (base.set("optimizer.name=lars"), &["parallel.tensor=2"]),
        (norm.clone(), &["parallel.tensor=3", "parallel.spatial=2"]),
        (norm.set("train.micro_batches=1"), &[replicas]),
    ] {
        all_same(&base, layouts.iter().map(|layout| format!("{layout} {LINEAR}")), 5, 1e-5);
    }
}

/// Scores of gradients, over samples that do not divide: more ranks than there are in the last micro-batch.
#[test]
fn pruning_by_gradients_sees_the_gradients_of_one_rank() {
    for (fields, norm) in [
        ("prune.method=snip prune.samples=15", "gelu"),
        ("prune.method=snip prune.samples=15", "batch_norm"),
        // GraSP's differences of gradients behind a norm that ranks measure together round to another mask,
        // on tiles too.
        ("prune.method=grasp prune.samples=20", "gelu"),
        ("prune.method=rigl prune.every=3", "gelu"),
        ("prune.method=rigl prune.every=3", "batch_norm"),
    ] {
        let base = net("model.layers.0.bias=false prune.sparsity=0.6").set(fields);
        let base = base.set(format!("model.layers.1.type={norm}"));
        all_same(&base, ["parallel.tensor=3 parallel.integrated=auto"], 6, 1e-3);
    }
    let base = pruned(&net("train.precision=bf16"));
    let full = masks(&base, 1);
    for axis in ["parallel.tensor=3", "parallel.spatial=2"] {
        let many = base.set(axis).set("parallel.integrated=[\"layers.8\",\"layers.11\"]");
        assert_eq!(masks(&many, 1), full, "{axis}");
    }
}

fn choices(base: &Base) -> Vec<(String, Parallelism)> {
    let plan = planned(base);
    let mixture = plan.layout.mixture().expect("it is integrated");
    mixture.layers.iter().map(|choice| (choice.name.clone(), choice.by)).collect()
}

/// The presets, in the form that small images have, and what is chosen for them at ImageNet's size.
#[test]
fn vgg_and_alexnet_by_samples_and_by_columns() {
    for name in ["alexnet", "vgg-11"] {
        let base = images().set(format!("model.name={name}"));
        let base = base.set("data.count=40 train.batch=2 train.eval_samples=3");
        let base = base.set("learning_rate.peak=0.0001 optimizer.name=sgd");
        let layout = "parallel.tensor=2 parallel.integrated=[\"classifier\"]";
        let many = base.set(layout);
        assert!(choices(&many).iter().all(|(name, by)| (*by == Model) == (name == "classifier")));
        all_same(&base, [layout], 1, 1e-4);
        let large = many.set("data.size=224 data.count=20 train.batch=16 parallel.integrated=auto");
        let spatial = large.set("parallel.tensor=1 parallel.spatial=2");
        for (base, convolutions) in [(large, Data), (spatial, Domain)] {
            for (layer, by) in choices(&base) {
                let expected = if layer.starts_with("classifier") { Model } else { convolutions };
                assert_eq!(by, expected, "{name}: {layer}");
            }
        }
    }
}

#[test]
fn mixtures_send_what_the_plan_says() {
    for layout in mixtures_on(&["tensor=2", "tensor=3"]) {
        for base in dense_and_pruned(&net(&layout)) {
            check(&base);
        }
    }
    let base = net("model.layers.1.type=batch_norm").set(LINEAR);
    for layout in [
        "parallel.spatial=2",
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.data=2 train.batch=24",
        "parallel.tensor=2 parallel.data=2 train.batch=24 parallel.batch_norm=synchronised",
        "parallel.tensor=2 train.recompute=block",
    ] {
        check(&base.set(layout));
    }
}

/// What activations move is what the formulas say, but for the loss, whose ranks gather four numbers of each
/// row instead of two all-reduces.
#[test]
fn a_route_costs_what_the_formulas_say() {
    // Sizes that two ranks divide.
    let base = net("train.batch=16 train.micro_batches=1 model.layers.3.output=8");
    for mixture in MIXTURES {
        let base = base.set(format!("parallel.tensor=2 parallel.integrated={mixture}"));
        let plan = planned(&base);
        let sent = plan.step_traffic(0).unwrap();
        let exchanged =
            sent.layers.all_reduces.bytes + sent.layers.all_gathers.bytes + sent.layers.all_to_alls.bytes;
        let words = (exchanged + sent.gradients.bytes) as f64 / 4.0;
        let mixture_of_plan = plan.layout.mixture().unwrap();
        // Two sums of a number for each of 16 predictions; four numbers to the other rank.
        let loss = match plan.layout.local_models()[0].classes {
            Some(_) => 4.0 * 16.0 - 2.0 * 16.0,
            None => 0.0,
        };
        assert_eq!(words - loss, mixture_of_plan.cost.words, "{mixture}: {mixture_of_plan:?}");
    }
}

#[test]
fn memory_of_every_rank_is_what_the_plan_predicts() {
    for layout in mixtures_on(&["tensor=2", "tensor=3", "spatial=2"]) {
        for recompute in ["none", "block"] {
            let base = net("train.steps=2").set(&layout).set(format!("train.recompute={recompute}"));
            let categories = [Weights, Gradients, Optimizer, Activations];
            assert_peaks(&base, 2, categories);
        }
    }
}

/// From one rank through mixtures and back, byte for byte.
#[test]
fn a_checkpoint_goes_through_mixtures_unchanged() {
    let base = pruned(&net("train.steps=9 optimizer.name=adamw"));
    let first = saved(&base, 3);
    let before = files(first.path());
    assert!(before.contains_key("optimizer.safetensors") && before.contains_key("masks.safetensors"));
    let layouts = [
        "parallel.tensor=2 parallel.integrated=auto",
        "parallel.spatial=2 parallel.integrated=[\"layers.8\"]",
        "parallel.tensor=3 parallel.integrated=[\"layers.11\",\"layers.13\"]",
        "",
    ];
    let last = passed_on(first.path(), layouts.map(|layout| base.set(layout)));
    assert!(files(last.path()) == before);
}

#[test]
fn what_cannot_be_mixed_is_one_sentence() {
    let auto = |fields: &str| net("parallel.integrated=auto").set(fields);
    let named = |name: &str| net(format!("parallel.tensor=2 parallel.integrated=[\"{name}\"]"));
    assert_eq!(
        refused(&named("classifier")),
        "`parallel.integrated` must be \"auto\", or names of convolutions and linear layers, or what such names begin with, got \
         \"classifier\""
    );
    assert_eq!(
        refused(&named("layers.0").set("parallel.tensor=16 train.batch=64")),
        "`parallel.integrated` cannot be: some layer cannot be split over 16 ranks"
    );
    for (fields, expected) in [
        ("parallel.tensor=1", "`parallel.integrated` has no effect with `parallel.tensor` = 1"),
        (
            "parallel.tensor=2 parallel.spatial=2",
            "`parallel.tensor` is 2, but `parallel.integrated` is for one group",
        ),
        (
            "parallel.tensor=8",
            "`parallel.tensor` is 8, but with `parallel.integrated` these ranks split the 7 samples",
        ),
        ("parallel.tensor=2 train.noise_scale=true", "`train.noise_scale` is true"),
        ("parallel.tensor=2 parallel.pipeline=2", "`parallel.pipeline` is 2, but `parallel.integrated`"),
        ("parallel.tensor=2 parallel.linear=plain", "`parallel.linear` is written"),
    ] {
        let error = refused(&auto(fields));
        assert!(error.starts_with(expected), "{error}");
    }
}

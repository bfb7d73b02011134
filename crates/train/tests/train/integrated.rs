//! Integrated parallelism: one group of ranks by samples or by tiles for convolutions, by features for linear
//! layers, trains as one rank does, and sends and holds what the plan says.

use espalier_plan::cost::Parallelism::{self, Data, Domain, Model};
use espalier_tensor::Category::{Activations, Gradients, Optimizer, Weights};

use crate::support::{Base, base, files, images, on_every_rank, passed_on, planned, refused, saved};
use crate::tensor::{masks, on, same_as};
use crate::traffic::check;

/// As VGG and AlexNet are: convolutions and pools, then three linear layers with dropout between them;
/// smooth, since a kink is no rounding. Widths and samples that three ranks do not divide.
fn net(overrides: &[&str]) -> Base {
    const TEXT: &str = r#"
        seed = 4
        [model]
        name = "custom"
        layers = [
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
            { type = "linear" },
        ]
        [data]
        kind = "shapes"
        count = 200
        size = 16
        [train]
        batch = 14
        micro_batches = 2
        eval_samples = 15
        clip = 0.5
        [optimizer]
        name = "momentum"
        [learning_rate]
        peak = 0.01
        schedule = "constant"
    "#;
    base(TEXT, overrides)
}

fn steps() -> usize {
    if espalier_testing::long() { 50 } else { 8 }
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

fn pruned(base: &Base) -> Base {
    base.with(["prune.method=magnitude", "prune.sparsity=0.9", "prune.state=compressed"])
}

#[test]
fn mixtures_learn_what_one_rank_learns() {
    for (how, base) in [("dense", net(&[])), ("pruned", pruned(&net(&[])))] {
        let single = on(&base, steps()).remove(0);
        for mixture in MIXTURES {
            for axis in ["tensor=2", "tensor=3", "spatial=2", "spatial=[2,2]"] {
                let fields = [format!("parallel.{axis}"), format!("parallel.integrated={mixture}")];
                // A convolution on tiles is by domain.
                if axis.starts_with("spatial") && mixture.contains("layers.3") {
                    continue;
                }
                let many = base.with([&fields[0], &fields[1]]);
                same_as(&single, &many, steps(), 1e-5, &format!("{how}: {fields:?}"));
            }
        }
    }
}

/// Nothing is trained before the first layer that multiplies, so nobody wants the gradient of what it reads;
/// what stands before it still goes back through its own shapes.
#[test]
fn what_nothing_trained_stands_before_is_sharded_without_a_backward() {
    for (what, net) in [
        ("one layer", net(&["model={name=\"mlp\",hidden=[]}"])),
        (
            "a pool",
            net(&["model.layers=[{type=\"max_pool\",kernel=2},{type=\"flatten\"},{type=\"linear\"}]"]),
        ),
    ] {
        let single = on(&net, 3).remove(0);
        for axis in ["parallel.tensor=2", "parallel.tensor=3", "parallel.spatial=2"] {
            same_as(
                &single,
                &net.with([axis, "parallel.integrated=auto"]),
                3,
                1e-5,
                &format!("{what}, {axis}"),
            );
        }
    }
}

/// With replicas, shared state, blocks that run again, other optimizers, batch norms over all that have samples.
#[test]
fn mixtures_go_with_the_other_settings() {
    let linear = "parallel.integrated=[\"layers.8\",\"layers.11\",\"layers.13\"]";
    let base = net(&["train.batch=24"]);
    let single = on(&base, 5).remove(0);
    for axis in ["parallel.tensor=2", "parallel.spatial=2"] {
        for other in [
            &["parallel.data=2", "train.micro_batches=1"][..],
            &["parallel.data=2", "train.micro_batches=1", "parallel.zero=true"],
            &["train.recompute=block"],
        ] {
            let many = base.with([axis, linear]).with(other);
            same_as(&single, &many, 5, 1e-5, &format!("{axis} with {other:?}"));
        }
    }
    for optimizer in ["lamb", "lars"] {
        let base = base.set(format!("optimizer.name={optimizer}"));
        let single = on(&base, 5).remove(0);
        same_as(&single, &base.with(["parallel.tensor=2", linear]), 5, 1e-5, optimizer);
    }
    // A bias before a norm has no gradient but rounding.
    let norm = base.with(["model.layers.0.bias=false", "model.layers.1.type=batch_norm"]);
    let single = on(&norm, 5).remove(0);
    for axis in ["parallel.tensor=3", "parallel.spatial=2"] {
        same_as(&single, &norm.with([axis, linear]), 5, 1e-5, &format!("batch norm on {axis}"));
    }
    let one_batch = norm.with(["train.micro_batches=1"]);
    let single = on(&one_batch, 5).remove(0);
    let both = ["parallel.tensor=2", "parallel.data=2", "parallel.batch_norm=synchronised", linear];
    same_as(&single, &one_batch.with(both), 5, 1e-5, "batch norm over replicas too");
}

/// Scores of gradients, over samples that do not divide: more ranks than there are in the last micro-batch.
#[test]
fn pruning_by_gradients_sees_the_gradients_of_one_rank() {
    for (what, fields) in [
        ("snip", vec!["prune.method=snip", "prune.sparsity=0.6", "prune.samples=15"]),
        ("grasp", vec!["prune.method=grasp", "prune.sparsity=0.6", "prune.samples=20"]),
        ("rigl", vec!["prune.method=rigl", "prune.sparsity=0.6", "prune.every=3"]),
    ] {
        // GraSP's differences of gradients behind a norm that ranks measure together round to another mask,
        // on tiles too.
        let norms: &[&str] = if what == "grasp" { &["gelu"] } else { &["gelu", "batch_norm"] };
        for norm in norms {
            let base = net(&["model.layers.0.bias=false"]).with(&fields);
            let base = base.set(format!("model.layers.1.type={norm}"));
            let single = on(&base, 6).remove(0);
            let many = base.with(["parallel.tensor=3", "parallel.integrated=auto"]);
            same_as(&single, &many, 6, 1e-3, &format!("{what}, {norm}"));
        }
    }
    let base = pruned(&net(&["train.precision=bf16"]));
    let full = masks(&base, 1);
    for axis in ["parallel.tensor=3", "parallel.spatial=2"] {
        let many = base.with([axis, "parallel.integrated=[\"layers.8\",\"layers.11\"]"]);
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
    for name in ["alexnet", "vgg-16"] {
        let base = images().set(format!("model.name={name}"));
        let base = base.with(["data.count=40", "train.batch=2", "train.eval_samples=3"]);
        let base = base.with(["learning_rate.peak=0.0001", "optimizer.name=sgd"]);
        let single = on(&base, 2).remove(0);
        let many = base.with(["parallel.tensor=2", "parallel.integrated=[\"classifier\"]"]);
        assert!(choices(&many).iter().all(|(name, by)| (*by == Model) == (name == "classifier")));
        same_as(&single, &many, 2, 1e-4, name);
        let large =
            many.with(["data.size=224", "data.count=20", "train.batch=16", "parallel.integrated=auto"]);
        let spatial = large.with(["parallel.tensor=1", "parallel.spatial=2"]);
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
    for mixture in MIXTURES {
        for ranks in [2, 3] {
            let tensor = net(&[]).set(format!("parallel.tensor={ranks}"));
            let many = tensor.set(format!("parallel.integrated={mixture}"));
            check(&format!("{mixture} on {ranks} ranks"), &many);
            check(&format!("{mixture} on {ranks} ranks, pruned"), &pruned(&many));
        }
    }
    let linear = "parallel.integrated=[\"layers.8\",\"layers.11\",\"layers.13\"]";
    let base = net(&["model.layers.1.type=batch_norm"]).set(linear);
    check("tiles", &base.set("parallel.spatial=2"));
    check("samples and batch norm", &base.set("parallel.tensor=2"));
    let replicas = ["parallel.tensor=2", "parallel.data=2", "train.batch=24"];
    check("replicas", &base.with(replicas));
    check("synchronised", &base.with(replicas).set("parallel.batch_norm=synchronised"));
    check("recomputed", &base.with(["parallel.tensor=2", "train.recompute=block"]));
}

/// What activations move is what the formulas say, but for the loss, whose ranks gather four numbers of each
/// row instead of two all-reduces.
#[test]
fn a_route_costs_what_the_formulas_say() {
    // Sizes that two ranks divide.
    let base = net(&["train.batch=16", "train.micro_batches=1", "model.layers.3.output=8"]);
    for mixture in MIXTURES {
        let base = base.with(["parallel.tensor=2", &format!("parallel.integrated={mixture}")]);
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
    for axis in ["parallel.tensor=2", "parallel.tensor=3", "parallel.spatial=2"] {
        for mixture in MIXTURES {
            if axis.starts_with("parallel.spatial") && mixture.contains("layers.3") {
                continue;
            }
            for recompute in ["none", "block"] {
                let fields =
                    [format!("parallel.integrated={mixture}"), format!("train.recompute={recompute}")];
                let base = net(&["train.steps=2"]).with([axis, &fields[0], &fields[1]]);
                let plan = planned(&base);
                let categories = [Weights, Gradients, Optimizer, Activations];
                let measured = on_every_rank(&base, |mut trainer| {
                    trainer.step()?;
                    trainer.step()?;
                    Ok(categories.map(|category| trainer.device().ledger().peak(category) as u64))
                });
                for (rank, measured) in measured.into_iter().enumerate() {
                    let memory = plan.rank(rank).unwrap().memory;
                    let predicted = [memory.weights, memory.gradients, memory.optimizer, memory.activations];
                    assert_eq!(measured, predicted, "{axis} {fields:?}, rank {rank}: {categories:?}");
                }
            }
        }
    }
}

/// From one rank through mixtures and back, byte for byte.
#[test]
fn a_checkpoint_goes_through_mixtures_unchanged() {
    let base = pruned(&net(&["train.steps=9", "optimizer.name=adamw"]));
    let first = saved(&base, 3);
    let before = files(first.path());
    assert!(before.contains_key("optimizer.safetensors") && before.contains_key("masks.safetensors"));
    let layouts = [
        vec!["parallel.tensor=2", "parallel.integrated=auto"],
        vec!["parallel.spatial=2", "parallel.integrated=[\"layers.8\"]"],
        vec!["parallel.tensor=3", "parallel.integrated=[\"layers.11\",\"layers.13\"]"],
        vec![],
    ];
    let last = passed_on(first.path(), layouts.map(|layout| base.with(layout)));
    assert!(files(last.path()) == before);
}

#[test]
fn what_cannot_be_mixed_is_one_sentence() {
    let auto = |fields: &[&str]| net(&["parallel.integrated=auto"]).with(fields);
    let named = |name: &str| net(&["parallel.tensor=2"]).with([&format!("parallel.integrated=[\"{name}\"]")]);
    assert_eq!(
        refused(&named("classifier")),
        "`parallel.integrated` must be \"auto\", or names of convolutions and linear layers, or what such names begin with, got \
         \"classifier\""
    );
    assert_eq!(
        refused(&named("layers.0").with(["parallel.tensor=16", "train.batch=64"])),
        "`parallel.integrated` cannot be: some layer cannot be split over 16 ranks"
    );
    for (fields, expected) in [
        (&["parallel.tensor=1"][..], "`parallel.integrated` has no effect with `parallel.tensor` = 1"),
        (
            &["parallel.tensor=2", "parallel.spatial=2"],
            "`parallel.tensor` is 2, but `parallel.integrated` is for one group",
        ),
        (
            &["parallel.tensor=8"],
            "`parallel.tensor` is 8, but with `parallel.integrated` these ranks split the 7 samples",
        ),
        (&["parallel.tensor=2", "train.noise_scale=true"], "`train.noise_scale` is true"),
        (
            &["parallel.tensor=2", "parallel.pipeline=2"],
            "`parallel.pipeline` is 2, but `parallel.integrated`",
        ),
        (&["parallel.tensor=2", "parallel.linear=plain"], "`parallel.linear` is written"),
    ] {
        let error = refused(&auto(fields));
        assert!(error.starts_with(expected), "{error}");
    }
}

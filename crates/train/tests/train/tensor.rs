//! Tensor parallelism: ranks that have a shard of every large layer each train as one rank does, alone and
//! with the other axes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use espalier_plan::shard::ElementRun;
use espalier_testing::{apart, farthest, largest};
use espalier_train::Error;
use espalier_train::trainer::Trainer;

use crate::support::{
    Base, assert_peaks, assert_predicted, files, on_every_rank, passed_on, rotary_llama, saved, take,
    tiny_cnn, tiny_gpt, tiny_llama,
};

/// What a rank has to show after some steps: what all ranks see alike, and how far its weights are from those
/// of one rank alone.
#[derive(Debug, Clone)]
pub struct Shown {
    losses: Vec<f64>,
    norms: Vec<f64>,
    noise: Vec<f64>,
    validation: f64,
    accuracy: f64,
    weights: Vec<(String, Vec<ElementRun>, Vec<f32>)>,
}

fn shown(mut trainer: Trainer, steps: usize) -> Result<Shown, Error> {
    let reports = take(&mut trainer, steps)?;
    let (weights, model_parallel) = (trainer.params(), trainer.model_parallel());
    let runs = |id| model_parallel.local_shard(id).runs().collect();
    let weights = weights
        .ids()
        .map(|id| (weights.name(id).to_owned(), runs(id), weights.param(id).dense().unwrap().to_f32()))
        .collect();
    let evaluation = trainer.evaluate()?.expect("some samples are held out");
    Ok(Shown {
        losses: reports.iter().map(|report| report.loss).collect(),
        norms: reports.iter().map(|report| report.grad_norm).collect(),
        noise: reports.iter().filter_map(|report| report.noise_scale).collect(),
        validation: evaluation.loss,
        accuracy: evaluation.accuracy,
        weights,
    })
}

pub fn on(base: &Base, steps: usize) -> Vec<Shown> {
    on_every_rank(&base.steps(steps), |trainer| shown(trainer, steps))
}

/// How far apart two runs may be: losses and norms relatively, weights by the largest of their tensor.
#[derive(Clone, Copy)]
pub struct Within {
    pub losses: f64,
    pub norms: f64,
    pub weights: f32,
}

/// Runs layouts, and compares each with one rank alone.
pub fn all_same(
    base: &Base,
    layouts: impl IntoIterator<Item = impl Display>,
    steps: usize,
    tolerance: f64,
) -> Shown {
    let single = on(base, steps).remove(0);
    let within = Within { losses: tolerance, norms: 20.0 * tolerance, weights: 1e-3 };
    for layout in layouts {
        same_as(&single, &base.set(layout), steps, within);
    }
    single
}

/// Runs a layout and compares it with one rank alone.
pub fn same_as(single: &Shown, base: &Base, steps: usize, within: Within) {
    let ranks = on(base, steps);
    let held: BTreeSet<&String> =
        ranks.iter().flat_map(|rank| &rank.weights).map(|(name, ..)| name).collect();
    assert_eq!(held.len(), single.weights.len(), "{base}: every weight is on some rank");
    for (rank, many) in ranks.iter().enumerate() {
        for (what, alone, many, most) in [
            ("losses", &single.losses, &many.losses, within.losses),
            ("norms", &single.norms, &many.norms, within.norms),
            ("validation", &vec![single.validation], &vec![many.validation], within.losses),
        ] {
            let far = apart(alone, many);
            assert!(far < most, "{base}, rank {rank}: {what} {far:e} apart\n{alone:?}\n{many:?}");
        }
        assert!((single.accuracy - many.accuracy).abs() < 0.02, "{base}, rank {rank}: accuracy");
        for (name, runs, values) in &many.weights {
            let (_, _, full) =
                single.weights.iter().find(|(of, ..)| of == name).expect("a parameter of the model");
            let largest = largest(full).max(f32::MIN_POSITIVE);
            for run in runs {
                let (full, values) = (&full[run.in_full..][..run.length], &values[run.at..][..run.length]);
                let (i, off) = farthest(full, values);
                assert!(
                    off / largest < within.weights,
                    "{base}, rank {rank}: {name} at {} is {}, alone {}",
                    run.in_full + i,
                    values[i],
                    full[i]
                );
            }
        }
    }
}

/// A GPT with dropout, a vocabulary and heads that do not divide evenly, at a rate at which rounding does not
/// grow.
fn gpt() -> Base {
    let base = tiny_gpt("train.batch=8 train.eval_samples=11 model.dropout=0.1 model.context=11");
    let base = base.set("model.heads=5 model.width=20 train.micro_batches=2 train.clip=0.5");
    base.set("optimizer.name=sgd learning_rate.peak=0.3 learning_rate.decay_steps=100")
}

#[test]
fn a_sharded_gpt_learns_what_a_full_one_learns() {
    let steps = if espalier_testing::long() { 50 } else { 12 };
    for base in [gpt(), gpt().set("model.tied=false")] {
        let layouts = [2, 3, 5].into_iter().flat_map(|ranks| {
            ["", " parallel.sequence=true"].map(|more| format!("parallel.tensor={ranks}{more}"))
        });
        let single = all_same(&base, layouts, steps, 1e-5);
        assert!(single.losses[steps - 1] < single.losses[0], "it learns");
    }
}

/// The lecture's form of a linear layer, for all of them or for those that are named: the same weights by
/// other messages.
#[test]
fn plain_linear_layers_learn_what_pairs_learn() {
    for base in [gpt(), gpt().set("model.tied=false")] {
        let forms = ["plain", "[\"h.0\"]", "[\"h.0.mlp.c_fc\",\"h.1.attn\"]"].into_iter();
        let layouts = forms.flat_map(|form| {
            ["parallel.tensor=2", "parallel.tensor=3 parallel.pipeline=2"]
                .map(|layout| format!("{layout} parallel.linear={form}"))
        });
        all_same(&base, layouts, 8, 1e-5);
    }
    let net = tiny_cnn("train.batch=8 train.eval_samples=11 learning_rate.peak=0.01");
    all_same(&net, ["parallel.tensor=2 parallel.linear=plain"], 8, 1e-5);
}

/// With every other axis and what goes with them.
#[test]
fn all_axes_together_are_one_run() {
    let others = [
        "parallel.data=2 train.micro_batches=2",
        "parallel.data=2 train.micro_batches=2 parallel.zero=true",
        "train.recompute=block",
        "train.recompute=attention",
        "train.recompute=attention parallel.pipeline=2",
        "parallel.pipeline=2 parallel.schedule=1f1b",
        "parallel.pipeline=2 parallel.schedule=zb-h1",
        "parallel.pipeline=2 parallel.schedule=chimera",
        "parallel.pipeline=2 parallel.schedule=axonn",
        "parallel.data=2 train.micro_batches=2 parallel.pipeline=2 parallel.schedule=gpipe parallel.zero=true",
    ];
    let both =
        |other| ["false", "true"].map(|is| format!("parallel.tensor=2 parallel.sequence={is} {other}"));
    let layouts = others.into_iter().flat_map(both);
    all_same(&gpt().set("train.micro_batches=4 model.layers=3"), layouts, 4, 1e-5);
}

#[test]
fn the_noise_scale_is_that_of_full_gradients() {
    let base = gpt().set("train.noise_scale=true train.micro_batches=4");
    let layouts = ["parallel.tensor=2", "parallel.tensor=2 parallel.data=2 train.micro_batches=2"];
    assert!(!all_same(&base, layouts, 6, 1e-5).noise.is_empty());
}

/// Norms of full tensors decide how far LAMB and LARS go.
#[test]
fn trust_ratios_are_those_of_full_tensors() {
    for optimizer in ["lamb", "lars"] {
        let base = gpt().set(format!("optimizer.name={optimizer} learning_rate.peak=0.01"));
        let shared = "parallel.tensor=2 parallel.data=2 train.micro_batches=1 parallel.zero=true";
        all_same(&base, ["parallel.tensor=2", shared], 6, 1e-5);
    }
}

/// Separate projections, gates, and fewer heads of keys and values than ranks: these are repeated where they
/// have weights of their own, and gathered where one weight makes queries, keys and values.
#[test]
fn llama_s_layers_are_sharded_by_heads() {
    let changes = "train.batch=8 train.micro_batches=2 train.eval_samples=8";
    for base in [tiny_llama(changes), rotary_llama(changes)] {
        let base = base.set("optimizer.name=sgd learning_rate.peak=0.3 learning_rate.decay_steps=100");
        let all_axes = "parallel.sequence=true parallel.pipeline=2 parallel.data=2 train.micro_batches=1 \
                        parallel.zero=true train.recompute=attention";
        let layouts = [2, 4].into_iter().flat_map(|ranks| {
            ["", "parallel.sequence=true", all_axes].map(|more| format!("parallel.tensor={ranks} {more}"))
        });
        all_same(&base, layouts, 8, 1e-5);
    }
}

#[test]
fn convolutions_are_sharded_by_their_channels() {
    let base = tiny_cnn("train.batch=8 train.eval_samples=11 model.layers.0.stride=2");
    let base = base.set("learning_rate.peak=0.01 model.layers.1.type=gelu");
    all_same(&base, ["parallel.tensor=2", "parallel.tensor=3"], 12, 1e-5);
}

/// The masks of all ranks put together: by parameter, the indices of the full tensor that are kept.
pub fn masks(base: &Base, steps: usize) -> BTreeMap<String, Vec<usize>> {
    let ranks = on_every_rank(&base.set("train.steps=20"), |mut trainer| {
        take(&mut trainer, steps)?;
        let kept = |(id, mask): (_, &espalier_tensor::Mask)| {
            let words = mask.read_words().unwrap();
            let indices = espalier_train::prune::kept_indices(&words).into_iter();
            let shard = trainer.model_parallel().local_shard(id);
            (
                trainer.params().name(id).to_owned(),
                indices.map(|index| shard.in_full(index)).collect::<Vec<_>>(),
            )
        };
        Ok(trainer.params().masks().map(kept).collect::<Vec<_>>())
    });
    let mut all: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, indices) in ranks.into_iter().flatten() {
        all.entry(name).or_default().extend(indices);
    }
    for indices in all.values_mut() {
        indices.sort_unstable();
        indices.dedup();
    }
    all
}

/// Where scores are the weights themselves or random numbers by position, a mask is the same to the bit however
/// tensors are split; in bf16 many weights are equal.
#[test]
fn a_mask_does_not_depend_on_how_tensors_are_split() {
    let bf16 = gpt().set("train.precision=bf16 prune.embeddings=true");
    for (what, fields) in [
        ("magnitude", "prune.method=magnitude prune.sparsity=0.9"),
        ("magnitude by layer", "prune.method=magnitude prune.sparsity=0.7 prune.scope=layer"),
        ("random", "prune.method=random prune.sparsity=0.9"),
        ("2:4", "prune.method=2:4"),
        ("set", "prune.method=set prune.sparsity=0.8"),
    ] {
        let base = bf16.set(fields);
        let full = masks(&base, 1);
        assert!(!full.is_empty(), "{what}");
        for layout in ["parallel.tensor=2", "parallel.tensor=3 parallel.sequence=true"] {
            assert_eq!(masks(&base.set(layout), 1), full, "{what} on {layout}");
        }
        let stages = "parallel.tensor=2 parallel.pipeline=2";
        assert_eq!(masks(&base.set(stages), 1), full, "{what} in stages");
    }
}

/// All methods, with state of kept weights alone: they learn what one rank learns.
#[test]
fn sharded_pruned_models_learn_what_full_ones_learn() {
    let base = gpt().set("learning_rate.peak=0.05");
    for (what, fields) in [
        ("magnitude", "prune.method=magnitude prune.sparsity=0.9"),
        ("gradual", "prune.method=gradual prune.sparsity=0.8 prune.end=4 prune.every=2"),
        ("elsa", "prune.method=elsa prune.end=4 prune.every=2 optimizer.name=adamw"),
        ("wanda", "prune.method=wanda prune.sparsity=0.7 prune.samples=16"),
        ("snip", "prune.method=snip prune.sparsity=0.7 prune.samples=16"),
        ("grasp", "prune.method=grasp prune.sparsity=0.7 prune.samples=16"),
        ("rigl", "prune.method=rigl prune.sparsity=0.7 prune.every=3"),
    ] {
        let base = base.set(fields);
        let single = on(&base, 6).remove(0);
        // A score that is a sum over ranks may round to the other side of the threshold.
        let tolerance = if what == "grasp" { 1e-3 } else { 1e-4 };
        for layout in [
            "parallel.tensor=2",
            "parallel.tensor=2 parallel.sequence=true",
            "parallel.tensor=2 parallel.data=2 train.micro_batches=1 parallel.zero=true",
        ] {
            let many = on(&base.set(layout), 6).remove(0);
            let far = apart(&single.losses, &many.losses);
            assert!(far < tolerance, "{what} on {layout}: {far:e}\n{:?}\n{:?}", single.losses, many.losses);
        }
    }
}

/// Gradients that ranks of one replica reduce, and what layers gather of each other: the larger of both is
/// allocated at a time.
#[test]
fn messages_within_a_replica_are_as_large_as_predicted() {
    let base = tiny_cnn("train.micro_batches=2");
    for layout in ["parallel.tensor=2", "parallel.spatial=2", "parallel.tensor=2 parallel.data=2"] {
        let summary = base.set(layout).steps(2).run();
        assert!(summary.memory["communication"].measured > Some(0), "{layout}");
        assert_predicted(&summary, &["communication"], layout);
    }
}

/// From one rank through other layouts and back: byte for byte, pruned and with state of kept weights alone.
#[test]
fn a_checkpoint_goes_through_layouts_that_shard_tensors_unchanged() {
    let base = gpt().set("optimizer.name=adamw learning_rate.peak=0.01 train.steps=9 train.precision=bf16");
    let pruned = base.set("prune.method=magnitude prune.sparsity=0.8 prune.embeddings=true");
    for (what, base) in [("dense", base), ("pruned", pruned)] {
        let first = saved(&base, 3);
        let before = files(first.path());
        let in_use =
            ["model", "optimizer", "masks"].map(|name| before.contains_key(&format!("{name}.safetensors")));
        assert_eq!(in_use, [true, true, what == "pruned"]);
        let layouts = [
            "parallel.tensor=2",
            "parallel.tensor=3 parallel.sequence=true",
            "parallel.tensor=2 parallel.data=2 train.micro_batches=1 parallel.zero=true",
            "parallel.tensor=2 parallel.pipeline=2",
            "",
        ];
        let last = passed_on(first.path(), layouts.map(|layout| base.set(layout)));
        assert!(files(last.path()) == before, "{what}");
    }
}

/// A sharded run ends, goes on elsewhere, and reports of the full model what one rank reports.
#[test]
fn a_run_goes_on_under_another_layout() {
    let base = gpt().set("prune.method=magnitude prune.sparsity=0.8 checkpoint.every=4");
    let folder = tempfile::tempdir().unwrap();
    let single = base.steps(8).run();
    let sharded = base.set("parallel.tensor=2");
    let both = sharded.steps(8).run();
    let again = sharded.steps(8).run();
    assert_eq!(both.weights_hash, again.weights_hash, "the same layout gives the same bits");
    sharded.steps(4).run_in(folder.path());
    let resumed = sharded.steps(8).run_in(folder.path());
    assert_eq!(resumed.weights_hash, both.weights_hash, "stopped and resumed");
    for run in [&both, &resumed] {
        assert!((run.loss.unwrap() - single.loss.unwrap()).abs() < 1e-4);
        assert_eq!(run.parameters, single.parameters);
        assert!((run.state_bytes_per_parameter - single.state_bytes_per_parameter).abs() < 0.1);
    }
}

/// What every rank takes of each category that is predicted, in training: dense, and with state of kept
/// weights alone.
#[test]
fn memory_of_every_rank_is_what_the_plan_predicts() {
    use espalier_tensor::Category::{Gradients, Optimizer, Weights};
    let bf16 = gpt().set("train.precision=bf16 optimizer.name=adamw");
    for (base, layout) in [
        (gpt(), "parallel.tensor=2"),
        (gpt(), "parallel.tensor=3 parallel.sequence=true"),
        (gpt(), "parallel.tensor=2 parallel.pipeline=2"),
        (bf16.clone(), "parallel.tensor=2"),
        (bf16, "parallel.tensor=2 parallel.zero=true parallel.data=2"),
    ] {
        assert_peaks(&base.set(layout).steps(2), 2, [Weights, Gradients, Optimizer]);
    }
}

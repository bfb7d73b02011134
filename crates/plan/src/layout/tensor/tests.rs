use proptest::prelude::*;

use super::super::{Layout, LocalModel, Partition};
use super::*;
use crate::spec::presets::{Gpt, gpt, resnet8};
use crate::spec::{CollectiveOp, Precision, RecomputeMode, Residual, ShardDim};

fn locals(model: &ModelSpec, tensor: usize, sequence: bool) -> Vec<LocalModel> {
    let cuts = Partition { tensor, sequence, ..Partition::NONE };
    Layout::new(model, &model.parameters(), cuts).unwrap().local_models().to_vec()
}

/// Every element of every parameter is on one rank, or whole on all of them.
fn covers(model: &ModelSpec, locals: &[LocalModel]) {
    for (id, parameter) in model.parameters().iter().enumerate() {
        let shards: Vec<&Shard> = locals.iter().map(|local| &local.shards[id]).collect();
        if shards.iter().all(|shard| shard.is_full()) {
            continue;
        }
        let mut indices: Vec<usize> = shards
            .iter()
            .flat_map(|shard| shard.runs().flat_map(|run| run.in_full..run.in_full + run.length))
            .collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..parameter.elements() as usize).collect::<Vec<_>>(), "{}", parameter.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn shapes_fit_and_shards_cover(
        heads in 1usize..7, each in 1usize..5, vocab in 2usize..40, ranks in 2usize..7, seq in 6usize..12, sequence: bool, tied: bool,
    ) {
        prop_assume!(heads >= ranks);
        let shape = Gpt { layers: 2, width: heads * each, heads, context: seq, vocab, tied, dropout: 0.1, ..Gpt::default() };
        let model = gpt("gpt", &shape);
        let locals = locals(&model, ranks, sequence);
        covers(&model, &locals);
        let mut flops = 0.0;
        for local in &locals {
            let names = |model: &ModelSpec| model.parameters().into_iter().map(|p| p.name).collect::<Vec<_>>();
            prop_assert_eq!(names(&local.model), names(&model));
            flops += local.model.flops(1).unwrap();
            for (parameter, shard) in local.model.parameters().iter().zip(&local.shards) {
                prop_assert_eq!(&parameter.shape, &shard.shape());
            }
            local.model.activation_bytes(3, Precision::F32, RecomputeMode::None).unwrap();
        }
        let full = model.flops(1).unwrap();
        // A head with fewer classes than ranks is on each of them.
        prop_assert!(vocab < ranks || (flops / full - 1.0).abs() < 1e-9, "{flops} {full}");
    }
}

/// Words of a row of layers, those inside residuals included.
fn words(layers: &[LayerSpec]) -> String {
    let word = |layer: &LayerSpec| match layer {
        LayerSpec::Residual(Residual { branch, .. }) => format!("({})", words(branch)),
        LayerSpec::Collective(exchange) => match (exchange.forward, exchange.backward) {
            (CollectiveOp::Identity, CollectiveOp::AllReduce) => "enter".into(),
            (CollectiveOp::AllReduce, CollectiveOp::Identity) => "leave".into(),
            (CollectiveOp::AllGather(ShardDim::Sequence), CollectiveOp::ReduceScatter(_)) => "gather".into(),
            (CollectiveOp::ReduceScatter(_), CollectiveOp::AllGather(_)) => "scatter".into(),
            other => format!("{other:?}"),
        },
        other => other.kind().into(),
    };
    layers.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn one_all_reduce_forward_and_one_backward_for_attention_and_for_the_perceptron() {
    let model = gpt("gpt", &Gpt { dropout: 0.0, ..Gpt::default() });
    let local = &locals(&model, 2, false)[1];
    insta::assert_snapshot!(words(&local.model.blocks[1].layers), @"(layer_norm enter linear attention linear leave bias) (layer_norm enter linear gelu linear leave bias)");
    assert_eq!(words(&local.model.blocks[0].layers), "embedding leave position");
    assert_eq!(words(&local.model.blocks[5].layers), "layer_norm enter tied_linear");
    assert_eq!(local.classes, Some(ClassShard { axis: Axis::Tensor, ranks: 2, own: 128..256 }));
    let local = &locals(&model, 2, true)[0];
    insta::assert_snapshot!(words(&local.model.blocks[1].layers), @"(layer_norm gather linear attention linear scatter bias) (layer_norm gather linear gelu linear scatter bias)");
    let partial = local.parameters.iter().zip(&local.partial).filter(|(_, partial)| partial.tensor);
    assert!(
        partial
            .map(|(p, _)| &p.name)
            .all(|name| name.contains("ln") || name.ends_with(".c_proj.bias") || *name == "wpe.weight")
    );
}

#[test]
fn a_convolution_is_cut_by_its_channels() {
    let model = resnet8((32, 32, 3), 10);
    let locals = locals(&model, 3, false);
    covers(&model, &locals);
    let all: u64 = locals.iter().map(|local| local.model.parameter_count()).sum();
    assert!(all < model.parameter_count() * 11 / 10, "{all}");
}

/// Nobody wants the gradient of images: neither of full ones nor of tiles is it made, or reduced.
#[test]
fn before_the_first_layer_nothing_enters() {
    let model = resnet8((32, 32, 3), 10);
    assert!(words(&locals(&model, 2, false)[0].model.blocks[0].layers).starts_with("conv "));
    let cuts = Partition { tensor: 2, grid: [2, 1], ..Partition::NONE };
    let layout = Layout::new(&model, &model.parameters(), cuts).unwrap();
    let layers = words(&layout.local_models()[0].model.blocks[0].layers);
    assert!(layers.starts_with("crop halo conv "), "{layers}");
    let next = words(&layout.local_models()[0].model.blocks[1].layers);
    assert!(next.contains("enter halo conv "), "{next}");
}

#[test]
fn too_many_ranks_for_the_heads_are_refused() {
    let model = gpt("gpt", &Gpt::default());
    let cuts = Partition { tensor: 8, ..Partition::NONE };
    let error = Layout::new(&model, &model.parameters(), cuts).unwrap_err().to_string();
    assert!(error.contains("parallel.tensor") && error.contains("4 heads"), "{error}");
}

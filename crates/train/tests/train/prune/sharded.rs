//! Methods on ranks that hold shards of every weight: each has its shard of the mask of the full tensor.

use std::collections::BTreeMap;

use espalier_plan::Shard;
use espalier_plan::mesh::{Mesh, PerAxis};
use espalier_plan::pruning::{Distribution, DynamicSparsity, Scope};
use espalier_tensor::{Category, Device, Tensor};
use espalier_train::parallel::model::ModelParallel;
use espalier_train::parallel::{Ranks, on_threads};
use espalier_train::prune::drop_and_grow::DropAndGrow;
use espalier_train::prune::magnitude::Magnitude;
use espalier_train::prune::random::Random;
use espalier_train::prune::set::Set;
use espalier_train::prune::two_of_four::TwoOfFour;
use espalier_train::prune::{Pruner, kept_indices};

use super::bench::Bench;
use crate::support::{Base, tiny_gpt};

/// The indices of the full tensor that each mask keeps, by step and parameter.
type ChosenMasks = BTreeMap<(u64, usize), Vec<usize>>;

fn choose_all_masks(bench: &mut Bench, method: &mut dyn Pruner, steps: &[u64]) -> ChosenMasks {
    let mut chosen = ChosenMasks::new();
    for step in steps {
        let new_masks = bench.choose_masks(method, *step);
        for (id, words) in &new_masks.masks {
            let shard = bench.context.model_parallel.local_shard(*id);
            chosen
                .insert((*step, id.0), kept_indices(words).into_iter().map(|at| shard.in_full(at)).collect());
        }
        bench.apply(new_masks);
    }
    chosen
}

/// What a rank of three holds of a tensor: of some every third column, of others rows whose borders divide no
/// four; of norms and biases all.
fn shard(shape: &[usize], id: usize, rank: usize) -> Shard {
    if shape.len() == 1 {
        return Shard::full(shape);
    }
    let (dim, size) = match id % 2 {
        0 => (shape.len() - 1, shape[shape.len() - 1]),
        _ => (0, shape[0]),
    };
    let local_indices = (0..size).filter(|index| match id % 2 {
        0 => index % 3 == rank,
        _ => index * 3 / size == rank,
    });
    Shard::full(shape).narrow(dim, &local_indices.map(|index| index..index + 1).collect::<Vec<_>>())
}

/// Keeps of a bench what a rank holds.
fn shard_weights(bench: &mut Bench, ranks: Ranks, device: &Device) {
    let shapes: Vec<Vec<usize>> = bench.params.iter().map(|(_, param)| param.plan.shard.shape()).collect();
    let of = |rank: usize| shapes.iter().enumerate().map(|(id, shape)| shard(shape, id, rank)).collect();
    bench.context.model_parallel = ModelParallel::new(ranks.stages().clone(), (0..3).map(of).collect());
    bench.context.ranks = ranks;
    for id in bench.params.ids() {
        let (values, shard) = (bench.values(id), bench.context.model_parallel.local_shard(id).clone());
        let at = shard.runs().flat_map(|run| run.in_full..run.in_full + run.length);
        let local: Vec<f32> = at.map(|index| values[index]).collect();
        let local = Tensor::from_slice(device, &shard.shape(), &local, Category::Weights).unwrap();
        let plan = &mut bench.context.params.params[id.0];
        (plan.shard, plan.is_split) = (shard.clone(), bench.context.model_parallel.is_split(id));
        let param = bench.params.param_mut(id);
        (*param.weight_mut(), param.plan.shard) = (local, shard);
    }
}

/// A bench whose weights have few different values.
fn with_ties(base: &Base) -> Bench {
    let mut bench = Bench::new(base);
    for id in bench.params.ids() {
        let values: Vec<f32> = bench.values(id).iter().map(|value| (50.0 * value).round() / 50.0).collect();
        bench.set(id, &values);
    }
    bench
}

fn compare(base: &Base, steps: &[u64], method: impl Fn() -> Box<dyn Pruner> + Sync) {
    let expected = choose_all_masks(&mut with_ties(base), &mut *method(), steps);
    assert!(!expected.is_empty());
    let mesh = Mesh::new(PerAxis { pipeline: 3, ..PerAxis::ONES }).unwrap();
    let chosen = on_threads(&mesh, &Device::cpu(1).unwrap(), |ranks, device| {
        let mut bench = with_ties(base);
        shard_weights(&mut bench, ranks, device);
        Ok(choose_all_masks(&mut bench, &mut *method(), steps))
    });
    let mut joined = ChosenMasks::new();
    for chosen in chosen.unwrap() {
        chosen.into_iter().for_each(|(mask, indices)| joined.entry(mask).or_default().extend(indices));
    }
    for indices in joined.values_mut() {
        indices.sort_unstable();
        // What is not split is on all of them.
        indices.dedup();
    }
    assert_eq!(joined, expected, "{:?}", method());
}

#[test]
fn a_sharded_model_is_pruned_as_a_full_one() {
    let base = tiny_gpt("prune.method=magnitude prune.sparsity=0.7");
    let (sparsity, at) = (0.7, 0);
    for scope in [Scope::Layer, Scope::Row, Scope::Global] {
        compare(&base, &[0], || Box::new(Magnitude { sparsity, scope, at }));
        compare(&base, &[0], || Box::new(Random { sparsity, scope, at }));
    }
    compare(&base, &[0], || Box::new(TwoOfFour { at }));
    let moving = DynamicSparsity {
        every: 10,
        fraction: 0.5,
        until: 0.75,
        distribution: Distribution::Uniform,
        dense_first: false,
    };
    let base = tiny_gpt("prune.method=set prune.sparsity=0.7");
    compare(&base, &[0, 10, 20], || Box::new(Set(DropAndGrow::new(moving))));
}

//! Models that are sharded over ranks, against the same file: their loss and their gradients, put together from
//! the shards and the partial sums that the ranks have, are PyTorch's. So a layout is compared with something
//! that nobody here wrote, not against one rank alone.

use espalier_nn::weights::LocalTensors;
use espalier_plan::layout::PartialAxes;
use espalier_train::Result;
use espalier_train::parallel::{Ranks, on_threads};

use super::*;
use crate::support::settings;

/// What a rank made of the first micro-batch: its loss, and by parameter the gradient of its shard.
type Made = (f64, Vec<Vec<f32>>);

/// Sends the first micro-batch through a rank's own model, with its shards of the file's weights.
fn made_by(oracle: &Oracle, plan: &Plan, masked: bool, ranks: &Ranks, device: &Device) -> Result<Made> {
    let local = plan.layout.of(ranks.coords());
    let local_tensors = LocalTensors::all(&plan.model);
    let mut weights = Weights::initialise_local(local, &local_tensors, device, DType::F32, 0)?;
    for id in weights.ids().collect::<Vec<_>>() {
        let full = start(oracle, weights.name(id), masked);
        let runs = local.shards[id.0].runs();
        let local: Vec<f32> =
            runs.flat_map(|run| full[run.in_full..run.in_full + run.length].to_vec()).collect();
        let shape = weights.get(id).shape().to_vec();
        *weights.get_mut(id) = Tensor::from_f32(device, &shape, DType::F32, &local, Category::Weights)?;
    }
    let model = Model::of_rank(local, ranks.axes(), RecomputeMode::None, None);
    let mut gradients = Collected::default();
    let batch = oracle.batch(0, device, DType::F32);
    let (loss, ..) = pass(&model, &weights, batch, NormGroup::Step, 1.0, &mut gradients);
    let of = |id| gradients.0[&id].to_f32();
    Ok((loss, weights.ids().map(of).collect()))
}

/// A parameter as the file has it, with zeros for what is pruned.
fn start(oracle: &Oracle, name: &str, masked: bool) -> Vec<f32> {
    let mut values = oracle.tensors[&format!("init/{name}")].clone();
    if let Some(words) = oracle.words.get(&format!("mask/{name}")).filter(|_| masked) {
        values
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| !is_kept(words, *i))
            .for_each(|(_, value)| *value = 0.0);
    }
    values
}

/// The gradient of a full parameter. A rank's counts unless one before it has the same: the same shard, and
/// not another partial sum of it.
fn together(id: usize, length: usize, locals: &[LocalModel], tensor: usize, made: &[Made]) -> Vec<f32> {
    let mut full = vec![0.0; length];
    for (rank, local) in locals.iter().enumerate() {
        let PartialAxes { tensor: is_partial, spatial: tiles } = local.partial[id];
        let is_same = |other: usize| {
            locals[other].shards[id] == local.shards[id]
                && (!is_partial || other % tensor == rank % tensor)
                && (!tiles || other / tensor == rank / tensor)
        };
        if (0..rank).any(is_same) {
            continue;
        }
        for run in local.shards[id].runs() {
            let local = &made[rank].1[id][run.at..run.at + run.length];
            full[run.in_full..run.in_full + run.length].iter_mut().zip(local).for_each(|(sum, x)| *sum += x);
        }
    }
    full
}

fn check(oracle: &Oracle, layout: &str) {
    let plan = Plan::new(RunFile::parse(oracle.text, &settings(layout)).unwrap(), oracle.facts).unwrap();
    let device = Device::cpu(1).unwrap();
    for case in [F32[0], F32[1]] {
        let network = oracle.network(case);
        let made = on_threads(&plan.mesh, &device, |ranks, device| {
            made_by(oracle, &plan, case.masked, &ranks, device)
        })
        .unwrap();
        let expected = f64::from(oracle.tensors[&network.what("loss")][0]);
        for (rank, (loss, _)) in made.iter().enumerate() {
            assert!((loss - expected).abs() < LEAST * expected, "{layout}, rank {rank}: {loss}");
        }
        let tensor = plan.mesh.axis_sizes().tensor;
        let what = network.what("gradient");
        let compared = |id: ParameterId| {
            let name = network.params.name(id).to_owned();
            let length = network.params.param(id).len();
            let ours = network.kept(id, together(id.0, length, plan.layout.local_models(), tensor, &made));
            let truth = oracle.expected(&what, &name).to_vec();
            Compared { ours, start: vec![0.0; truth.len()], truth, name }
        };
        oracle.assert_close(&what, &network.params.ids().map(compared).collect::<Vec<_>>());
    }
}

#[test]
fn gradients_of_shards_of_layers_are_pytorchs() {
    for sequence in ["parallel.sequence=false", "parallel.sequence=true"] {
        check(&Oracle::gpt(), &format!("parallel.tensor=2 {sequence}"));
        // Two heads of keys and values on four ranks.
        check(&Oracle::llama(), &format!("parallel.tensor=2 {sequence}"));
        check(&Oracle::llama(), &format!("parallel.tensor=4 {sequence}"));
    }
    check(&Oracle::cnn(), "parallel.tensor=2");
    check(&Oracle::cnn(), "parallel.tensor=3");
}

#[test]
fn gradients_over_tiles_of_images_are_pytorchs() {
    for layout in ["parallel.spatial=2", "parallel.spatial=[2,2]", "parallel.spatial=2 parallel.tensor=2"] {
        check(&Oracle::cnn(), layout);
    }
}

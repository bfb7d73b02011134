//! The built-in resnet8 is the network of Lee et al. (2021) as PyTorch computes it with explicit padding: one
//! pass forward and back, on the processor and, where there is one, on a GPU.

use espalier_plan::filters::index_in_pytorch;
use espalier_tensor::cuda::Cuda;
use espalier_testing::{Need, skipped};

use super::*;

const RUN: &str = "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\n";

/// A GPU's convolutions round to TF32: 2^-11 of each factor, over eight layers.
const TF32: f64 = 5e-3;

/// The weights that the script knows too: those of the n-th parameter in the order of names, counted as PyTorch
/// does.
fn weight(number: usize, shape: &[usize]) -> Vec<f32> {
    let window: usize = shape[1..].iter().product();
    let scale = if shape.len() > 1 { (2.0 / window as f64).sqrt() } else { 0.1 };
    let noise = |i: usize| ((index_in_pytorch(shape, i) * 7919 + number * 104_729) % 1009) as f64 - 504.0;
    (0..shape.iter().product()).map(|i| (noise(i) / 504.0 * scale) as f32).collect()
}

#[test]
fn resnet8_with_the_gradients_of_its_paper() {
    let facts = DataFacts { vocab: None, image: Some((8, 12, 3)), classes: Some(10) };
    let file = include_bytes!("../../oracle/resnet8.safetensors");
    let oracle = Oracle::read(file, RUN, facts, "fc.weight");
    let plan = Plan::new(RunFile::parse(RUN, &[]).unwrap(), facts).unwrap();
    let probe = Cuda::probe();
    let gpu = probe.usable().then(|| (Device::cuda(0).unwrap(), TF32));
    if gpu.is_none() {
        skipped(Need::Cuda, probe.missing.join("; "));
    }
    for (device, allowed) in [(Device::cpu(1).unwrap(), 5e-6)].into_iter().chain(gpu) {
        let mut weights = Weights::initialise(&plan.model, &device, DType::F32, 0).unwrap();
        let mut ids: Vec<_> = weights.ids().collect();
        ids.sort_by_key(|id| weights.name(*id).to_owned());
        for (number, id) in ids.iter().enumerate() {
            let shape = weights.get(*id).shape().to_vec();
            let values = weight(number, &shape);
            *weights.get_mut(*id) =
                Tensor::from_f32(&device, &shape, DType::F32, &values, Category::Weights).unwrap();
        }
        let model = Model::build(&plan.model, RecomputeMode::None);
        let mut gradients = Collected::default();
        let batch = oracle.batch(0, &device, DType::F32);
        let (loss, read, _) = pass(&model, &weights, batch, NormGroup::Replica, 1.0, &mut gradients);
        let head =
            |name| weights.get(*ids.iter().find(|id| weights.name(**id) == name).expect("it has a head"));
        let (fc, bias) = (head("fc.weight"), head("fc.bias"));
        let logits = matmul(&read, fc.t(), Some(bias), Category::Workspace).unwrap();
        let of = |id: &ParameterId| (format!("gradient/{}", weights.name(*id)), gradients.0[id].to_f32());
        let made = ids
            .iter()
            .map(of)
            .chain([("logits".into(), logits.to_f32()), ("loss".into(), vec![loss as f32])]);
        let mut compared = 0;
        for (name, ours) in made {
            let Some(truth) = oracle.tensors.get(&format!("dense/{name}")) else { continue };
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let off = norm(&mut ours.iter().zip(truth).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let off = off / norm(&mut truth.iter().map(|x| f64::from(*x)));
            assert!(ours.len() == truth.len() && off < allowed, "{name} is off by {off:.1e} on {device:?}");
            compared += 1;
        }
        assert_eq!(compared, oracle.tensors.len());
    }
}

//! A model of some layers, its gradients, and the finite differences that they are compared with.

use std::collections::HashMap;

use espalier_nn::Result;
use espalier_nn::layers::{
    BackwardContext, BatchSlice, DeferredGradients, ForwardContext, GradientElements, GradientSink,
    LossScaling, Mode, WeightGradients,
};
use espalier_nn::model::Model;
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::filters::index_in_pytorch;
use espalier_plan::spec::{
    BlockSpec, Conv, Init, Input, LayerSpec, Linear, ModelSpec as Spec, RecomputeMode, WeightOrder,
};
use espalier_tensor::ops::elementwise::add_into;
use espalier_tensor::random::{key, normal};
use espalier_tensor::{Category, DType, Device, Tensor};

const BATCH: usize = 3;
const RANDOM: u64 = 11;

/// Sums of gradients: a tied parameter has several.
#[derive(Default)]
struct SummedGradients(HashMap<ParameterId, Tensor>);

impl GradientSink for SummedGradients {
    fn accept(&mut self, parameters: &[ParameterId], gradients: WeightGradients) -> Result<()> {
        for (id, gradient) in parameters.iter().zip(gradients.make(GradientElements::All)?) {
            match self.0.get_mut(id) {
                Some(sum) => add_into(sum, &gradient)?,
                None => drop(self.0.insert(*id, gradient)),
            }
        }
        Ok(())
    }
}

/// A model of the given layers, all in one block, or one block a layer.
fn model(input: Input, layers: Vec<LayerSpec>, classes: usize, block_a_layer: bool) -> Spec {
    let blocks = match block_a_layer {
        false => vec![BlockSpec { name: "all".into(), layers }],
        true => layers
            .into_iter()
            .enumerate()
            .map(|(i, layer)| BlockSpec { name: format!("block{i}"), layers: vec![layer] })
            .collect(),
    };
    let model = Spec { name: "test".into(), input, blocks, classes };
    model.check().expect("a test's model has shapes that fit");
    model
}

/// A linear layer in PyTorch's order.
pub fn linear(name: &str, input: usize, output: usize) -> LayerSpec {
    let (name, order, init) = (name.to_owned(), WeightOrder::OutIn, Init::Normal(0.5));
    LayerSpec::Linear(Linear { name, input, output, bias: true, order, init })
}

/// A convolution with bias.
pub fn conv(
    name: &str,
    input: usize,
    output: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
) -> LayerSpec {
    let (name, padding, init) = (name.to_owned(), padding.into(), Init::Normal(0.4));
    LayerSpec::Conv(Conv { name, input, output, kernel, stride, padding, bias: true, init })
}

fn input(spec: &Spec, device: &Device) -> Tensor {
    let k = key(5, 5);
    match spec.input {
        Input::Tokens { seq, vocab } => {
            let ids: Vec<u32> = (0..BATCH * seq).map(|i| (i * 7 + i / 5) as u32 % vocab as u32).collect();
            Tensor::from_slice(device, &[BATCH, seq], &ids, Category::Activations).unwrap()
        }
        Input::Image { height, width, channels } => {
            let n = BATCH * height * width * channels;
            let pixels: Vec<f32> = (0..n as u64).map(|i| normal(k, i) as f32).collect();
            Tensor::from_slice(device, &[BATCH, height, width, channels], &pixels, Category::Activations)
                .unwrap()
        }
    }
}

fn targets(spec: &Spec, device: &Device) -> Tensor {
    let rows = match spec.input {
        Input::Tokens { seq, .. } => BATCH * seq,
        Input::Image { .. } => BATCH,
    };
    let targets: Vec<u32> = (0..rows).map(|i| (i * 5 + i / 3) as u32 % spec.classes as u32).collect();
    Tensor::from_slice(device, &[rows], &targets, Category::Activations).unwrap()
}

/// What a pass is given: samples, targets, and where documents begin.
pub struct Batch {
    x: Tensor,
    targets: Tensor,
    positions: Option<Tensor>,
}

fn loss(model: &Model, weights: &Weights, batch: &Batch) -> f64 {
    let Batch { x, targets, positions } = batch;
    let mut pass = ForwardContext::new(weights, Mode::Train, RANDOM, BatchSlice::default());
    pass.positions = positions.as_ref();
    let x = model.forward(x.clone(), &mut pass).unwrap();
    model.evaluate(&x, targets, weights).unwrap().loss_sum
}

fn backward(model: &Model, weights: &Weights, batch: &Batch, sink: &mut dyn GradientSink) {
    let Batch { x, targets, positions } = batch;
    let mut forward = ForwardContext::new(weights, Mode::Train, RANDOM, BatchSlice::default());
    forward.positions = positions.as_ref();
    let x = model.forward(x.clone(), &mut forward).unwrap();
    let mut pass = BackwardContext::of(&mut forward, sink);
    let outcome = model.loss(x, targets, LossScaling { loss: 1.0, temperature: 1.0 }, &mut pass).unwrap();
    model.backward(outcome.gradient, &mut pass).unwrap();
    assert!(forward.stash.is_empty(), "the backward pass takes all that the forward pass left");
}

fn gradients(model: &Model, weights: &Weights, batch: &Batch) -> Vec<Vec<f32>> {
    let mut sink = SummedGradients::default();
    backward(model, weights, batch, &mut sink);
    weights.ids().map(|id| sink.0[&id].to_f32()).collect()
}

fn shift(weights: &mut Weights, id: ParameterId, direction: &[f32], by: f32) {
    for (w, d) in weights.get_mut(id).slice_mut::<f32>().iter_mut().zip(direction) {
        *w += by * d;
    }
}

/// One for each element, whatever their order in memory.
fn random_numbers(weights: &Weights, id: ParameterId, key: u64) -> Vec<f32> {
    let shape = weights.get(id).shape();
    let number = |i| normal(key, index_in_pytorch(shape, i) as u64) as f32;
    (0..shape.iter().product()).map(number).collect()
}

pub fn check(input_shape: Input, layers: Vec<LayerSpec>, classes: usize) {
    check_within(input_shape, layers, classes, None);
}

/// The same where tokens have these positions in their documents, in every sample.
pub fn check_within(input_shape: Input, layers: Vec<LayerSpec>, classes: usize, positions: Option<&[u32]>) {
    let (built, mut weights, batch, exact) = check_bits(input_shape, layers, classes, positions);
    for id in weights.ids() {
        for trial in 0..3 {
            let k = key(9 + trial, id.0 as u64);
            let gradient = &exact[id.0];
            let direction = random_numbers(&weights, id, k);
            let predicted: f64 = gradient.iter().zip(&direction).map(|(g, d)| *g as f64 * *d as f64).sum();
            let size = (direction.len() as f32).sqrt();
            let step = 4e-3 / size;
            let start = weights.get(id).to_f32();
            let mut loss_at = |by: f32| {
                shift(&mut weights, id, &direction, by);
                let loss = loss(&built, &weights, &batch);
                weights.get_mut(id).slice_mut().copy_from_slice(&start);
                loss
            };
            let (up, down) = (loss_at(step), loss_at(-step));
            let measured = (up - down) / (2.0 * step as f64);
            let norm = gradient.iter().map(|g| (*g as f64).powi(2)).sum::<f64>().sqrt();
            let error = (measured - predicted).abs();
            assert!(
                error <= 0.01 * norm.max(1e-2),
                "{} along direction {trial}: measured {measured}, gradient says {predicted} (norm {norm})",
                weights.name(id)
            );
        }
    }
}

/// The same bits when weight gradients are put off, when each layer runs by itself, and when blocks or the
/// insides of attentions are recomputed. Gives the model with its gradients.
pub fn check_bits(
    input_shape: Input,
    layers: Vec<LayerSpec>,
    classes: usize,
    positions: Option<&[u32]>,
) -> (Model, Weights, Batch, Vec<Vec<f32>>) {
    let device = Device::cpu(2).unwrap();
    let spec = model(input_shape, layers, classes, false);
    let built = Model::build(&spec, RecomputeMode::None);
    let mut weights = Weights::initialise(&spec, &device, DType::F32, 3).unwrap();
    // Scales of 1 and shifts of 0 would hide mistakes: move every parameter off its start.
    for id in weights.ids() {
        let noise = random_numbers(&weights, id, key(8, id.0 as u64));
        shift(&mut weights, id, &noise, 0.1);
    }
    let positions = positions.map(|positions| {
        let all = positions.repeat(BATCH);
        Tensor::from_slice(&device, &[BATCH, positions.len()], &all, Category::Transient).unwrap()
    });
    let batch = Batch { x: input(&spec, &device), targets: targets(&spec, &device), positions };
    let exact = gradients(&built, &weights, &batch);
    let mut deferred = DeferredGradients::default();
    backward(&built, &weights, &batch, &mut deferred);
    let mut sink = SummedGradients::default();
    deferred.run(&mut sink).unwrap();
    for id in weights.ids() {
        assert_eq!(sink.0[&id].to_f32(), exact[id.0], "{} put off", weights.name(id));
    }
    let blocks = spec.blocks.iter().flat_map(|block| block.layers.clone()).collect();
    let split = model(input_shape, blocks, classes, true);
    for again in [RecomputeMode::Attention, RecomputeMode::Block, RecomputeMode::Blocks(1)] {
        let built = Model::build(&split, again);
        assert_eq!(gradients(&built, &weights, &batch), exact, "{again} recomputed");
    }
    (built, weights, batch, exact)
}

//! Every backward pass against finite differences of its own forward pass, summed in f64.
//!
//! The loss is that of training. For each parameter tensor the derivative along random directions is compared
//! with the gradient. A layer without parameters stands behind one that has some, so that its input gradient
//! is tested too.

use std::collections::HashMap;

use espalier_nn::Result;
use espalier_nn::layers::{
    BackwardContext, BatchSlice, DeferredGradients, ForwardContext, GradientElements, GradientSink,
    LossScaling, Mode, WeightGradients,
};
use espalier_nn::model::Model;
use espalier_nn::weights::{ParameterId, Weights};
use espalier_plan::spec::{
    Activation, AdaptiveAvgPool, Attention, AvgPool, BatchNorm, BlockSpec, BranchJoin, Branches, Conv,
    Dropout, Embedding, Init, Input, LayerNorm, LayerSpec, Linear, Llama3Scaling, MaxPool, ModelSpec as Spec,
    PadChannels, PositionEmbedding, QkNorm, RecomputeMode, Residual, RmsNorm, Rotary, TiedLinear,
    WeightOrder,
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
fn linear(name: &str, input: usize, output: usize) -> LayerSpec {
    let init = Init::Normal(0.5);
    LayerSpec::Linear(Linear {
        name: name.into(),
        input,
        output,
        bias: true,
        order: WeightOrder::OutIn,
        init,
    })
}

/// A convolution with bias.
fn conv(name: &str, input: usize, output: usize, kernel: usize, stride: usize, padding: usize) -> LayerSpec {
    let init = Init::Normal(0.4);
    LayerSpec::Conv(Conv {
        name: name.into(),
        input,
        output,
        kernel,
        stride,
        padding: padding.into(),
        bias: true,
        init,
    })
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
struct Batch {
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

fn check(input_shape: Input, layers: Vec<LayerSpec>, classes: usize) {
    check_within(input_shape, layers, classes, None);
}

/// The same where tokens have these positions in their documents, in every sample.
fn check_within(input_shape: Input, layers: Vec<LayerSpec>, classes: usize, positions: Option<&[u32]>) {
    let (built, mut weights, batch, exact) = check_bits(input_shape, layers, classes, positions);
    for id in weights.ids() {
        for trial in 0..3 {
            let k = key(9 + trial, id.0 as u64);
            let gradient = &exact[id.0];
            let direction: Vec<f32> = (0..gradient.len() as u64).map(|i| normal(k, i) as f32).collect();
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
fn check_bits(
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
        let noise: Vec<f32> =
            (0..weights.get(id).len() as u64).map(|i| normal(key(8, id.0 as u64), i) as f32).collect();
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
    for again in [RecomputeMode::Attention, RecomputeMode::Block] {
        let built = Model::build(&split, again);
        assert_eq!(gradients(&built, &weights, &batch), exact, "{} recomputed", again.name());
    }
    (built, weights, batch, exact)
}

const TEXT: Input = Input::Tokens { seq: 6, vocab: 11 };
const IMAGE: Input = Input::Image { height: 7, width: 6, channels: 2 };

/// An embedding of width 8, the layers, and a head of 11 logits.
fn text(layers: Vec<LayerSpec>, width: usize) -> Vec<LayerSpec> {
    let embedding = LayerSpec::Embedding(Embedding {
        name: "embedding".into(),
        vocab: 11,
        first: 0,
        width: 8,
        init: Init::Normal(1.0),
    });
    [embedding].into_iter().chain(layers).chain([linear("head", width, 11)]).collect()
}

/// A first convolution to 4 channels, the layers, and a head of 3 classes behind a global mean.
fn image(layers: Vec<LayerSpec>, channels: usize) -> Vec<LayerSpec> {
    [conv("stem", 2, 4, 3, 1, 1)]
        .into_iter()
        .chain(layers)
        .chain([LayerSpec::GlobalAvgPool, linear("head", channels, 3)])
        .collect()
}

#[test]
fn embedding_and_positions() {
    let position = LayerSpec::PositionEmbedding(PositionEmbedding {
        name: "position".into(),
        context: 9,
        first: 0,
        width: 8,
        init: Init::Normal(1.0),
    });
    check(TEXT, text(vec![position], 8), 11);
}

#[test]
fn linear_in_both_orders_and_every_activation() {
    for kind in [Activation::Relu, Activation::Gelu, Activation::Silu, Activation::GeluErf, Activation::Tanh]
    {
        let other = LayerSpec::Linear(Linear {
            name: "conv1d".into(),
            input: 8,
            output: 10,
            bias: true,
            order: WeightOrder::InOut,
            init: Init::Normal(0.4),
        });
        // The first activation is fused into its linear layer, the second stands alone behind a norm.
        let norm = LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width: 10, eps: 1e-5, bias: true });
        let layers = vec![other, LayerSpec::Activation(kind), norm, LayerSpec::Activation(kind)];
        check(TEXT, text(layers, 10), 11);
    }
}

/// Linear layers behind a norm or an activation, whose inputs are made again: after a norm, between two
/// linear layers, behind an activation that stands alone, and several in a row.
#[test]
fn chains_of_linear_layers() {
    let norms = [
        LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width: 8, eps: 1e-5, bias: true }),
        LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 1e-5 }),
    ];
    for norm in norms {
        for kind in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            let middle = |i: usize| [LayerSpec::Activation(kind), linear(&format!("middle{i}"), 8, 8)];
            let branch = [norm.clone(), linear("first", 8, 8)].into_iter().chain(middle(0)).chain(middle(1));
            let branch: Vec<LayerSpec> = branch
                .chain([LayerSpec::Dropout(Dropout { rate: 0.2, counted: None })])
                .chain(middle(2))
                .collect();
            check(TEXT, text(branch.clone(), 8), 11);
            check(TEXT, text(vec![LayerSpec::Residual(Residual { branch, shortcut: vec![] })], 8), 11);
        }
    }
}

/// A model that ends in no linear layer: its last layer's output are the logits, even where that layer keeps them.
#[test]
fn no_head() {
    for last in [
        LayerSpec::Activation(Activation::Relu),
        LayerSpec::RmsNorm(RmsNorm { name: "last".into(), width: 11, eps: 1e-5 }),
    ] {
        let embedding = LayerSpec::Embedding(Embedding {
            name: "embedding".into(),
            vocab: 11,
            first: 0,
            width: 8,
            init: Init::Normal(1.0),
        });
        check(TEXT, vec![embedding, linear("middle", 8, 11), last], 11);
    }
}

#[test]
fn a_tied_head() {
    let layers = vec![
        LayerSpec::Embedding(Embedding {
            name: "wte".into(),
            vocab: 11,
            first: 0,
            width: 8,
            init: Init::Normal(0.5),
        }),
        linear("middle", 8, 8),
        LayerSpec::TiedLinear(TiedLinear { weight: "wte.weight".into(), input: 8, output: 11 }),
    ];
    check(TEXT, layers, 11);
}

/// With an epsilon that counts, and without a shift, alone and before a linear layer that has its input made
/// again.
#[test]
fn norms_with_an_epsilon_and_without_a_shift() {
    let layer = |bias| LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width: 8, eps: 0.5, bias });
    let rms = LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 0.5 });
    for norm in [layer(true), layer(false), rms] {
        check(TEXT, text(vec![norm.clone(), LayerSpec::Activation(Activation::Gelu)], 8), 11);
        check(TEXT, text(vec![norm, linear("behind", 8, 8)], 8), 11);
    }
    let norm =
        LayerSpec::BatchNorm(BatchNorm { name: "bn".into(), channels: 4, scale: 1.0, group: 0, eps: 0.5 });
    check(IMAGE, image(vec![norm, LayerSpec::Activation(Activation::Gelu)], 4), 3);
}

#[test]
fn norms_of_rows() {
    check(
        TEXT,
        text(
            vec![LayerSpec::LayerNorm(LayerNorm { name: "norm".into(), width: 8, eps: 1e-5, bias: true })],
            8,
        ),
        11,
    );
    check(TEXT, text(vec![LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 1e-5 })], 8), 11);
}

#[test]
fn attention() {
    let layers = vec![linear("qkv", 8, 24), LayerSpec::Attention(Attention::new(2, 2, 8))];
    check(TEXT, text(layers, 8), 11);
}

/// Heads of keys and values that two heads of queries share, and one that all share.
#[test]
fn attention_with_grouped_queries() {
    for (kv_heads, columns) in [(2, 8 + 2 * 4), (1, 8 + 2 * 2)] {
        let attention = LayerSpec::Attention(Attention::new(4, kv_heads, 8));
        check(TEXT, text(vec![linear("qkv", 8, columns), attention], 8), 11);
    }
}

/// Heads that are turned by their positions, behind norms and without; of keys and values that several share too.
#[test]
fn attention_with_rotary_positions() {
    let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 16 };
    for (scaling, normed) in [(None, false), (Some(scaling), false), (None, true), (Some(scaling), true)] {
        for (kv_heads, columns) in [(2, 24), (1, 16)] {
            let attention = Attention {
                rotary: Some(Rotary { base: 10.0, scaling }),
                qk_norm: normed.then(|| QkNorm { name: "heads".into(), eps: 1e-2 }),
                ..Attention::new(2, kv_heads, 8)
            };
            check(TEXT, text(vec![linear("qkv", 8, columns), LayerSpec::Attention(attention)], 8), 11);
        }
    }
    let attention =
        Attention { qk_norm: Some(QkNorm { name: "heads".into(), eps: 1e-2 }), ..Attention::new(4, 2, 8) };
    check(TEXT, text(vec![linear("qkv", 8, 16), LayerSpec::Attention(attention)], 8), 11);
}

/// Positions that begin anew, as learnt vectors and as what attention sees; rotated, and behind norms.
#[test]
fn documents_in_a_sequence() {
    let positions = Some(&[0, 1, 0, 0, 1, 2][..]);
    let table = LayerSpec::PositionEmbedding(PositionEmbedding {
        name: "position".into(),
        context: 6,
        first: 0,
        width: 8,
        init: Init::Normal(1.0),
    });
    let plain = LayerSpec::Attention(Attention::new(4, 2, 8));
    let layers = vec![table, linear("qkv", 8, 16), plain];
    check_within(TEXT, text(layers, 8), 11, positions);
    let turned = Attention {
        rotary: Some(Rotary { base: 10.0, scaling: None }),
        qk_norm: Some(QkNorm { name: "heads".into(), eps: 1e-2 }),
        ..Attention::new(4, 2, 8)
    };
    check_within(TEXT, text(vec![linear("qkv", 8, 16), LayerSpec::Attention(turned)], 8), 11, positions);
}

/// Linear layers that run as one, side by side and as gated units: behind a norm, which makes their input again,
/// and behind a layer that does not; before an attention, a linear layer, an activation, and others like
/// themselves; with biases and without.
#[test]
fn joint_projections() {
    let plain = |name: &str, input, output| {
        let (name, order, init) = (name.to_owned(), WeightOrder::InOut, Init::Normal(0.5));
        LayerSpec::Linear(Linear { name, input, output, bias: false, order, init })
    };
    let norm = || LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 1e-5 });
    let concat = |widths: [usize; 3]| {
        let [q, k, v] = widths;
        let branches = vec![vec![linear("q", 8, q)], vec![plain("k", 8, k)], vec![linear("v", 8, v)]];
        LayerSpec::Branches(Branches { join: BranchJoin::Concat, branches })
    };
    let gated = |input, kind| {
        let gate = vec![plain("gate", input, 6), LayerSpec::Activation(kind)];
        let branches = vec![gate, vec![linear("up", input, 6)]];
        LayerSpec::Branches(Branches { join: BranchJoin::Product, branches })
    };
    let (gelu, silu) = (LayerSpec::Activation(Activation::Gelu), Activation::Silu);
    let attention =
        LayerSpec::Attention(Attention { rotary: Some(Rotary::new(10.0)), ..Attention::new(2, 1, 8) });
    for before in [norm(), linear("before", 8, 8), gelu.clone()] {
        let behind = |layers: Vec<LayerSpec>| [before.clone()].into_iter().chain(layers).collect::<Vec<_>>();
        check(TEXT, text(behind(vec![concat([8, 4, 4]), attention.clone(), plain("o", 8, 8)]), 8), 11);
        check(TEXT, text(behind(vec![concat([3, 5, 2]), gelu.clone(), linear("down", 10, 8)]), 8), 11);
        check(TEXT, text(behind(vec![gated(8, silu), linear("down", 6, 8)]), 8), 11);
        check(TEXT, text(behind(vec![gated(8, Activation::Gelu)]), 6), 11);
    }
    let branch = vec![norm(), gated(8, silu), linear("down", 6, 8)];
    check(TEXT, text(vec![LayerSpec::Residual(Residual { branch, shortcut: vec![] })], 8), 11);
    check(TEXT, text(vec![norm(), concat([2, 3, 4]), gated(9, silu), plain("down", 6, 8)], 8), 11);
}

/// Two and three ways, empty ones among them, that are added, multiplied and put side by side; of sequences
/// and of images.
#[test]
fn branches_of_every_join() {
    for join in [BranchJoin::Sum, BranchJoin::Product, BranchJoin::Concat] {
        let ways = |count: usize| match count {
            2 => vec![
                vec![linear("gate", 8, 8), LayerSpec::Activation(Activation::Silu)],
                vec![linear("up", 8, 8)],
            ],
            _ => vec![
                vec![linear("a", 8, 8)],
                vec![],
                vec![LayerSpec::Dropout(Dropout { rate: 0.2, counted: None }), linear("b", 8, 8)],
            ],
        };
        for count in [2, 3] {
            let width = if join == BranchJoin::Concat { 8 * count } else { 8 };
            let branches = LayerSpec::Branches(Branches { join, branches: ways(count) });
            let norm = LayerSpec::RmsNorm(RmsNorm { name: "norm".into(), width: 8, eps: 1e-5 });
            check(TEXT, text(vec![norm, branches], width), 11);
        }
        let ways = vec![
            vec![conv("a", 4, 4, 3, 1, 1), LayerSpec::Activation(Activation::Relu)],
            vec![conv("b", 4, 4, 1, 1, 0)],
        ];
        let width = if join == BranchJoin::Concat { 8 } else { 4 };
        check(IMAGE, image(vec![LayerSpec::Branches(Branches { join, branches: ways })], width), 3);
    }
}

#[test]
fn dropout() {
    check(
        TEXT,
        text(vec![LayerSpec::Dropout(Dropout { rate: 0.4, counted: None }), linear("middle", 8, 8)], 8),
        11,
    );
}

#[test]
fn residual_with_and_without_a_shortcut() {
    let branch = || vec![LayerSpec::Activation(Activation::Silu), linear("branch", 8, 8)];
    check(TEXT, text(vec![LayerSpec::Residual(Residual { branch: branch(), shortcut: vec![] })], 8), 11);
    let shortcut = vec![linear("shortcut", 8, 8)];
    check(TEXT, text(vec![LayerSpec::Residual(Residual { branch: branch(), shortcut })], 8), 11);
}

#[test]
fn convolutions_of_all_kinds() {
    for (kernel, stride, padding) in
        [(3, 1, 1), (3, 2, 1), (1, 1, 0), (1, 2, 0), (5, 1, 0), (3, 2, 0), (2, 1, 1)]
    {
        check(IMAGE, image(vec![conv("conv", 4, 5, kernel, stride, padding)], 5), 3);
    }
}

#[test]
fn pools() {
    for pool in [
        LayerSpec::MaxPool(MaxPool { kernel: 2, stride: 2, padding: 0.into() }),
        LayerSpec::MaxPool(MaxPool { kernel: 3, stride: 2, padding: 1.into() }),
        LayerSpec::AvgPool(AvgPool { kernel: 2, stride: 2 }),
        LayerSpec::AvgPool(AvgPool { kernel: 3, stride: 1 }),
        LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size: 3 }),
    ] {
        check(IMAGE, image(vec![pool], 4), 3);
    }
}

/// Over the batch, and over groups of one sample each; behind it a bend, or a sample's mean would not depend
/// on it.
#[test]
fn batch_norm() {
    for group in [0, 1] {
        let norm =
            LayerSpec::BatchNorm(BatchNorm { name: "bn".into(), channels: 4, scale: 1.0, group, eps: 1e-5 });
        check(IMAGE, image(vec![norm, LayerSpec::Activation(Activation::Gelu)], 4), 3);
    }
}

/// ReLU behind a norm, and a sum between them, as residual networks have them, are parts of the norm: they
/// give what they give one by one. Norms put so much near the kink of ReLU that differences say little.
#[test]
fn batch_norm_with_sum_and_relu() {
    let norm = |name: &str, group| {
        LayerSpec::BatchNorm(BatchNorm { name: name.into(), channels: 4, scale: 1.0, group, eps: 1e-5 })
    };
    let relu = LayerSpec::Activation(Activation::Relu);
    for group in [0, 1] {
        check_bits(IMAGE, image(vec![norm("bn", group), relu.clone()], 4), 3, None);
        let shortcuts = [vec![], vec![conv("short", 4, 4, 1, 1, 0), norm("bn3", group)]];
        for shortcut in shortcuts {
            let branch = vec![
                conv("a", 4, 4, 3, 1, 1),
                norm("bn", group),
                relu.clone(),
                conv("b", 4, 4, 1, 1, 0),
                norm("bn2", group),
            ];
            let residual = LayerSpec::Residual(Residual { branch, shortcut });
            check_bits(IMAGE, image(vec![residual.clone()], 4), 3, None);
            check_bits(IMAGE, image(vec![residual, relu.clone()], 4), 3, None);
        }
    }
}

/// ReLU behind a convolution, and one that changes places with a max pool: what they give one by one.
#[test]
fn convolution_with_relu() {
    let (relu, pool) = (
        LayerSpec::Activation(Activation::Relu),
        LayerSpec::MaxPool(MaxPool { kernel: 3, stride: 2, padding: 1.into() }),
    );
    check(IMAGE, image(vec![conv("a", 4, 4, 3, 1, 1), relu.clone()], 4), 3);
    check(IMAGE, image(vec![relu, pool, conv("a", 4, 4, 3, 1, 1)], 4), 3);
}

#[test]
fn flatten_and_added_channels() {
    // So many inputs with the usual weights would make logits so large that the loss is all but flat.
    let mut head = linear("head", 6 * 7 * 6, 3);
    if let LayerSpec::Linear(Linear { init, .. }) = &mut head {
        *init = Init::Normal(0.05);
    }
    let layers = vec![
        conv("stem", 2, 4, 3, 1, 1),
        LayerSpec::PadChannels(PadChannels { input: 4, output: 6 }),
        LayerSpec::Flatten,
        head,
    ];
    check(IMAGE, layers, 3);
}

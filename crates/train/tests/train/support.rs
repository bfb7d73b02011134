//! Small pieces that several tests use.

use espalier_plan::spec::{Block, Init, Input, Layer, Model, WeightOrder};

/// A model of the given layers, all in one block, or one block a layer.
pub fn model(input: Input, layers: Vec<Layer>, classes: usize, block_a_layer: bool) -> Model {
    let blocks = match block_a_layer {
        false => vec![Block { name: "all".into(), layers }],
        true => layers
            .into_iter()
            .enumerate()
            .map(|(i, layer)| Block { name: format!("block{i}"), layers: vec![layer] })
            .collect(),
    };
    let model = Model { name: "test".into(), input, blocks, classes };
    model.check().expect("a test's model has shapes that fit");
    model
}

/// A linear layer in PyTorch's order.
pub fn linear(name: &str, input: usize, output: usize) -> Layer {
    let init = Init::Normal(0.5);
    Layer::Linear { name: name.into(), input, output, bias: true, order: WeightOrder::OutIn, init }
}

/// A convolution with bias.
pub fn conv(name: &str, input: usize, output: usize, kernel: usize, stride: usize, padding: usize) -> Layer {
    let init = Init::Normal(0.4);
    Layer::Conv { name: name.into(), input, output, kernel, stride, padding, bias: true, init }
}

//! Layers of images.

use espalier_plan::spec::{
    Activation, AdaptiveAvgPool, AvgPool, BatchNorm, Init, Input, LayerSpec, Linear, MaxPool, PadChannels,
    Residual,
};

use crate::differences::*;

const IMAGE: Input = Input::Image { height: 7, width: 6, channels: 2 };

/// A first convolution to 4 channels, the layers, and a head of 3 classes behind a global mean.
fn image(layers: Vec<LayerSpec>, channels: usize) -> Vec<LayerSpec> {
    [conv("stem", 2, 4, 3, 1, 1)]
        .into_iter()
        .chain(layers)
        .chain([LayerSpec::GlobalAvgPool, linear("head", channels, 3)])
        .collect()
}

pub fn check_image(layers: Vec<LayerSpec>, channels: usize) {
    check(IMAGE, image(layers, channels), 3);
}

pub fn batch_norm(name: &str, group: usize, eps: f32) -> LayerSpec {
    LayerSpec::BatchNorm(BatchNorm { name: name.into(), channels: 4, scale: 1.0, group, eps })
}

#[test]
fn convolutions_of_all_kinds() {
    for (kernel, stride, padding) in
        [(3, 1, 1), (3, 2, 1), (1, 1, 0), (1, 2, 0), (5, 1, 0), (3, 2, 0), (2, 1, 1)]
    {
        check_image(vec![conv("conv", 4, 5, kernel, stride, padding)], 5);
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
        check_image(vec![pool], 4);
    }
}

/// Over the batch, and over groups of one sample each; behind it a bend, or a sample's mean would not depend
/// on it.
#[test]
fn batch_norms() {
    for group in [0, 1] {
        check_image(vec![batch_norm("bn", group, 1e-5), LayerSpec::Activation(Activation::Gelu)], 4);
    }
}

/// ReLU behind a norm, and a sum between them, as residual networks have them, are parts of the norm: they
/// give what they give one by one. Norms put so much near the kink of ReLU that differences say little.
#[test]
fn batch_norm_with_sum_and_relu() {
    let norm = |name: &str, group| batch_norm(name, group, 1e-5);
    let relu = LayerSpec::Activation(Activation::Relu);
    for group in [0, 1] {
        check_bits(IMAGE, image(vec![norm("bn", group), relu.clone()], 4), 3, None);
        let pool = LayerSpec::MaxPool(MaxPool { kernel: 3, stride: 2, padding: 1.into() });
        check_bits(IMAGE, image(vec![norm("bn", group), pool, relu.clone()], 4), 3, None);
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

/// ReLU behind a convolution, and behind a max pool: parts of both, which give what they give one by one.
#[test]
fn convolution_and_pool_with_relu() {
    let (relu, pool) = (
        LayerSpec::Activation(Activation::Relu),
        LayerSpec::MaxPool(MaxPool { kernel: 3, stride: 2, padding: 1.into() }),
    );
    let conv = || conv("a", 4, 4, 3, 1, 1);
    check_image(vec![conv(), relu.clone()], 4);
    check_image(vec![pool, relu, conv()], 4);
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

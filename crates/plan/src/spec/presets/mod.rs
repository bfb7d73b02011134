//! The built-in models. Each constructor returns data; [`ModelSpec::check`](super::ModelSpec::check) says
//! whether its sizes fit.
//!
//! Where a convolutional model ends in a flatten, the width of the next linear layer follows from the image. An
//! image too small for the model gives a width of 0 here, and the check names the layer whose window does not fit.

mod alexnet;
mod cnn;
mod gpt;
mod llama;
mod resnet;
mod vgg;

pub use alexnet::alexnet;
pub use cnn::{mlp, resnet8, simple_cnn};
pub use gpt::{Gpt, NormKind, gpt};
pub use llama::{Llama, llama};
pub use resnet::{ResNet, resnet};
pub use vgg::{Vgg, vgg};

use serde::Serialize;

use super::{Activation, BatchNorm, BlockSpec, Conv, Init, Input, LayerSpec, Linear, NORM_EPS, WeightOrder};
use crate::tiles::WindowPadding;

/// Rows, columns and colours of an image.
pub type ImageSize = (usize, usize, usize);

/// Which images a convolutional model of the ImageNet era is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum StemForm {
    /// As published, for 224 x 224.
    #[serde(rename = "imagenet")]
    ImageNet,
    /// The usual form for CIFAR: the stem keeps the resolution, the head is one linear layer.
    #[serde(rename = "32x32")]
    Small,
}

impl StemForm {
    /// The form that suits an image: the small one up to 64 pixels a side.
    pub(crate) fn for_image((height, width, _): ImageSize) -> StemForm {
        if height.max(width) <= 64 { StemForm::Small } else { StemForm::ImageNet }
    }
}

fn input((height, width, channels): ImageSize) -> Input {
    Input::Image { height, width, channels }
}

fn block(name: impl Into<String>, layers: Vec<LayerSpec>) -> BlockSpec {
    BlockSpec { name: name.into(), layers }
}

const RELU: LayerSpec = LayerSpec::Activation(Activation::Relu);

fn linear(name: impl Into<String>, input: usize, output: usize, init: Init) -> LayerSpec {
    let (name, order) = (name.into(), WeightOrder::OutIn);
    LayerSpec::Linear(Linear { name, input, output, bias: true, order, init })
}

/// With a bias, for a ReLU behind it.
fn conv(
    name: impl Into<String>,
    input: usize,
    output: usize,
    kernel: usize,
    stride: usize,
    padding: impl Into<WindowPadding>,
) -> LayerSpec {
    let init = Init::fan_in(2.0, input.saturating_mul(kernel * kernel));
    let (name, padding) = (name.into(), padding.into());
    LayerSpec::Conv(Conv { name, input, output, kernel, stride, padding, bias: true, init })
}

fn batch_norm(name: impl Into<String>, channels: usize) -> LayerSpec {
    LayerSpec::BatchNorm(BatchNorm { name: name.into(), channels, scale: 1.0, group: 0, eps: NORM_EPS })
}

/// The side of an image after windows of `kernel` at `stride`; 0 where none fits.
fn windows(side: usize, kernel: usize, stride: usize) -> usize {
    side.checked_sub(kernel).map_or(0, |span| span / stride + 1)
}

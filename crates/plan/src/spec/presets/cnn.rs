//! The small models: a multi-layer perceptron, and the two networks of the data-parallelism study (Lee et al.
//! 2021).
//!
//! All start from a truncated normal over the fan-in, with a gain of 2 before a ReLU
//! ([`ModelSpec::start_by_fan_in`] leaves that out, as the study's own program does), and with biases at 0.

use super::super::{AvgPool, Init, LayerSpec, MaxPool, ModelSpec, PadChannels, Residual};
use super::{ImageSize, RELU, block, conv, input, linear, windows};
use crate::tiles::WindowPadding;

/// Linear layers `fc1`, `fc2`, ... with a ReLU between each two; the image is flattened first. A block per linear.
pub fn mlp(image: ImageSize, hidden: &[usize], classes: usize) -> ModelSpec {
    let mut width = image.0.saturating_mul(image.1).saturating_mul(image.2);
    let mut blocks = Vec::new();
    for (i, &output) in hidden.iter().chain([&classes]).enumerate() {
        let name = format!("fc{}", i + 1);
        let last = i == hidden.len();
        let mut layers = if i == 0 { vec![LayerSpec::Flatten] } else { Vec::new() };
        layers.push(linear(&name, width, output, Init::fan_in(if last { 1.0 } else { 2.0 }, width)));
        if !last {
            layers.push(RELU);
        }
        blocks.push(block(name, layers));
        width = output;
    }
    ModelSpec { name: "mlp".into(), input: input(image), blocks, classes }
}

/// Two valid 5 x 5 convolutions of 32 and 64 channels, each with a max pool of 2 and ReLU, then one linear
/// layer. 62,346 parameters at 28 x 28 x 1 and 10 classes. ReLU comes after the pool, where a quarter of the
/// elements is left: the largest of a window stays the largest, so all numbers are those of ReLU before it,
/// forward and backward.
pub fn simple_cnn(image: ImageSize, classes: usize) -> ModelSpec {
    let (height, width, channels) = image;
    let stage = |name: &str, input, output| {
        let pool = LayerSpec::MaxPool(MaxPool { kernel: 2, stride: 2, padding: 0.into() });
        block(name, vec![conv(name, input, output, 5, 1, 0), pool, RELU])
    };
    let side = |n| windows(windows(windows(windows(n, 5, 1), 2, 2), 5, 1), 2, 2);
    let flat = side(height).saturating_mul(side(width)).saturating_mul(64);
    let head = vec![LayerSpec::Flatten, linear("fc", flat, classes, Init::fan_in(1.0, flat))];
    let blocks = vec![stage("conv1", channels, 32), stage("conv2", 32, 64), block("head", head)];
    ModelSpec { name: "simple-cnn".into(), input: input(image), blocks, classes }
}

/// A pre-activation residual network without batch norm: widths 16, 32, 64, one block each, the last two at
/// stride 2 with a shortcut of average pool and zero channels. 75,050 parameters at 3 colours and 10 classes.
///
/// As the program of Lee et al. has it: the shortcut of a block that widens pools relu(x), which is what its
/// branch reads too, and convolutions pad as TensorFlow's "same", at stride 2 an even image by nothing before
/// and one pixel behind.
pub fn resnet8(image: ImageSize, classes: usize) -> ModelSpec {
    let (height, width, colours) = image;
    let (mut size, mut input_channels) = ([height, width], 16);
    let same = |size: [usize; 2], stride| WindowPadding::same(size, 3, stride);
    let mut blocks = vec![block("stem", vec![conv("conv", colours, 16, 3, 1, same(size, 1))])];
    for (i, output) in [16, 32, 64].into_iter().enumerate() {
        let name = format!("block{}", i + 1);
        let stride = if output == input_channels { 1 } else { 2 };
        let halved = size.map(|n| n.div_ceil(stride));
        let mut branch = vec![
            conv(format!("{name}.conv1"), input_channels, output, 3, stride, same(size, stride)),
            RELU,
            conv(format!("{name}.conv2"), output, output, 3, 1, same(halved, 1)),
        ];
        let layers = if stride == 1 {
            branch.insert(0, RELU);
            vec![LayerSpec::Residual(Residual { branch, shortcut: Vec::new() })]
        } else {
            let shortcut = vec![
                LayerSpec::AvgPool(AvgPool { kernel: 2, stride: 2 }),
                LayerSpec::PadChannels(PadChannels { input: input_channels, output }),
            ];
            vec![RELU, LayerSpec::Residual(Residual { branch, shortcut })]
        };
        blocks.push(block(name, layers));
        (size, input_channels) = (halved, output);
    }
    let head = vec![RELU, LayerSpec::GlobalAvgPool, linear("fc", 64, classes, Init::fan_in(1.0, 64))];
    blocks.push(block("head", head));
    ModelSpec { name: "resnet8".into(), input: input(image), blocks, classes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mlp_flattens_once_and_has_a_block_per_linear() {
        let model = mlp((28, 28, 1), &[300, 100], 10);
        model.check().unwrap();
        let names: Vec<_> = model.blocks.iter().map(|b| b.name.as_str()).collect();
        assert_eq!(names, ["fc1", "fc2", "fc3"]);
        assert_eq!(model.parameter_count(), 266_610); // LeNet-300-100
        mlp((28, 28, 1), &[], 10).check().unwrap();
    }

    #[test]
    fn an_image_too_small_names_the_layer() {
        let error = simple_cnn((10, 10, 1), 10).check().unwrap_err();
        insta::assert_snapshot!(error, @"layer 3 (conv `conv2`): a window of 5 x 5 is larger than an image of 3 x 3 x 32");
        let odd = resnet8((15, 15, 3), 10).check().unwrap_err();
        insta::assert_snapshot!(odd, @"layer 3 (residual): its sides must have one shape: the branch gives an image of 8 x 8 x 32, the shortcut an image of 7 x 7 x 32");
    }
}

//! Residual networks (He et al. 2015) with torchvision's names and sizes: stride 2 in the 3 x 3 convolution of a
//! bottleneck, no biases in convolutions.
//!
//! Convolutions start from He's normal over the fan-out, as torchvision's; the last linear layer from a normal of
//! 0.01 (Goyal et al. 2017). The last norm of a branch starts at 1, not at 0 as Goyal et al. have it: with 0 every
//! gradient inside the branches is 0 at initialisation, and a method that scores weights there, such as SNIP,
//! would prune all of them.

use super::super::{Conv, Init, LayerSpec, MaxPool, ModelSpec, Residual};
use super::{ImageSize, RELU, StemForm, batch_norm, block, input, linear};

/// The residual networks of torchvision that are built in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResNet {
    R18,
    R34,
    R50,
    R101,
    R152,
    /// wide-resnet-50-2: the inner convolutions of every bottleneck are twice as wide.
    Wide50,
    /// wide-resnet-101-2, likewise.
    Wide101,
}

impl ResNet {
    pub const ALL: [ResNet; 7] =
        [ResNet::R18, ResNet::R34, ResNet::R50, ResNet::R101, ResNet::R152, ResNet::Wide50, ResNet::Wide101];

    /// As in a run file.
    pub fn name(self) -> &'static str {
        match self {
            ResNet::R18 => "resnet-18",
            ResNet::R34 => "resnet-34",
            ResNet::R50 => "resnet-50",
            ResNet::R101 => "resnet-101",
            ResNet::R152 => "resnet-152",
            ResNet::Wide50 => "wide-resnet-50-2",
            ResNet::Wide101 => "wide-resnet-101-2",
        }
    }

    /// Residual blocks in each of the four stages.
    fn depths(self) -> [usize; 4] {
        match self {
            ResNet::R18 => [2, 2, 2, 2],
            ResNet::R34 | ResNet::R50 | ResNet::Wide50 => [3, 4, 6, 3],
            ResNet::R152 => [3, 8, 36, 3],
            ResNet::R101 | ResNet::Wide101 => [3, 4, 23, 3],
        }
    }

    fn bottleneck(self) -> bool {
        !matches!(self, ResNet::R18 | ResNet::R34)
    }

    fn is_wide(self) -> bool {
        matches!(self, ResNet::Wide50 | ResNet::Wide101)
    }
}

/// Builds one. Blocks: `stem`, `layer1.0` ..., `head`.
pub fn resnet(net: ResNet, image: ImageSize, classes: usize, form: StemForm) -> ModelSpec {
    let mut stem = match form {
        StemForm::ImageNet => conv_norm("conv1", "bn1", image.2, 64, 7, 2),
        StemForm::Small => conv_norm("conv1", "bn1", image.2, 64, 3, 1),
    };
    if form == StemForm::ImageNet {
        // Before ReLU, which is the same function, and then a part of the pool.
        stem.push(LayerSpec::MaxPool(MaxPool { kernel: 3, stride: 2, padding: 1.into() }));
    }
    stem.push(RELU);
    let mut blocks = vec![block("stem", stem)];
    let mut channels = 64;
    for (stage, depth) in net.depths().into_iter().enumerate() {
        let planes = 64 << stage;
        for i in 0..depth {
            let name = format!("layer{}.{i}", stage + 1);
            let stride = if i == 0 && stage > 0 { 2 } else { 1 };
            let output = if net.bottleneck() { 4 * planes } else { planes };
            let branch = branch(net, &name, channels, planes, output, stride);
            let shortcut = if stride == 1 && channels == output {
                Vec::new()
            } else {
                let [conv, norm] = ["downsample.0", "downsample.1"].map(|part| format!("{name}.{part}"));
                conv_norm(&conv, &norm, channels, output, 1, stride)
            };
            blocks.push(block(name, vec![LayerSpec::Residual(Residual { branch, shortcut }), RELU]));
            channels = output;
        }
    }
    let head = vec![LayerSpec::GlobalAvgPool, linear("fc", channels, classes, Init::Normal(0.01))];
    blocks.push(block("head", head));
    ModelSpec { name: net.name().into(), input: input(image), blocks, classes }
}

fn branch(
    net: ResNet,
    name: &str,
    channels: usize,
    planes: usize,
    output: usize,
    stride: usize,
) -> Vec<LayerSpec> {
    let inner = if net.is_wide() { 2 * planes } else { planes };
    // (input, output, kernel, stride) of each convolution.
    let convs = if net.bottleneck() {
        vec![(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, output, 1, 1)]
    } else {
        vec![(channels, planes, 3, stride), (planes, output, 3, 1)]
    };
    let mut layers = Vec::new();
    for (i, (input, output, kernel, stride)) in convs.into_iter().enumerate() {
        if i > 0 {
            layers.push(RELU);
        }
        let [conv, norm] = ["conv", "bn"].map(|part| format!("{name}.{part}{}", i + 1));
        layers.extend(conv_norm(&conv, &norm, input, output, kernel, stride));
    }
    layers
}

/// A convolution without bias that keeps the image's size at stride 1, and its norm.
fn conv_norm(
    conv: &str,
    norm: &str,
    input: usize,
    output: usize,
    kernel: usize,
    stride: usize,
) -> Vec<LayerSpec> {
    let init = Init::Normal((2.0 / (output * kernel * kernel) as f32).sqrt());
    let (name, padding) = (conv.into(), (kernel / 2).into());
    let conv = Conv { name, input, output, kernel, stride, padding, bias: false, init };
    vec![LayerSpec::Conv(conv), batch_norm(norm, output)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_torchvisions() {
        let names: Vec<_> = resnet(ResNet::R50, (224, 224, 3), 1000, StemForm::ImageNet)
            .parameters()
            .into_iter()
            .map(|p| p.name)
            .collect();
        assert_eq!(names[..4], ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight"]);
        for name in ["layer1.0.bn3.bias", "layer1.0.downsample.0.weight", "layer4.2.conv3.weight", "fc.bias"]
        {
            assert!(names.iter().any(|n| n == name), "{name}");
        }
        assert!(!names.iter().any(|n| n == "layer1.1.downsample.0.weight"));
    }

    #[test]
    fn the_small_form_ends_at_four_by_four() {
        for net in ResNet::ALL {
            let model = resnet(net, (32, 32, 3), 10, StemForm::Small);
            model.check().unwrap();
            let mut before_head = None;
            model
                .for_each_layer(|_, layer, from, _| {
                    if matches!(layer, LayerSpec::GlobalAvgPool) {
                        before_head = Some(from.rows());
                    }
                })
                .unwrap();
            assert_eq!(before_head, Some(16), "{}", net.name());
        }
    }
}

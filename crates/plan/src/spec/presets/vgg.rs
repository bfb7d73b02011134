//! VGG (Simonyan & Zisserman 2014) with torchvision's names: convolutions are numbered among all layers of
//! `features`, so batch norm changes the numbers.
//!
//! Convolutions start from He's normal over the fan-out with biases at 0, linear layers from a normal of 0.01.

use super::super::{AdaptiveAvgPool, Conv, Dropout, Init, LayerSpec, MaxPool, ModelSpec};
use super::{ImageSize, RELU, StemForm, block, input, linear};

/// The VGGs of torchvision that are built in, by layers with weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Vgg {
    V11,
    V13,
    V16,
    V19,
}

impl Vgg {
    pub const ALL: [Vgg; 4] = [Vgg::V11, Vgg::V13, Vgg::V16, Vgg::V19];

    /// As in a run file.
    pub fn name(self) -> &'static str {
        match self {
            Vgg::V11 => "vgg-11",
            Vgg::V13 => "vgg-13",
            Vgg::V16 => "vgg-16",
            Vgg::V19 => "vgg-19",
        }
    }

    /// Convolutions in each of the five groups.
    fn depths(self) -> [usize; 5] {
        match self {
            Vgg::V11 => [1, 1, 2, 2, 2],
            Vgg::V13 => [2, 2, 2, 2, 2],
            Vgg::V16 => [2, 2, 3, 3, 3],
            Vgg::V19 => [2, 2, 4, 4, 4],
        }
    }
}

/// Builds one. A block per group of convolutions, named for its first (`features.0`), and `head`.
pub fn vgg(net: Vgg, image: ImageSize, classes: usize, form: StemForm, batch_norm: bool) -> ModelSpec {
    let (mut blocks, mut channels, mut number) = (Vec::new(), image.2, 0);
    for (convs, output) in net.depths().into_iter().zip([64, 128, 256, 512, 512]) {
        let name = format!("features.{number}");
        let mut layers = Vec::new();
        for i in 0..convs {
            layers.push(conv(format!("features.{number}"), channels, output));
            if batch_norm {
                layers.push(super::batch_norm(format!("features.{}", number + 1), output));
            }
            if i + 1 == convs {
                // Before ReLU, which is the same function, and then a part of the pool.
                layers.push(LayerSpec::MaxPool(MaxPool { kernel: 2, stride: 2, padding: 0.into() }));
            }
            layers.push(RELU);
            number += if batch_norm { 3 } else { 2 };
            channels = output;
        }
        number += 1;
        blocks.push(block(name, layers));
    }
    let dense = |name: &str, input, output| linear(name, input, output, Init::Normal(0.01));
    let head = match form {
        StemForm::ImageNet => vec![
            LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size: 7 }),
            LayerSpec::Flatten,
            dense("classifier.0", 512 * 7 * 7, 4096),
            RELU,
            LayerSpec::Dropout(Dropout { rate: 0.5, counted: None }),
            dense("classifier.3", 4096, 4096),
            RELU,
            LayerSpec::Dropout(Dropout { rate: 0.5, counted: None }),
            dense("classifier.6", 4096, classes),
        ],
        // Five pools halve the image five times: 32 x 32 becomes 1 x 1.
        StemForm::Small => {
            let flat = (image.0 / 32).saturating_mul(image.1 / 32).saturating_mul(512);
            vec![LayerSpec::Flatten, dense("classifier", flat, classes)]
        }
    };
    blocks.push(block("head", head));
    let name = format!("{}{}", net.name(), if batch_norm { "-bn" } else { "" });
    ModelSpec { name, input: input(image), blocks, classes }
}

fn conv(name: String, input: usize, output: usize) -> LayerSpec {
    let init = Init::Normal((2.0 / (output * 9) as f32).sqrt());
    LayerSpec::Conv(Conv { name, input, output, kernel: 3, stride: 1, padding: 1.into(), bias: true, init })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_torchvisions() {
        let names = |batch_norm| {
            let model = vgg(Vgg::V16, (224, 224, 3), 1000, StemForm::ImageNet, batch_norm);
            model.parameters().into_iter().map(|p| p.name).collect::<Vec<_>>()
        };
        for name in ["features.0.weight", "features.28.bias", "classifier.3.weight", "classifier.6.bias"] {
            assert!(names(false).iter().any(|n| n == name), "{name}");
        }
        for name in ["features.1.weight", "features.40.bias", "features.41.bias"] {
            assert!(names(true).iter().any(|n| n == name), "{name}");
        }
    }

    #[test]
    fn the_small_form_ends_in_one_linear_of_512() {
        for (net, parameters) in [(Vgg::V11, 9_225_610), (Vgg::V16, 14_719_818), (Vgg::V19, 20_029_514)] {
            let model = vgg(net, (32, 32, 3), 10, StemForm::Small, false);
            model.check().unwrap();
            assert_eq!(model.parameter_count(), parameters);
            vgg(net, (32, 32, 3), 10, StemForm::Small, true).check().unwrap();
        }
    }
}

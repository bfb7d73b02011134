//! AlexNet as torchvision has it (Krizhevsky 2014, one tower), with torchvision's names: layers are numbered
//! among all of `features` and of `classifier`.
//!
//! 96 of each 100 weights are in the three linear layers, and nine tenths of the flops in the convolutions:
//! no other network shows as plainly why one kind of parallelism does not suit all layers.
//!
//! Convolutions start from a truncated normal over the fan-in (the published normal of 0.01 lets activations
//! fade from layer to layer), linear layers from the published normal of 0.01, and biases at 0.

use super::super::{AdaptiveAvgPool, Dropout, Init, LayerSpec, MaxPool, ModelSpec};
use super::{ImageSize, RELU, StemForm, block, conv, input, linear};

/// Builds one. A block per group of convolutions up to a pool, named for its first (`features.0`), and `head`.
pub fn alexnet(image: ImageSize, classes: usize, form: StemForm) -> ModelSpec {
    // The small form's first convolution is padded to an eighth of 32 pixels, and its pools do not overlap.
    let (border, window) = match form {
        StemForm::ImageNet => (2, 3),
        StemForm::Small => (5, 2),
    };
    // Before ReLU, which is the same function, and then a part of the pool.
    let pool = || LayerSpec::MaxPool(MaxPool { kernel: window, stride: 2, padding: 0.into() });
    let mut blocks = vec![
        block("features.0", vec![conv("features.0", image.2, 64, 11, 4, border), pool(), RELU]),
        block("features.3", vec![conv("features.3", 64, 192, 5, 1, 2), pool(), RELU]),
        block(
            "features.6",
            vec![
                conv("features.6", 192, 384, 3, 1, 1),
                RELU,
                conv("features.8", 384, 256, 3, 1, 1),
                RELU,
                conv("features.10", 256, 256, 3, 1, 1),
                pool(),
                RELU,
            ],
        ),
    ];
    let dense = |name: &str, input, output| linear(name, input, output, Init::Normal(0.01));
    let head = match form {
        StemForm::ImageNet => vec![
            LayerSpec::AdaptiveAvgPool(AdaptiveAvgPool { size: 6 }),
            LayerSpec::Flatten,
            LayerSpec::Dropout(Dropout { rate: 0.5, counted: None }),
            dense("classifier.1", 256 * 6 * 6, 4096),
            RELU,
            LayerSpec::Dropout(Dropout { rate: 0.5, counted: None }),
            dense("classifier.4", 4096, 4096),
            RELU,
            dense("classifier.6", 4096, classes),
        ],
        // A stride of 4 and three pools: 32 x 32 becomes 1 x 1.
        StemForm::Small => {
            let side = |n: usize| (n.saturating_sub(1) / 4 + 1) / 8;
            let flat = side(image.0).saturating_mul(side(image.1)).saturating_mul(256);
            vec![LayerSpec::Flatten, dense("classifier", flat, classes)]
        }
    };
    blocks.push(block("head", head));
    ModelSpec { name: "alexnet".into(), input: input(image), blocks, classes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `torchvision.models.alexnet().named_parameters()` lists them, but filters have their inputs last.
    #[test]
    fn names_and_shapes_are_torchvisions() {
        let model = alexnet((224, 224, 3), 1000, StemForm::ImageNet);
        let weights: Vec<_> = model.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        let expected: [(&str, &[usize]); 8] = [
            ("features.0", &[64, 11, 11, 3]),
            ("features.3", &[192, 5, 5, 64]),
            ("features.6", &[384, 3, 3, 192]),
            ("features.8", &[256, 3, 3, 384]),
            ("features.10", &[256, 3, 3, 256]),
            ("classifier.1", &[4096, 9216]),
            ("classifier.4", &[4096, 4096]),
            ("classifier.6", &[1000, 4096]),
        ];
        let both = expected.iter().flat_map(|(name, shape)| {
            [(format!("{name}.weight"), shape.to_vec()), (format!("{name}.bias"), vec![shape[0]])]
        });
        assert_eq!(weights, both.collect::<Vec<_>>());
    }

    #[test]
    fn every_size_that_is_large_enough_fits_its_form() {
        for side in [63, 64, 128, 224, 227, 256] {
            alexnet((side, side, 3), 1000, StemForm::ImageNet).check().unwrap();
        }
        for side in 29..=64 {
            alexnet((side, side, 3), 10, StemForm::Small).check().unwrap();
        }
        let small = alexnet((32, 32, 3), 10, StemForm::Small);
        assert_eq!(small.parameter_count(), 2_472_266);
        let error = alexnet((62, 62, 3), 10, StemForm::ImageNet).check().unwrap_err();
        insta::assert_snapshot!(error, @"layer 11 (max_pool): a window of 3 x 3 is larger than an image of 2 x 2 x 256");
    }
}

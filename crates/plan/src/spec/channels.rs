//! What pruning asks of a model's form: which channels a batch norm scales, and which weight makes the logits.

use super::{Layer, Model};

/// The channels of a convolution whose output goes straight into a batch norm: each has one scale, and with a scale of
/// 0 nothing of it passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaledChannels {
    /// Prefix of the convolution's parameters.
    pub conv: String,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// Prefix of the norm's parameters.
    pub norm: String,
    /// How many.
    pub channels: usize,
}

impl Model {
    /// The channels of all convolutions that a batch norm follows, in the order of execution.
    pub fn scaled_channels(&self) -> Vec<ScaledChannels> {
        let mut found = Vec::new();
        collect(self.blocks.iter().flat_map(|block| &block.layers), &mut found);
        found
    }

    /// The weight of the last linear layer; none where that one is tied to a table.
    pub fn output_weight(&self) -> Option<String> {
        let mut last = None;
        self.for_each(&mut |layer| match layer {
            Layer::Linear { name, .. } => last = Some(format!("{name}.weight")),
            Layer::TiedLinear { .. } => last = None,
            _ => {}
        });
        last
    }
}

fn collect<'a>(layers: impl Iterator<Item = &'a Layer>, found: &mut Vec<ScaledChannels>) {
    let mut before: Option<&Layer> = None;
    for layer in layers {
        match (before, layer) {
            (Some(Layer::Conv { name, bias, output, .. }), Layer::BatchNorm { name: norm, .. }) => {
                found.push(ScaledChannels {
                    conv: name.clone(),
                    bias: *bias,
                    norm: norm.clone(),
                    channels: *output,
                });
            }
            (_, Layer::Residual { branch, shortcut }) => {
                collect(branch.iter(), found);
                collect(shortcut.iter(), found);
            }
            _ => {}
        }
        before = Some(layer);
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::*;

    #[test]
    fn every_convolution_of_a_resnet_has_its_norm() {
        let model = resnet(ResNet::R18, (32, 32, 3), 10, Form::Small);
        let found = model.scaled_channels();
        assert_eq!(found.len(), 20);
        assert_eq!(found.iter().map(|c| c.channels).sum::<usize>(), 4800);
        assert_eq!((found[0].conv.as_str(), found[0].norm.as_str(), found[0].bias), ("conv1", "bn1", false));
        let names: Vec<&str> = found.iter().map(|c| c.conv.as_str()).collect();
        assert!(names.contains(&"layer2.0.downsample.0"), "those of shortcuts too: {names:?}");
        let plain = vgg(Vgg::V16, (32, 32, 3), 10, Form::Small, false);
        assert_eq!(plain.scaled_channels(), []);
        let normed = vgg(Vgg::V16, (32, 32, 3), 10, Form::Small, true).scaled_channels();
        assert!(normed.len() == 13 && normed.iter().all(|c| c.bias));
    }

    #[test]
    fn the_output_weight_is_that_of_the_last_linear_layer() {
        let resnet = resnet(ResNet::R18, (32, 32, 3), 10, Form::Small);
        assert_eq!(resnet.output_weight().as_deref(), Some("fc.weight"));
        assert_eq!(gpt("gpt", &Gpt::default()).output_weight(), None);
        let untied = gpt("gpt", &Gpt { tied: false, ..Gpt::default() });
        assert_eq!(untied.output_weight().as_deref(), Some("lm_head.weight"));
    }
}

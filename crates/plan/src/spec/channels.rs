//! What pruning asks of a model's form: which channels a batch norm scales, and which weight makes the logits.

use super::{BatchNorm, BranchJoin, Conv, LayerSpec, Linear, ModelSpec, PadChannels, WeightOrder};

/// The channels of a convolution whose output goes straight into a batch norm: each has one scale, and with a
/// scale of 0 nothing of it passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaledChannels {
    /// Prefix of the convolution's parameters.
    pub conv: String,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// Prefix of the norm's parameters.
    pub norm: String,
    /// How many there are.
    pub channels: usize,
}

/// A weight that reads channels, and what each of its inputs is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelReader {
    /// The weight's full name.
    pub weight: String,
    /// Its weights lie as `[outer, inputs, inner]`: the middle one is the input that they multiply.
    pub outer: usize,
    /// How many stand behind each other of one input.
    pub inner: usize,
    /// What each input is the sum of.
    pub inputs: Vec<ChannelSource>,
}

/// The channels that an element of an activation is the sum of, each as the index of its [`ScaledChannels`]
/// in the model and its number there. The element is zero where all of them are pruned.
pub type ChannelSource = Vec<(usize, usize)>;

impl ModelSpec {
    /// The channels of all convolutions that a batch norm follows, in the order of execution.
    pub fn scaled_channels(&self) -> Vec<ScaledChannels> {
        self.trace_channels().found
    }

    /// The weights that read channels: what multiplies those that are pruned may go too.
    pub fn channel_readers(&self) -> Vec<ChannelReader> {
        self.trace_channels().readers
    }

    fn trace_channels(&self) -> Tracer {
        let mut tracer = Tracer::default();
        tracer.pass(self.blocks.iter().flat_map(|block| &block.layers), None);
        tracer
    }

    /// The weight of the last linear layer; none where that one is tied to a table.
    pub fn output_weight(&self) -> Option<String> {
        let mut last = None;
        self.for_each(&mut |layer| match layer {
            LayerSpec::Linear(Linear { name, .. }) => last = Some(format!("{name}.weight")),
            LayerSpec::TiedLinear(_) => last = None,
            _ => {}
        });
        last
    }
}

/// Follows channels through a model. All that stands between a channel and its readers makes zeros of zeros:
/// ReLU, GELU, SiLU, pools and dropout.
#[derive(Default)]
struct Tracer {
    found: Vec<ScaledChannels>,
    readers: Vec<ChannelReader>,
}

/// One for each channel; none where something else is in them: the image itself, or what no scale makes zero.
type ChannelSources = Option<Vec<ChannelSource>>;

impl Tracer {
    fn pass<'a>(
        &mut self,
        layers: impl Iterator<Item = &'a LayerSpec>,
        mut now: ChannelSources,
    ) -> ChannelSources {
        let mut before: Option<&LayerSpec> = None;
        for layer in layers {
            now = match layer {
                LayerSpec::Conv(Conv { name, output, kernel, .. }) => {
                    self.read(name, output * kernel * kernel, 1, now);
                    None
                }
                LayerSpec::Linear(Linear { name, input, output, order, .. }) => {
                    // What was flattened has its channels outermost.
                    let spread = |sources: Vec<ChannelSource>| {
                        let each = input / sources.len().max(1);
                        sources.into_iter().flat_map(|source| vec![source; each]).collect()
                    };
                    let (outer, inner) = match order {
                        WeightOrder::OutIn => (*output, 1),
                        WeightOrder::InOut => (1, *output),
                    };
                    self.read(name, outer, inner, now.map(spread));
                    None
                }
                LayerSpec::BatchNorm(BatchNorm { name: norm, .. }) => match before {
                    Some(LayerSpec::Conv(Conv { name, bias, output, .. })) => {
                        let (conv, norm) = (name.clone(), norm.clone());
                        let index = self.found.len();
                        self.found.push(ScaledChannels { conv, bias: *bias, norm, channels: *output });
                        Some((0..*output).map(|channel| vec![(index, channel)]).collect())
                    }
                    // Its shift is added to whatever comes.
                    _ => None,
                },
                LayerSpec::PadChannels(PadChannels { output, .. }) => now.map(|mut sources| {
                    sources.resize(*output, ChannelSource::default());
                    sources
                }),
                _ => match layer.description().branches() {
                    Some(branches) => {
                        let each =
                            branches.all.iter().map(|branch| self.pass(branch.layers.iter(), now.clone()));
                        join_sources(branches.join, each.collect())
                    }
                    None if layer.properties().keeps_zeros => now,
                    None => None,
                },
            };
            before = Some(layer);
        }
        now
    }

    fn read(&mut self, name: &str, outer: usize, inner: usize, sources: ChannelSources) {
        if let Some(inputs) = sources {
            self.readers.push(ChannelReader { weight: format!("{name}.weight"), outer, inner, inputs });
        }
    }
}

/// The channels that joined branches are made of. A product is zero where any of its factors is, which no
/// list of channels says.
fn join_sources(join: BranchJoin, each: Vec<ChannelSources>) -> ChannelSources {
    let each = each.into_iter().collect::<Option<Vec<_>>>()?;
    match join {
        BranchJoin::Product => None,
        BranchJoin::Concat => Some(each.into_iter().flatten().collect()),
        BranchJoin::Sum => {
            let sum = |a: Vec<ChannelSource>, b| a.into_iter().zip(b).map(|(a, b)| [a, b].concat()).collect();
            each.into_iter().reduce(sum)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::*;

    #[test]
    fn every_convolution_of_a_resnet_has_its_norm() {
        let model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
        let found = model.scaled_channels();
        assert_eq!(found.len(), 20);
        assert_eq!(found.iter().map(|c| c.channels).sum::<usize>(), 4800);
        assert_eq!((found[0].conv.as_str(), found[0].norm.as_str(), found[0].bias), ("conv1", "bn1", false));
        let names: Vec<&str> = found.iter().map(|c| c.conv.as_str()).collect();
        assert!(names.contains(&"layer2.0.downsample.0"), "those of shortcuts too: {names:?}");
        let plain = vgg(Vgg::V16, (32, 32, 3), 10, StemForm::Small, false);
        assert_eq!(plain.scaled_channels(), []);
        let normed = vgg(Vgg::V16, (32, 32, 3), 10, StemForm::Small, true).scaled_channels();
        assert!(normed.len() == 13 && normed.iter().all(|c| c.bias));
    }

    #[test]
    fn the_output_weight_is_that_of_the_last_linear_layer() {
        let resnet = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
        assert_eq!(resnet.output_weight().as_deref(), Some("fc.weight"));
        assert_eq!(gpt("gpt", &Gpt::default()).output_weight(), None);
        let untied = gpt("gpt", &Gpt { tied: false, ..Gpt::default() });
        assert_eq!(untied.output_weight().as_deref(), Some("lm_head.weight"));
    }

    /// What reads a channel: the next convolution, or all that a residual sum leads to.
    #[test]
    fn readers_know_the_channels_of_their_inputs() {
        let model = vgg(Vgg::V16, (32, 32, 3), 10, StemForm::Small, true);
        let readers = model.channel_readers();
        // The first convolution reads the image; the first linear layer reads the last convolution's
        // channels, flattened.
        assert_eq!(readers.len(), 13, "{:?}", readers.iter().map(|r| &r.weight).collect::<Vec<_>>());
        let last = readers.last().unwrap();
        let elements =
            |name: &str| model.parameters().iter().find(|p| p.name == name).unwrap().elements() as usize;
        for reader in &readers {
            assert_eq!(
                reader.outer * reader.inputs.len() * reader.inner,
                elements(&reader.weight),
                "{}",
                reader.weight
            );
        }
        let each = last.inputs.len() / 512;
        assert_eq!(last.inputs[each], [(12, 1)], "channels are outermost");
        let model = resnet(ResNet::R18, (32, 32, 3), 10, StemForm::Small);
        let found = model.scaled_channels();
        let index = |conv: &str| found.iter().position(|c| c.conv == conv).unwrap();
        let readers = model.channel_readers();
        let of = |name: &str| readers.iter().find(|r| r.weight == name).unwrap();
        assert_eq!(of("layer1.0.conv2.weight").inputs[3], [(index("layer1.0.conv1"), 3)]);
        // The stream of the first stage: the stem, and what each block has added.
        let mut stream = of("layer1.1.conv1.weight").inputs[5].clone();
        stream.sort_unstable();
        assert_eq!(stream, [(index("conv1"), 5), (index("layer1.0.conv2"), 5)]);
        let mut stream = of("layer2.1.conv1.weight").inputs[0].clone();
        stream.sort_unstable();
        assert_eq!(stream, [(index("layer2.0.conv2"), 0), (index("layer2.0.downsample.0"), 0)]);
    }
}

//! From the model as data to layers that run: names become parameter ids, an activation after a linear layer is
//! fused into it, and each block is wrapped for recomputation where that is asked for.

use std::collections::{HashMap, HashSet};

use espalier_plan::spec::shape::Shape;
use espalier_plan::spec::{self, WeightOrder};
use espalier_tensor::Tensor;
use espalier_tensor::ops::activation::Activation;
use espalier_tensor::ops::conv::Conv;
use espalier_tensor::ops::pool::Pool;

use crate::Result;
use crate::layers::*;
use crate::weights::{BufferId, ParameterId, ids_by_name};

/// A model that runs.
#[derive(Debug)]
pub struct Model {
    blocks: Vec<Box<dyn Layer>>,
    tied: HashSet<ParameterId>,
}

impl Model {
    /// Builds the layers of a spec whose shapes have been checked.
    pub fn build(spec: &spec::Model, recompute: bool) -> Model {
        Model::build_with(spec, recompute, None)
    }

    /// The same with kinks that can be held.
    pub fn build_held(spec: &spec::Model, recompute: bool, kinks: &Kinks) -> Model {
        Model::build_with(spec, recompute, Some(kinks.clone()))
    }

    fn build_with(spec: &spec::Model, recompute: bool, kinks: Option<Kinks>) -> Model {
        let mut builder = Builder {
            parameters: ids_by_name(spec.parameters().iter().map(|p| p.name.as_str())),
            buffers: ids_by_name(spec.buffers().iter().map(|b| b.name.as_str())),
            shape: spec.input.shape(),
            dropouts: 0,
            tied: HashSet::new(),
            kinks,
        };
        let last = spec.blocks.len() - 1;
        let blocks = spec
            .blocks
            .iter()
            .enumerate()
            .map(|(i, block)| -> Box<dyn Layer> {
                let layers = builder.sequence(&block.layers);
                // The last block's backward pass follows at once: forgetting its activations would save nothing.
                if recompute && i < last { Box::new(Recompute(layers)) } else { Box::new(layers) }
            })
            .collect();
        Model { blocks, tied: builder.tied }
    }

    /// Logits for a batch: `[rows, classes]`, a row per prediction.
    pub fn forward(&self, x: Tensor, pass: &mut Forward<'_>) -> Result<Tensor> {
        let logits = self.blocks.iter().try_fold(x, |x, block| block.forward(x, pass))?;
        let shape = [logits.rows(), logits.width()];
        Ok(logits.reshape(&shape))
    }

    /// Sends the gradient of the logits back through all blocks.
    pub fn backward(&self, dlogits: Tensor, pass: &mut Backward<'_>) -> Result<()> {
        let mut gradient = Some(dlogits);
        for (i, block) in self.blocks.iter().enumerate().rev() {
            let dy = gradient.expect("only the first block has no input gradient");
            gradient = block.backward(dy, pass, i > 0)?;
        }
        debug_assert!(pass.stash.is_empty(), "a layer left something on the stash");
        Ok(())
    }

    /// Parameters that more than one layer uses.
    pub fn tied(&self) -> &HashSet<ParameterId> {
        &self.tied
    }
}

struct Builder {
    parameters: HashMap<String, usize>,
    buffers: HashMap<String, usize>,
    /// The shape of one sample at the place reached.
    shape: Shape,
    dropouts: u64,
    tied: HashSet<ParameterId>,
    /// Where they are to be held, no activation with one is fused.
    kinks: Option<Kinks>,
}

impl Builder {
    fn sequence(&mut self, layers: &[spec::Layer]) -> Sequence {
        let mut built: Vec<Box<dyn Layer>> = Vec::new();
        let mut rest = layers.iter().peekable();
        while let Some(layer) = rest.next() {
            // The activation that follows a linear layer runs in the epilogue of its product.
            let fused = match (layer, rest.peek()) {
                (spec::Layer::Linear { .. }, Some(spec::Layer::Activation(kind))) if !self.holds(*kind) => {
                    Some(activation(*kind))
                }
                _ => None,
            };
            built.push(self.layer(layer, fused));
            self.shape = layer.output(self.shape).expect("a spec whose shapes were checked");
            if fused.is_some() {
                rest.next();
            }
        }
        Sequence(built)
    }

    fn layer(&mut self, layer: &spec::Layer, fused: Option<Activation>) -> Box<dyn Layer> {
        match layer {
            spec::Layer::Linear { name, bias, order, .. } => Box::new(Linear {
                weight: self.weight(name),
                bias: bias.then(|| self.bias(name)),
                order: *order,
                activation: fused,
            }),
            spec::Layer::TiedLinear { weight, .. } => {
                let weight = self.parameter(weight);
                self.tied.insert(weight);
                Box::new(Linear { weight, bias: None, order: WeightOrder::OutIn, activation: None })
            }
            spec::Layer::Conv { name, kernel, stride, padding, bias, .. } => Box::new(ConvLayer {
                weight: self.weight(name),
                bias: bias.then(|| self.bias(name)),
                conv: Conv { kernel: *kernel, stride: *stride, padding: *padding },
            }),
            &spec::Layer::MaxPool { kernel, stride, padding } => {
                let pool = Pool { kernel, stride, padding };
                match &self.kinks {
                    Some(kinks) => Box::new(HeldMaxPool { kink: kinks.add(), pool }),
                    None => Box::new(MaxPool(pool)),
                }
            }
            &spec::Layer::AvgPool { kernel, stride } => {
                Box::new(AvgPool { input: self.image(), pool: Pool { kernel, stride, padding: 0 } })
            }
            spec::Layer::GlobalAvgPool => Box::new(GlobalAvgPool { input: self.image() }),
            &spec::Layer::AdaptiveAvgPool { size } => Box::new(AdaptiveAvgPool { input: self.image(), size }),
            spec::Layer::Flatten => Box::new(Flatten { input: self.image() }),
            &spec::Layer::PadChannels { output, .. } => {
                Box::new(PadChannels { input: self.image(), channels: output })
            }
            spec::Layer::BatchNorm { name, .. } => Box::new(BatchNorm {
                scale: self.weight(name),
                shift: self.bias(name),
                running_mean: BufferId(self.buffers[&format!("{name}.running_mean")]),
                running_variance: BufferId(self.buffers[&format!("{name}.running_var")]),
            }),
            spec::Layer::LayerNorm { name, .. } => {
                Box::new(LayerNorm { scale: self.weight(name), shift: self.bias(name) })
            }
            spec::Layer::RmsNorm { name, .. } => Box::new(RmsNorm { scale: self.weight(name) }),
            spec::Layer::Activation(kind) => match &self.kinks {
                Some(kinks) if self.holds(*kind) => Box::new(HeldRelu(kinks.add())),
                _ => Box::new(ActivationLayer(activation(*kind))),
            },
            &spec::Layer::Dropout { rate } => {
                self.dropouts += 1;
                Box::new(Dropout { rate, index: self.dropouts })
            }
            spec::Layer::Embedding { name, vocab, .. } => {
                Box::new(Embedding { table: self.weight(name), vocab: *vocab })
            }
            spec::Layer::PositionEmbedding { name, context, .. } => {
                Box::new(PositionEmbedding { table: self.weight(name), context: *context })
            }
            &spec::Layer::Attention { heads, .. } => Box::new(Attention { heads }),
            spec::Layer::Residual { branch, shortcut } => {
                let input = self.shape;
                let branch = self.sequence(branch);
                self.shape = input;
                let shortcut = self.sequence(shortcut);
                self.shape = input;
                Box::new(Residual { branch, shortcut })
            }
        }
    }

    /// Whether an activation has a kink that is to be held.
    fn holds(&self, kind: spec::Activation) -> bool {
        self.kinks.is_some() && kind == spec::Activation::Relu
    }

    fn image(&self) -> [usize; 3] {
        match self.shape {
            Shape::Image { height, width, channels } => [height, width, channels],
            other => panic!("a checked spec has an image here, not {other}"),
        }
    }

    fn parameter(&self, name: &str) -> ParameterId {
        ParameterId(self.parameters[name])
    }

    fn weight(&self, name: &str) -> ParameterId {
        self.parameter(&format!("{name}.weight"))
    }

    fn bias(&self, name: &str) -> ParameterId {
        self.parameter(&format!("{name}.bias"))
    }
}

fn activation(kind: spec::Activation) -> Activation {
    match kind {
        spec::Activation::Relu => Activation::Relu,
        spec::Activation::Gelu => Activation::Gelu,
        spec::Activation::Silu => Activation::Silu,
    }
}

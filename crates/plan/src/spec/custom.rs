//! Models written in a run file, layer by layer.
//!
//! A person writes what a layer makes; what it takes follows from the layers before it. Parameters are named for
//! their position: `layers.3.weight`, inside a residual `layers.3.branch.0.weight`. Weights start from a truncated
//! normal over the fan-in, of variance 2/fan-in where a non-linearity comes next and 1/fan-in elsewhere; embeddings
//! from a normal of 0.02.
//!
//! A residual, a convolution, a linear layer and a token embedding each open a block, which lasts up to the next.

use serde::Serialize;

use super::shape::{Shape, step};
use super::{Activation, Block, Init, Input, Layer, Model, ShapeError, WeightOrder};

/// A layer as it is written: without name and input size.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Written {
    /// A linear layer over the last dimension.
    Linear {
        /// Width of the result; left out: as many as there are classes or tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<usize>,
        /// Whether there is a bias.
        bias: bool,
    },
    /// A convolution.
    Conv {
        /// Channels of the result.
        output: usize,
        /// Rows and columns of the kernel.
        kernel: usize,
        /// Step.
        stride: usize,
        /// Zeros around the image.
        padding: usize,
        /// Whether there is a bias.
        bias: bool,
    },
    /// The largest of each window.
    MaxPool {
        /// Rows and columns of the window.
        kernel: usize,
        /// Step.
        stride: usize,
        /// Border, never chosen.
        padding: usize,
    },
    /// The mean of each window.
    AvgPool {
        /// Rows and columns of the window.
        kernel: usize,
        /// Step.
        stride: usize,
    },
    /// The mean over the image.
    GlobalAvgPool,
    /// Average pool to a given size.
    AdaptiveAvgPool {
        /// Rows and columns of the result.
        size: usize,
    },
    /// An image becomes a vector.
    Flatten,
    /// Zero channels at the end.
    PadChannels {
        /// Channels of the result.
        output: usize,
    },
    /// Batch norm.
    BatchNorm,
    /// Layer norm.
    LayerNorm,
    /// RMS norm.
    RmsNorm,
    /// max(x, 0)
    Relu,
    /// GPT-2's GELU.
    Gelu,
    /// x sigmoid(x)
    Silu,
    /// Dropout.
    Dropout {
        /// In [0, 1).
        rate: f64,
    },
    /// Token ids to vectors.
    Embedding {
        /// Width of each vector.
        width: usize,
    },
    /// Adds a learnt vector for each position.
    Position,
    /// Causal attention over queries, keys and values side by side.
    Attention {
        /// Heads.
        heads: usize,
    },
    /// The sum of two ways.
    Residual {
        /// The long way.
        branch: Vec<Written>,
        /// The short way; empty: the input itself.
        shortcut: Vec<Written>,
    },
}

/// Completes written layers to a model, or says which of them does not fit.
pub fn custom(input: Input, classes: usize, layers: &[Written]) -> Result<Model, ShapeError> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut started = false;
    let context = Context { input, classes };
    let mut shape = input.shape();
    for (i, written) in layers.iter().enumerate() {
        let name = format!("layers.{i}");
        let rest = &layers[i + 1..];
        let layer = context.complete(written, &name, shape, active(rest, false))?;
        shape = step(&layer, shape, &format!("layer {i}"), &mut |_, _, _| {})?;
        let opens = matches!(
            layer,
            Layer::Residual { .. } | Layer::Conv { .. } | Layer::Linear { .. } | Layer::Embedding { .. }
        );
        match blocks.last_mut() {
            // What comes before the first such layer belongs to its block.
            Some(block) if !(opens && started) => block.layers.push(layer),
            _ => blocks.push(Block { name, layers: vec![layer] }),
        }
        started |= opens;
    }
    let model = Model { name: "custom".into(), input, blocks, classes };
    model.check()?;
    Ok(model)
}

/// Whether the next layer that is not a norm, a pool or a reshaping is a non-linearity. `after` is the answer at the
/// end of the list.
fn active(rest: &[Written], after: bool) -> bool {
    for (i, layer) in rest.iter().enumerate() {
        match layer {
            Written::Relu | Written::Gelu | Written::Silu => return true,
            Written::Linear { .. }
            | Written::Conv { .. }
            | Written::Attention { .. }
            | Written::Embedding { .. }
            | Written::Position => return false,
            Written::Residual { branch, .. } => return active(branch, active(&rest[i + 1..], after)),
            _ => {}
        }
    }
    after
}

struct Context {
    input: Input,
    classes: usize,
}

impl Context {
    /// The full layer called `name` where `shape` goes in; `then_active` tells whether a non-linearity comes next.
    fn complete(
        &self,
        written: &Written,
        name: &str,
        shape: Shape,
        then_active: bool,
    ) -> Result<Layer, ShapeError> {
        let last = shape.last();
        let fan_in = |fan: usize| {
            let gain = if then_active { 2.0 } else { 1.0 };
            Init::TruncatedNormal((gain / fan.max(1) as f32).sqrt())
        };
        let name = name.to_string();
        Ok(match *written {
            Written::Linear { output, bias } => {
                let output = output.unwrap_or(self.classes);
                Layer::Linear {
                    name,
                    input: last,
                    output,
                    bias,
                    order: WeightOrder::OutIn,
                    init: fan_in(last),
                }
            }
            Written::Conv { output, kernel, stride, padding, bias } => {
                let init = fan_in(last.saturating_mul(kernel).saturating_mul(kernel));
                Layer::Conv { name, input: last, output, kernel, stride, padding, bias, init }
            }
            Written::MaxPool { kernel, stride, padding } => Layer::MaxPool { kernel, stride, padding },
            Written::AvgPool { kernel, stride } => Layer::AvgPool { kernel, stride },
            Written::GlobalAvgPool => Layer::GlobalAvgPool,
            Written::AdaptiveAvgPool { size } => Layer::AdaptiveAvgPool { size },
            Written::Flatten => Layer::Flatten,
            Written::PadChannels { output } => Layer::PadChannels { input: last, output },
            Written::BatchNorm => Layer::BatchNorm { name, channels: last, scale: 1.0, group: 0 },
            Written::LayerNorm => Layer::LayerNorm { name, width: last },
            Written::RmsNorm => Layer::RmsNorm { name, width: last },
            Written::Relu => Layer::Activation(Activation::Relu),
            Written::Gelu => Layer::Activation(Activation::Gelu),
            Written::Silu => Layer::Activation(Activation::Silu),
            Written::Dropout { rate } => Layer::Dropout { rate: rate as f32 },
            Written::Embedding { width } => {
                // Ids are what only text has; elsewhere the shape check refuses the layer, whatever its size.
                let vocab = match self.input {
                    Input::Tokens { vocab, .. } => vocab,
                    Input::Image { .. } => 1,
                };
                Layer::Embedding { name, vocab, width, init: Init::Normal(0.02) }
            }
            Written::Position => {
                let context = usize::try_from(shape.rows()).unwrap_or(usize::MAX);
                Layer::PositionEmbedding { name, context, width: last, init: Init::Normal(0.02) }
            }
            Written::Attention { heads } => Layer::Attention { heads, width: last / 3 },
            Written::Residual { ref branch, ref shortcut } => Layer::Residual {
                branch: self.side(branch, &name, "branch", shape, then_active)?,
                shortcut: self.side(shortcut, &name, "shortcut", shape, then_active)?,
            },
        })
    }

    fn side(
        &self,
        layers: &[Written],
        name: &str,
        side: &str,
        mut shape: Shape,
        after: bool,
    ) -> Result<Vec<Layer>, ShapeError> {
        let mut all = Vec::with_capacity(layers.len());
        for (i, written) in layers.iter().enumerate() {
            let then_active = active(&layers[i + 1..], after);
            let layer = self.complete(written, &format!("{name}.{side}.{i}"), shape, then_active)?;
            let place = format!("layer {} (residual), {side} {i}", name.trim_start_matches("layers."));
            shape = step(&layer, shape, &place, &mut |_, _, _| {})?;
            all.push(layer);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::{Precision, Recompute};

    const IMAGE: Input = Input::Image { height: 28, width: 28, channels: 1 };

    fn conv(output: usize, kernel: usize) -> Written {
        Written::Conv { output, kernel, stride: 1, padding: 0, bias: true }
    }

    fn linear(output: usize) -> Written {
        Written::Linear { output: Some(output), bias: true }
    }

    const POOL: Written = Written::MaxPool { kernel: 2, stride: 2, padding: 0 };

    #[test]
    fn simple_cnn_written_by_hand_is_the_built_in_one() {
        let layers = [
            conv(32, 5),
            Written::Relu,
            POOL,
            conv(64, 5),
            Written::Relu,
            POOL,
            Written::Flatten,
            linear(10),
        ];
        let model = custom(IMAGE, 10, &layers).unwrap();
        let built_in = super::super::presets::simple_cnn((28, 28, 1), 10);
        let what = |m: &Model| m.parameters().into_iter().map(|p| (p.shape, p.init)).collect::<Vec<_>>();
        assert_eq!(what(&model), what(&built_in));
        assert_eq!(model.flops(2), built_in.flops(2));
        let blocks: Vec<_> = model.blocks.iter().map(|b| (b.name.as_str(), b.layers.len())).collect();
        assert_eq!(blocks, [("layers.0", 3), ("layers.3", 4), ("layers.7", 1)]);
        assert_eq!(model.parameters()[3].name, "layers.3.bias");
    }

    #[test]
    fn a_transformer_can_be_written() {
        let branch = vec![Written::LayerNorm, linear(24), Written::Attention { heads: 2 }, linear(8)];
        let residual = Written::Residual { branch, shortcut: vec![] };
        let head = Written::Linear { output: None, bias: false };
        let layers = [Written::Embedding { width: 8 }, Written::Position, residual, Written::LayerNorm, head];
        let model = custom(Input::Tokens { seq: 4, vocab: 11 }, 11, &layers).unwrap();
        assert!(model.parameters().iter().any(|p| p.name == "layers.2.branch.1.weight"));
        assert_eq!(model.parameters().last().unwrap().shape, [11, 8]);
        assert_eq!(model.blocks.len(), 3);
    }

    #[test]
    fn what_comes_before_the_first_weight_joins_its_block() {
        let model = custom(IMAGE, 10, &[Written::Flatten, linear(20), Written::Relu, linear(10)]).unwrap();
        assert_eq!(model.blocks.iter().map(|b| b.layers.len()).collect::<Vec<_>>(), [3, 1]);
    }

    fn sentence(layers: &[Written]) -> String {
        custom(IMAGE, 10, layers).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_fit_is_named() {
        insta::assert_snapshot!(sentence(&[conv(8, 5), linear(10)]), @"layer 1 (linear): takes vectors, got an image of 24 x 24 x 8; put a flatten before it");
        insta::assert_snapshot!(sentence(&[conv(8, 29)]), @"layer 0 (conv): a window of 29 x 29 is larger than an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[conv(0, 5)]), @"layer 0 (conv): every dimension must be at least 1, and it gives an image of 24 x 24 x 0");
        insta::assert_snapshot!(sentence(&[Written::Flatten, linear(9)]), @"output: the last layer must give a vector of 10 (one logit a class), got a vector of 9");
        insta::assert_snapshot!(sentence(&[]), @"output: the last layer must give a vector of 10 (one logit a class), got an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[Written::Embedding { width: 8 }]), @"layer 0 (embedding): takes token ids, got an image of 28 x 28 x 1");
        let residual = |branch, shortcut| Written::Residual { branch, shortcut };
        insta::assert_snapshot!(sentence(&[conv(8, 5), residual(vec![conv(16, 1)], vec![])]), @"layer 1 (residual): its sides must have one shape: the branch gives an image of 24 x 24 x 16, the shortcut an image of 24 x 24 x 8");
        insta::assert_snapshot!(sentence(&[residual(vec![Written::Relu, conv(1, 99)], vec![])]), @"layer 0 (residual), branch 1 (conv): a window of 99 x 99 is larger than an image of 28 x 28 x 1");
        insta::assert_snapshot!(sentence(&[residual(vec![], vec![])]), @"layer 0 (residual): the branch of a residual needs at least one layer");
    }

    fn any_layer() -> impl Strategy<Value = Written> {
        let size = prop_oneof![8 => 0usize..6, 1 => Just(1 << 24), 1 => Just(usize::MAX)].boxed();
        let leaf = prop_oneof![
            (prop::option::of(size.clone()), any::<bool>())
                .prop_map(|(output, bias)| Written::Linear { output, bias }),
            (size.clone(), size.clone(), size.clone(), size.clone()).prop_map(
                |(output, kernel, stride, padding)| Written::Conv {
                    output,
                    kernel,
                    stride,
                    padding,
                    bias: true
                }
            ),
            (size.clone(), size.clone(), size.clone())
                .prop_map(|(kernel, stride, padding)| Written::MaxPool { kernel, stride, padding }),
            size.clone().prop_map(|size| Written::AdaptiveAvgPool { size }),
            size.clone().prop_map(|output| Written::PadChannels { output }),
            size.clone().prop_map(|width| Written::Embedding { width }),
            size.prop_map(|heads| Written::Attention { heads }),
            prop::sample::select(vec![
                Written::Flatten,
                Written::GlobalAvgPool,
                Written::BatchNorm,
                Written::LayerNorm,
                Written::Relu,
                Written::Gelu,
                Written::Position,
                Written::Dropout { rate: 0.5 },
            ]),
        ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            let side = prop::collection::vec(inner, 0..3);
            (side.clone(), side).prop_map(|(branch, shortcut)| Written::Residual { branch, shortcut })
        })
    }

    proptest! {
        /// Whatever is written is a sentence or a model; of a model everything can be counted, and more
        /// samples never keep less.
        #[test]
        fn any_layers_are_refused_or_counted(
            layers in prop::collection::vec(any_layer(), 0..6),
            text in any::<bool>(),
            samples in 1usize..9,
        ) {
            let tokens = Input::Tokens { seq: 4, vocab: 10 };
            let Ok(model) = custom(if text { tokens } else { IMAGE }, 10, &layers) else { return Ok(()) };
            prop_assert!(model.flops(samples).unwrap() >= 0.0);
            prop_assert!(model.blocks.iter().all(|block| !block.layers.is_empty()));
            let bytes = |samples, recompute| model.activation_bytes(samples, Precision::Bf16, recompute).unwrap();
            prop_assert!(bytes(samples, Recompute::None) <= bytes(samples + 1, Recompute::None));
            if model.blocks.len() == 1 {
                prop_assert!(bytes(samples, Recompute::None) <= bytes(samples, Recompute::Block));
            }
        }
    }
}

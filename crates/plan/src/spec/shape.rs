//! Shapes: what goes into a layer, what comes out, and one clear sentence where the two do not fit.
//!
//! A shape is that of one sample; the batch is never part of it. Every layer's rule stands in [`Layer::output`], and
//! everything else that needs shapes (flops, activation bytes, models written by hand) walks through it.

use std::collections::HashMap;

use serde::Serialize;

use super::{Activation, Input, Layer, Model};

/// The shape of one sample somewhere inside a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Shape {
    /// `[seq]` token ids: whole numbers, all others hold floats.
    Tokens {
        /// Tokens in a sample.
        seq: usize,
    },
    /// `[seq, width]`.
    Sequence {
        /// Positions.
        seq: usize,
        /// Elements of each.
        width: usize,
    },
    /// `[height, width, channels]`.
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Elements of each pixel.
        channels: usize,
    },
    /// `[width]`.
    Vector {
        /// Elements.
        width: usize,
    },
}

impl Shape {
    /// Elements of one sample. Stops at the largest number instead of wrapping: nothing of that size fits anyway.
    pub fn elements(&self) -> u64 {
        self.rows().saturating_mul(self.last() as u64)
    }

    /// The size of the last dimension: what linear layers and norms work on.
    pub fn last(&self) -> usize {
        match *self {
            Shape::Tokens { .. } => 1,
            Shape::Sequence { width, .. } | Shape::Vector { width } => width,
            Shape::Image { channels, .. } => channels,
        }
    }

    /// How many vectors of the last dimension a sample holds.
    pub fn rows(&self) -> u64 {
        match *self {
            Shape::Tokens { seq } | Shape::Sequence { seq, .. } => seq as u64,
            Shape::Image { height, width, .. } => (height as u64).saturating_mul(width as u64),
            Shape::Vector { .. } => 1,
        }
    }

    /// The same positions with another size of the last dimension.
    fn with_last(self, size: usize) -> Shape {
        match self {
            Shape::Tokens { seq } | Shape::Sequence { seq, .. } => Shape::Sequence { seq, width: size },
            Shape::Image { height, width, .. } => Shape::Image { height, width, channels: size },
            Shape::Vector { .. } => Shape::Vector { width: size },
        }
    }

    /// Whether a dimension is zero.
    fn is_empty(&self) -> bool {
        self.elements() == 0
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::Tokens { seq } => write!(f, "{seq} token ids"),
            Shape::Sequence { seq, width } => write!(f, "a sequence of {seq} x {width}"),
            Shape::Image { height, width, channels } => {
                write!(f, "an image of {height} x {width} x {channels}")
            }
            Shape::Vector { width } => write!(f, "a vector of {width}"),
        }
    }
}

/// A layer that does not fit where it stands. `layer 4 (linear): takes 1024 elements, got a vector of 512`
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{layer}: {problem}")]
pub struct ShapeError {
    /// Which layer: its number among all layers of the model, from 0, as in the names of parameters.
    pub layer: String,
    /// What is wrong with it.
    pub problem: String,
}

impl Input {
    /// The shape of one sample as it enters the first layer.
    pub fn shape(&self) -> Shape {
        match *self {
            Input::Tokens { seq, .. } => Shape::Tokens { seq },
            Input::Image { height, width, channels } => Shape::Image { height, width, channels },
        }
    }
}

impl Model {
    /// Walks all shapes; returns that of the logits. A model that passes can be built, counted and run.
    pub fn check(&self) -> Result<Shape, ShapeError> {
        let shape = self.for_each_layer(|_, _, _, _| {})?;
        self.check_ties()?;
        let wanted = match self.input {
            Input::Tokens { seq, .. } => Shape::Sequence { seq, width: self.classes },
            Input::Image { .. } => Shape::Vector { width: self.classes },
        };
        if shape != wanted {
            let problem = format!("the last layer must give {wanted} (one logit a class), got {shape}");
            return Err(ShapeError { layer: "output".into(), problem });
        }
        Ok(shape)
    }

    /// A tied weight must belong to a layer of this model and have the shape that its second user expects.
    fn check_ties(&self) -> Result<(), ShapeError> {
        let owned: HashMap<String, Vec<usize>> =
            self.parameters().into_iter().map(|parameter| (parameter.name, parameter.shape)).collect();
        let mut problem = None;
        self.for_each(&mut |layer| {
            let Layer::TiedLinear { weight, input, output } = layer else { return };
            if owned.get(weight).is_none_or(|shape| *shape != [*output, *input]) {
                problem = Some(format!("no layer has a weight `{weight}` of {output} x {input}"));
            }
        });
        match problem {
            Some(problem) => Err(ShapeError { layer: "tied_linear".into(), problem }),
            None => Ok(()),
        }
    }

    /// Calls `visit(block, layer, input, output)` for every layer in the order of execution, those inside residual
    /// branches and shortcuts included (the `Residual` itself comes after them); returns the shape at the end.
    pub fn for_each_layer(
        &self,
        mut visit: impl FnMut(usize, &Layer, Shape, Shape),
    ) -> Result<Shape, ShapeError> {
        let mut shape = self.input.shape();
        if shape.is_empty() {
            let problem = format!("every dimension must be at least 1, got {shape}");
            return Err(ShapeError { layer: "input".into(), problem });
        }
        let mut number = 0;
        for (b, block) in self.blocks.iter().enumerate() {
            for layer in &block.layers {
                let place = format!("layer {number}");
                shape = step(layer, shape, &place, &mut |layer, from, to| visit(b, layer, from, to))?;
                number += 1;
            }
        }
        Ok(shape)
    }
}

/// One layer of a walk, standing at `place`. The visitor is dynamic, since residuals nest.
pub(super) fn step(
    layer: &Layer,
    shape: Shape,
    place: &str,
    visit: &mut dyn FnMut(&Layer, Shape, Shape),
) -> Result<Shape, ShapeError> {
    let fail = |problem| ShapeError { layer: format!("{place} ({})", label(layer)), problem };
    let output = if let Layer::Residual { branch, shortcut } = layer {
        if branch.is_empty() {
            return Err(fail("the branch of a residual needs at least one layer".into()));
        }
        let mut side = |layers: &[Layer], name: &str| {
            let mut inner = shape;
            for (i, layer) in layers.iter().enumerate() {
                inner = step(layer, inner, &format!("{place} (residual), {name} {i}"), visit)?;
            }
            Ok(inner)
        };
        let (long, short) = (side(branch, "branch")?, side(shortcut, "shortcut")?);
        if long != short {
            let problem =
                format!("its sides must have one shape: the branch gives {long}, the shortcut {short}");
            return Err(fail(problem));
        }
        long
    } else {
        layer.output(shape).map_err(fail)?
    };
    visit(layer, shape, output);
    Ok(output)
}

/// `linear`, or with a name where it has one: ``linear `fc` ``.
fn label(layer: &Layer) -> String {
    match layer.name() {
        // A name made from the position says the number twice.
        Some(name) if !name.starts_with("layers.") => format!("{} `{name}`", layer.kind()),
        _ => layer.kind().into(),
    }
}

impl Layer {
    /// The word for this kind of layer in run files and messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Layer::Linear { .. } => "linear",
            Layer::TiedLinear { .. } => "tied_linear",
            Layer::Conv { .. } => "conv",
            Layer::MaxPool { .. } => "max_pool",
            Layer::AvgPool { .. } => "avg_pool",
            Layer::GlobalAvgPool => "global_avg_pool",
            Layer::AdaptiveAvgPool { .. } => "adaptive_avg_pool",
            Layer::Flatten => "flatten",
            Layer::PadChannels { .. } => "pad_channels",
            Layer::BatchNorm { .. } => "batch_norm",
            Layer::LayerNorm { .. } => "layer_norm",
            Layer::RmsNorm { .. } => "rms_norm",
            Layer::Activation(Activation::Relu) => "relu",
            Layer::Activation(Activation::Gelu) => "gelu",
            Layer::Activation(Activation::Silu) => "silu",
            Layer::Dropout { .. } => "dropout",
            Layer::Embedding { .. } => "embedding",
            Layer::PositionEmbedding { .. } => "position",
            Layer::Attention { .. } => "attention",
            Layer::Residual { .. } => "residual",
        }
    }

    /// The prefix of its parameters' names, where it has parameters of its own.
    pub fn name(&self) -> Option<&str> {
        match self {
            Layer::Linear { name, .. }
            | Layer::Conv { name, .. }
            | Layer::BatchNorm { name, .. }
            | Layer::LayerNorm { name, .. }
            | Layer::RmsNorm { name, .. }
            | Layer::Embedding { name, .. }
            | Layer::PositionEmbedding { name, .. } => Some(name),
            _ => None,
        }
    }

    /// The shape that comes out when `input` goes in, or what is wrong. Of a residual: that of its branch.
    pub fn output(&self, input: Shape) -> Result<Shape, String> {
        let output = match *self {
            Layer::Linear { input: width, output, .. } | Layer::TiedLinear { input: width, output, .. } => {
                match input {
                    Shape::Image { .. } => {
                        return Err(format!("takes vectors, got {input}; put a flatten before it"));
                    }
                    Shape::Tokens { .. } => return Err(needs_floats(input)),
                    _ => expect_last(input, width)?.with_last(output),
                }
            }
            Layer::Conv { input: channels, output, kernel, stride, padding, .. } => {
                windows(expect_last(image(input)?, channels)?, kernel, stride, padding)?.with_last(output)
            }
            Layer::MaxPool { kernel, stride, padding } => {
                if padding > kernel / 2 {
                    return Err(format!("padding {padding} is more than half of the window of {kernel}"));
                }
                windows(image(input)?, kernel, stride, padding)?
            }
            Layer::AvgPool { kernel, stride } => windows(image(input)?, kernel, stride, 0)?,
            Layer::GlobalAvgPool => Shape::Vector { width: image(input)?.last() },
            Layer::AdaptiveAvgPool { size } => {
                Shape::Image { height: size, width: size, channels: image(input)?.last() }
            }
            Layer::Flatten => {
                let elements = image(input)?.elements();
                Shape::Vector {
                    width: usize::try_from(elements).map_err(|_| format!("{input} is too large"))?,
                }
            }
            Layer::PadChannels { input: channels, output } => {
                if output < channels {
                    return Err(format!("cannot pad {channels} channels to {output}"));
                }
                expect_last(image(input)?, channels)?.with_last(output)
            }
            Layer::BatchNorm { channels, .. } => match input {
                Shape::Image { .. } | Shape::Vector { .. } => expect_last(input, channels)?,
                _ => return Err(format!("takes images or vectors, got {input}")),
            },
            Layer::LayerNorm { width, .. } | Layer::RmsNorm { width, .. } => match input {
                Shape::Tokens { .. } => return Err(needs_floats(input)),
                _ => expect_last(input, width)?,
            },
            Layer::Activation(_) => match input {
                Shape::Tokens { .. } => return Err(needs_floats(input)),
                _ => input,
            },
            Layer::Dropout { rate } => match input {
                Shape::Tokens { .. } => return Err(needs_floats(input)),
                _ if !(0.0..1.0).contains(&rate) => {
                    return Err(format!("rate must be in [0, 1), got {rate}"));
                }
                _ => input,
            },
            Layer::Embedding { vocab, width, .. } => match input {
                Shape::Tokens { .. } if vocab == 0 => return Err("needs a vocabulary of at least 1".into()),
                Shape::Tokens { .. } => input.with_last(width),
                _ => return Err(format!("takes token ids, got {input}")),
            },
            Layer::PositionEmbedding { context, width, .. } => match sequence(input)? {
                (seq, _) if seq > context => {
                    return Err(format!("has {context} positions, got a sequence of {seq}"));
                }
                _ => expect_last(input, width)?,
            },
            Layer::Attention { heads, width } => {
                sequence(input)?;
                if heads == 0 || !width.is_multiple_of(heads) {
                    return Err(format!("{heads} heads do not divide the width {width}"));
                }
                if input.last() != width.saturating_mul(3) {
                    let problem = "takes queries, keys and values side by side";
                    return Err(format!("{problem}, three times its width {width}, got {input}"));
                }
                input.with_last(width)
            }
            Layer::Residual { ref branch, .. } => {
                let mut shape = input;
                for layer in branch {
                    shape = layer.output(shape)?;
                }
                shape
            }
        };
        if output.is_empty() {
            return Err(format!("every dimension must be at least 1, and it gives {output}"));
        }
        Ok(output)
    }
}

fn needs_floats(input: Shape) -> String {
    format!("takes vectors, got {input}; put an embedding before it")
}

fn expect_last(input: Shape, wanted: usize) -> Result<Shape, String> {
    if input.last() == wanted { Ok(input) } else { Err(format!("takes {wanted} elements, got {input}")) }
}

fn image(input: Shape) -> Result<Shape, String> {
    if matches!(input, Shape::Image { .. }) { Ok(input) } else { Err(format!("takes an image, got {input}")) }
}

fn sequence(input: Shape) -> Result<(usize, usize), String> {
    match input {
        Shape::Sequence { seq, width } => Ok((seq, width)),
        _ => Err(format!("takes a sequence of vectors, got {input}")),
    }
}

/// The image that windows of `kernel` x `kernel` make at a step of `stride`: floor((n + 2 padding - kernel) / stride) + 1.
fn windows(input: Shape, kernel: usize, stride: usize, padding: usize) -> Result<Shape, String> {
    let Shape::Image { height, width, channels } = input else { return image(input) };
    if kernel == 0 || stride == 0 {
        return Err(format!("kernel and stride must be at least 1, got {kernel} and {stride}"));
    }
    let along = |n: usize| {
        let padded = n.saturating_add(padding.saturating_mul(2));
        padded.checked_sub(kernel).map(|room| room / stride + 1)
    };
    match (along(height), along(width)) {
        (Some(height), Some(width)) => Ok(Shape::Image { height, width, channels }),
        _ => {
            let border = if padding > 0 { format!(" with a border of {padding}") } else { String::new() };
            Err(format!("a window of {kernel} x {kernel} is larger than {input}{border}"))
        }
    }
}

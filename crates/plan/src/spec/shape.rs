//! Shapes: what goes into a layer, what comes out, and one clear sentence where the two do not fit.
//!
//! A shape is that of one sample; the batch is never part of it. Every layer's rule stands in its own file ([`Layer::output`]), and
//! everything else that needs shapes (flops, activation bytes, models written by hand) walks through it.

use std::collections::HashSet;

use serde::Serialize;

use super::{Input, Layer, Model, TiedLinear};

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
    pub(super) fn with_last(self, size: usize) -> Shape {
        match self {
            Shape::Tokens { seq } | Shape::Sequence { seq, .. } => Shape::Sequence { seq, width: size },
            Shape::Image { height, width, .. } => Shape::Image { height, width, channels: size },
            Shape::Vector { .. } => Shape::Vector { width: size },
        }
    }

    /// Whether a dimension is zero.
    pub(super) fn is_empty(&self) -> bool {
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

    /// Tokens of a sample, and the most that a text can have; none for images.
    pub fn context(&self) -> Option<usize> {
        match *self {
            Input::Tokens { seq, .. } => Some(seq),
            Input::Image { .. } => None,
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
        let mut missing = HashSet::new();
        self.for_each(&mut |layer| {
            if let Layer::TiedLinear(TiedLinear { weight, input, output }) = layer {
                missing.insert((weight.clone(), vec![*output, *input]));
            }
        });
        if missing.is_empty() {
            return Ok(());
        }
        for parameter in self.parameters() {
            missing.remove(&(parameter.name, parameter.shape));
        }
        match missing.into_iter().min() {
            Some((weight, shape)) => {
                let problem = format!("no layer has a weight `{weight}` of {} x {}", shape[0], shape[1]);
                Err(ShapeError { layer: "tied_linear".into(), problem })
            }
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
    let layer_word = layer.kind();
    let fail = |problem| ShapeError { layer: format!("{place} ({})", label(layer)), problem };
    let output = match layer.entry().sides() {
        Some(sides) => {
            if matches!(layer, Layer::Residual(residual) if residual.branch.is_empty()) {
                return Err(fail("the branch of a residual needs at least one layer".into()));
            }
            let mut ends = Vec::with_capacity(sides.all.len());
            for side in &sides.all {
                let mut inner = shape;
                for (i, layer) in side.layers.iter().enumerate() {
                    let place = format!("{place} ({layer_word}), {} {i}", side.label);
                    inner = step(layer, inner, &place, visit)?;
                }
                ends.push(inner);
            }
            sides.meet(&ends).map_err(fail)?
        }
        None => layer.output(shape).map_err(fail)?,
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

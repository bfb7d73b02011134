//! A walk through a model's layers, each with the shape that it gets: what is counted or built later has
//! been walked here.

use std::collections::HashSet;

use super::{Input, LayerSpec, ModelSpec, Shape, ShapeError};

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

impl ModelSpec {
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
            if let (Some(weight), Some(size)) =
                (layer.description().tied_weight(), layer.properties().product_size)
            {
                missing.insert((weight.to_owned(), vec![size.output, size.input]));
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
    pub(crate) fn for_each_layer(
        &self,
        mut visit: impl FnMut(usize, &LayerSpec, Shape, Shape),
    ) -> Result<Shape, ShapeError> {
        let mut shape = self.input.shape();
        if shape.is_empty() {
            let problem = format!("every dimension must be at least 1, got {shape}");
            return Err(ShapeError { layer: "input".into(), problem });
        }
        let mut number = 0;
        for (b, block) in self.blocks.iter().enumerate() {
            for layer in &block.layers {
                let path = format_args!("layer {number}");
                shape = layer.step(shape, path, &mut |layer, from, to| visit(b, layer, from, to))?;
                number += 1;
            }
        }
        Ok(shape)
    }
}

//! One layer of a walk through shapes, those inside it included.

use super::super::shape::{Shape, ShapeError};
use super::Layer;

impl Layer {
    /// The shape behind a layer that stands at `place`. The visitor is dynamic, since residuals nest.
    pub(in crate::spec) fn step(
        &self,
        shape: Shape,
        place: &str,
        visit: &mut dyn FnMut(&Layer, Shape, Shape),
    ) -> Result<Shape, ShapeError> {
        let layer_word = self.kind();
        let fail = |problem| ShapeError { layer: format!("{place} ({})", label(self)), problem };
        let output = match self.entry().sides() {
            Some(sides) => {
                if matches!(self, Layer::Residual(residual) if residual.branch.is_empty()) {
                    return Err(fail("the branch of a residual needs at least one layer".into()));
                }
                let mut ends = Vec::with_capacity(sides.all.len());
                for side in &sides.all {
                    let mut inner = shape;
                    for (i, layer) in side.layers.iter().enumerate() {
                        let place = format!("{place} ({layer_word}), {} {i}", side.label);
                        inner = layer.step(inner, &place, visit)?;
                    }
                    ends.push(inner);
                }
                sides.meet(&ends).map_err(fail)?
            }
            None => self.output(shape).map_err(fail)?,
        };
        visit(self, shape, output);
        Ok(output)
    }
}

/// `linear`, or with a name where it has one: ``linear `fc` ``.
fn label(layer: &Layer) -> String {
    match layer.name() {
        // A name made from the position says the number twice.
        Some(name) if !name.starts_with("layers.") => format!("{} `{name}`", layer.kind()),
        _ => layer.kind().into(),
    }
}

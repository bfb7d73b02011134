//! One layer of a walk through shapes, those inside it included.

use std::fmt::Arguments;

use super::super::shape::{Shape, ShapeError};
use super::LayerSpec;

impl LayerSpec {
    /// The shape behind a layer that stands at `path`, which is written where something is wrong alone: planning
    /// walks models many times. The visitor is dynamic, since residuals nest.
    pub(in crate::spec) fn step(
        &self,
        shape: Shape,
        path: Arguments<'_>,
        visit: &mut dyn FnMut(&LayerSpec, Shape, Shape),
    ) -> Result<Shape, ShapeError> {
        let layer_word = self.kind();
        let fail = |problem| ShapeError { layer: format!("{path} ({})", label(self)), problem };
        let output = match self.description().branches() {
            Some(branches) => {
                if matches!(self, LayerSpec::Residual(residual) if residual.branch.is_empty()) {
                    return Err(fail("the branch of a residual needs at least one layer".into()));
                }
                let mut ends = Vec::with_capacity(branches.all.len());
                for side in &branches.all {
                    let mut inner = shape;
                    for (i, layer) in side.layers.iter().enumerate() {
                        let path = format_args!("{path} ({layer_word}), {} {i}", side.label);
                        inner = layer.step(inner, path, visit)?;
                    }
                    ends.push(inner);
                }
                branches.joined(&ends).map_err(fail)?
            }
            None => self.output(shape).map_err(fail)?,
        };
        visit(self, shape, output);
        Ok(output)
    }
}

/// `linear`, or with a name where it has one: ``linear `fc` ``.
fn label(layer: &LayerSpec) -> String {
    match layer.name() {
        // A name made from the position says the number twice.
        Some(name) if !name.starts_with("layers.") => format!("{} `{name}`", layer.kind()),
        _ => layer.kind().into(),
    }
}

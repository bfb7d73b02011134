//! How a run file writes a layer: its word, and its fields with their defaults, as data.
//!
//! A person writes what a layer makes; what it takes, its name and how it starts follow from where it stands
//! ([`LayerContext`]).

use serde::ser::{Serialize, SerializeMap, Serializer};
use toml::Value;

use super::super::shape::{Shape, ShapeError};
use super::super::{Init, Input};
use super::{KINDS, LayerSpec};
use crate::field::{Field, FieldDefault, FieldType, FieldValues, LARGEST, integer_or};
use crate::tiles::WindowPadding;

/// How far windows reach past an image: a number for all sides, or TensorFlow's "same".
pub(super) const PADDING: Field = integer_or("padding", FieldDefault::Integer(0), [0, LARGEST], &["same"]);

/// A kind of layer that a run file can name.
#[derive(Debug)]
pub struct LayerKind {
    /// The value of its `type` in a run file.
    pub word: &'static str,
    /// In the order in which they are written back.
    pub fields: &'static [Field],
    /// Whether it opens a block of the model, which lasts up to the next such layer.
    pub opens: bool,
    /// What it means for how the weights before it start.
    pub then: Downstream,
    /// The layer, from what is written and where it stands.
    pub complete: fn(&WrittenLayer, &LayerContext<'_>) -> Result<LayerSpec, ShapeError>,
}

impl LayerKind {
    /// The kind that a run file means by a word.
    pub fn find(word: &str) -> Option<&'static LayerKind> {
        KINDS.iter().copied().find(|kind| kind.word == word)
    }
}

/// What is known of how activations go on behind a weight: one that a non-linearity halves starts with twice
/// the variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Downstream {
    Active,
    /// Another weight, or what mixes positions.
    Linear,
    /// A norm, a pool, a reshaping: what comes behind it counts.
    Passes,
    /// What its first list of layers begins with counts.
    Inside,
}

/// A layer as it is written: without name and input size. Every field has a value.
#[derive(Debug, Clone)]
pub struct WrittenLayer {
    /// The kind that its `type` names.
    pub kind: &'static LayerKind,
    /// Those of its fields that hold no layers.
    pub values: FieldValues,
    /// The layers inside it: one list for each field that holds some, or those of a list of lists.
    pub branches: Vec<Vec<WrittenLayer>>,
}

impl PartialEq for WrittenLayer {
    fn eq(&self, other: &WrittenLayer) -> bool {
        (self.kind.word, &self.values, &self.branches) == (other.kind.word, &other.values, &other.branches)
    }
}

impl WrittenLayer {
    /// The padding of windows over an image, as `padding`, `kernel` and `stride` say; `"same"` depends on
    /// the image.
    pub(crate) fn padding(&self, image: Shape) -> WindowPadding {
        match (self.values.get::<Value>("padding").as_integer(), image) {
            (Some(padding), _) => (padding as usize).into(),
            (None, Shape::Image { height, width, .. }) => {
                let [kernel, stride] = ["kernel", "stride"].map(|field| self.values.get(field));
                WindowPadding::same([height, width], kernel, stride)
            }
            // What is no image is refused where the layer's shape is asked for.
            (None, _) => 0.into(),
        }
    }
}

impl Serialize for WrittenLayer {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("type", self.kind.word)?;
        let mut branches = self.branches.iter();
        for field in self.kind.fields {
            match (field.takes, self.values.find::<Value>(field.name)) {
                (FieldType::Layers, _) => map.serialize_entry(field.name, &branches.next())?,
                (FieldType::Lists(_), _) => map.serialize_entry(field.name, &self.branches)?,
                (_, Some(value)) => map.serialize_entry(field.name, &value)?,
                (_, None) => {}
            }
        }
        map.end()
    }
}

/// Where a written layer stands.
#[derive(Debug)]
pub struct LayerContext<'a> {
    /// The prefix of its parameters: its position.
    pub name: String,
    /// The shape of a sample before it.
    pub shape: Shape,
    /// What the model takes.
    pub input: Input,
    /// What it tells apart.
    pub classes: usize,
    /// Whether a non-linearity comes next.
    pub then_active: bool,
    /// How messages call it: `layer 3`.
    pub path: &'a str,
}

impl LayerContext<'_> {
    /// A truncated normal over the fan-in, of variance 2/fan-in where a non-linearity comes next and 1/fan-in
    /// elsewhere.
    pub(crate) fn fan_in(&self, fan: usize) -> Init {
        let gain = if self.then_active { 2.0 } else { 1.0 };
        Init::fan_in(gain, fan)
    }

    /// The layers of one branch of a layer called `word`, whose parameters' names begin with `branch` and
    /// which messages call `label`.
    pub fn branch(
        &self,
        word: &str,
        layers: &[WrittenLayer],
        branch: &str,
        label: &str,
    ) -> Result<Vec<LayerSpec>, ShapeError> {
        let mut shape = self.shape;
        let mut all = Vec::with_capacity(layers.len());
        for (i, written) in layers.iter().enumerate() {
            let path = format!("{} ({word}), {label} {i}", self.path);
            let name = format!("{}.{branch}.{i}", self.name);
            let then_active = active(&layers[i + 1..], self.then_active);
            let LayerContext { input, classes, .. } = *self;
            let at = LayerContext { name, shape, input, classes, then_active, path: &path };
            let layer = (written.kind.complete)(written, &at)?;
            shape = layer.step(shape, format_args!("{path}"), &mut |_, _, _| {})?;
            all.push(layer);
        }
        Ok(all)
    }
}

/// Whether the next layer that is not a norm, a pool or a reshaping is a non-linearity. `after` is the answer
/// at the end of the list.
pub fn active(rest: &[WrittenLayer], after: bool) -> bool {
    for (i, layer) in rest.iter().enumerate() {
        match layer.kind.then {
            Downstream::Active => return true,
            Downstream::Linear => return false,
            Downstream::Passes => {}
            Downstream::Inside => {
                let after = active(&rest[i + 1..], after);
                return active(layer.branches.first().map_or(&[], Vec::as_slice), after);
            }
        }
    }
    after
}
